"""Cells, interrupts, restarts and the tree in both applications, on the fake model."""

from __future__ import annotations

import re
import time

import pytest
from nbformat.v4 import new_code_cell, new_notebook

FAKE = """
import time, fakes, mlx_jupyter
def pace(tokens):
    time.sleep(0.02)
model = fakes.FakeModel()
model.before_call = pace
mlx_jupyter.runtime.set_engine(fakes.fake_engine(model))
"""
LOAD = "%load_ext mlx_jupyter"
QUESTIONS = [
    "%%llm --max 20 -s shared\nThe first question.",
    "%%llm --max 20 -s shared\nThe second question.",
    "%%llm @chat --max 20\nAnother beginning.",
]
ENDLESS = "%%llm --max 5000\nGo on."
TREE = "%llm tree"

STREAMING = r"^[a-z ]{10}"
"""The fake model writes lower-case letters and blanks; progress begins with a capital."""

lab_only = pytest.mark.parametrize("server", ["lab"], indirect=True)


@pytest.fixture
def opened(server, tab, request):
    """A notebook whose first two cells, the fake engine and the extension, have run."""
    name = re.sub(r"\W", "-", request.node.name) + ".ipynb"
    cells = [new_code_cell(source) for source in (FAKE, LOAD)]
    path = server.write(name, new_notebook(cells=cells))
    notebook = server.open(tab, name)
    for index in range(2):
        assert notebook.run(index), notebook.outputs(index)
    yield notebook, path
    notebook.end()


def ask(notebook, source):
    """Run a new cell; what the page shows of it."""
    index = notebook.insert(source)
    assert notebook.run(index), notebook.outputs(index)
    return notebook.wait_for_text(index, timeout=5)  # Markdown is drawn a moment later


def test_interrupt_gives_the_prompt_back_and_keeps_the_text(opened):
    notebook, _ = opened
    running = notebook.insert(ENDLESS)
    notebook.start(running)
    notebook.wait_for_text(running, STREAMING, timeout=10)
    started = time.monotonic()
    notebook.interrupt()
    assert not notebook.wait(running, timeout=10)
    assert time.monotonic() - started < 3
    assert notebook.wait_for_text(running, r"[a-z ]{10}\s+interrupted", timeout=5)
    assert "reused" in ask(notebook, ENDLESS.replace("5000", "10"))


@lab_only
def test_an_interrupted_cell_stops_the_queue(opened):
    notebook, _ = opened
    running, queued = notebook.insert(ENDLESS), notebook.insert("print('ran')")
    notebook.start(running)
    notebook.start(queued)
    notebook.wait_for_text(running, STREAMING, timeout=10)
    notebook.interrupt()
    notebook.wait(queued, timeout=10)
    assert notebook.outputs(queued) == []


@lab_only
def test_restart_and_load_again(opened):
    notebook, _ = opened
    ask(notebook, QUESTIONS[0])
    notebook.restart()
    assert notebook.run(0)
    assert notebook.run(1)
    assert "tokens" in ask(notebook, QUESTIONS[0])


def test_the_tree_works_with_the_keyboard(opened):
    notebook, _ = opened
    for question in QUESTIONS:
        ask(notebook, question)
    ask(notebook, TREE)
    tree = notebook.page.get_by_test_id("trie-tree")
    tree.wait_for()
    assert tree.get_by_role("treeitem").count() > 2

    cells = notebook.count()
    tree.focus()
    tree.press("Home")
    first = tree.get_attribute("aria-activedescendant")
    assert first
    tree.press("ArrowRight")
    second = tree.get_attribute("aria-activedescendant")
    assert second
    assert second != first
    tree.press("Enter")  # zooms on it; must not start editing the cell
    assert not notebook.page.get_by_test_id("trie-zoom-fit").is_disabled()
    tree.press("0")
    assert notebook.page.get_by_test_id("trie-zoom-fit").is_disabled()
    tree.press("Escape")
    assert tree.get_attribute("aria-activedescendant") is None
    for key in ("b", "x", "a"):  # the application's shortcuts for adding and cutting cells
        tree.press(key)
    assert notebook.count() == cells


def test_a_reopened_file_shows_the_answers_and_a_picture_of_the_tree(opened, server, chrome):
    notebook, path = opened
    shown = [ask(notebook, question) for question in QUESTIONS]
    ask(notebook, TREE)
    notebook.page.get_by_test_id("trie-tree").wait_for()
    notebook.save()
    notebook.end()

    context = chrome.new_context()
    again = server.open(context.new_page(), path.name)
    index = 2
    for text in shown:
        assert again.text(index).split() == text.split()
        index += 1
    again.show(index)
    picture = again.page.locator("img[src^='data:image/svg+xml']")
    picture.wait_for()
    assert picture.evaluate("image => image.naturalWidth") > 100
    assert "Prefix cache" in (picture.get_attribute("alt") or "")
    context.close()
