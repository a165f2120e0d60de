"""The pages widget in JupyterLab and Notebook: live, by keyboard, with a budget to try."""

from __future__ import annotations

import re

import pytest
from nbformat.v4 import new_code_cell, new_notebook

FAKE = """
import fakes, mlx_jupyter
engine = fakes.fake_engine(fakes.FakeModel(context=100_000), cache_bytes=10_000_000)
mlx_jupyter.runtime.set_engine(engine)
"""
ASK = """
def ask(name, seed):
    engine.generate(tokens=fakes.letters(1000, seed), max_tokens=4, owner=name)
"""
SLOW = """
import threading
holding, on = threading.Event(), threading.Event()
def block(_tokens):
    engine._shop.find(None).model.before_call = None
    holding.set()
    on.wait(60)
engine._shop.find(None).model.before_call = block
ticket = engine.submit(engine.request(tokens=fakes.letters(900, 9), max_tokens=4))
holding.wait(60)
"""

lab_only = pytest.mark.parametrize("server", ["lab"], indirect=True)


@pytest.fixture
def opened(server, tab, request):
    """A notebook with an engine of two conversations, and the open widget."""
    name = re.sub(r"\W", "-", request.node.name) + ".ipynb"
    cells = [new_code_cell(source) for source in (FAKE, "%load_ext mlx_jupyter", ASK)]
    server.write(name, new_notebook(cells=cells))
    notebook = server.open(tab, name)
    for index in range(3):
        assert notebook.run(index), notebook.outputs(index)
    notebook.do("ask('@a', 1); ask('@b', 2)")
    notebook.do("%llm pages")
    tab.get_by_test_id("pages-grid").wait_for()
    yield notebook
    notebook.end()


def counted(page, where, count):
    """Wait until so many pages are there."""
    found = page.locator(f"[data-testid=pages-count-{where}][data-count='{count}']")
    found.wait_for()


def row(page, group):
    """The first row of a conversation's pages."""
    return page.locator(f"[data-testid=pages-row][data-kind=rows][data-group='{group}']").first


def test_pages_move_while_one_looks_and_a_budget_is_tried_first(opened):
    notebook = opened
    page = notebook.page
    counted(page, "live", 4)
    counted(page, "device", 4)
    assert row(page, "@a").get_by_test_id("pages-run").get_attribute("data-where") == "device"

    # A cell that goes back to @a: its pages become live, those of @b leave the live cache.
    notebook.do("ask('@a', 1)")
    row(page, "@a").locator("[data-where=live]").wait_for()
    row(page, "@b").locator("[data-where=device]").wait_for()
    notebook.do("ask('@c', 3)")
    row(page, "@c").wait_for()
    counted(page, "device", 8)
    page.wait_for_function(
        "() => /new tokens/.test(document.querySelector('[data-testid=pages-said]').textContent)"
    )

    # The budget, by keyboard: first what would go, then it goes.
    slider = page.get_by_test_id("pages-budget")
    slider.focus()
    before = slider.get_attribute("aria-valuetext")
    slider.press("ArrowLeft")  # not the application's shortcut
    assert slider.get_attribute("aria-valuetext") != before
    slider.press("Home")
    page.get_by_test_id("pages-going").first.wait_for()
    assert "would go" in page.get_by_test_id("pages-told").inner_text()
    counted(page, "device", 8)
    slider.press("Escape")
    page.get_by_test_id("pages-going").first.wait_for(state="detached")
    assert page.get_by_test_id("pages-apply").is_disabled()
    slider.press("Home")
    page.get_by_test_id("pages-going").first.wait_for()
    slider.press("Enter")
    counted(page, "gone", 12)
    assert "was freed" in page.get_by_test_id("pages-told").inner_text()
    budget = int(notebook.do("engine.tree().budget")[0]["data"]["text/plain"])
    assert budget < 10_000


def test_the_grid_works_with_the_keyboard(opened):
    notebook = opened
    page = notebook.page
    cells = notebook.count()
    grid = page.get_by_test_id("pages-grid")
    grid.focus()
    grid.press("ArrowDown")
    cell = page.get_by_role("gridcell", selected=True)
    assert "@a: tokens 0 to 256, device" in (cell.get_attribute("aria-label") or "")
    grid.press("ArrowRight")
    grid.press("ArrowDown")
    assert "@b: tokens 256 to 512, live" in (cell.get_attribute("aria-label") or "")
    assert grid.get_attribute("aria-activedescendant") == cell.get_attribute("id")
    assert page.get_by_test_id("pages-detail-of").inner_text() == "@b"
    for key in ("b", "x", "a"):  # the application's shortcuts for adding and cutting cells
        grid.press(key)
    assert notebook.count() == cells
    grid.press("Escape")
    assert cell.count() == 0


@lab_only
def test_a_preview_waits_for_a_request_and_two_views_agree(opened):
    notebook = opened
    page = notebook.page
    notebook.do("%llm pages")
    page.wait_for_function(
        "() => document.querySelectorAll('[data-testid=pages-grid]').length === 2"
    )
    notebook.do(SLOW)
    slider = page.get_by_test_id("pages-budget").first
    slider.focus()
    slider.press("Home")
    page.get_by_text("Waiting for the running request").wait_for()
    assert page.get_by_test_id("pages-going").count() == 0
    notebook.do("on.set(); ticket.wait()")
    page.get_by_test_id("pages-going").first.wait_for()
    page.wait_for_function(
        """() => {
            const seen = [...document.querySelectorAll('[data-testid=pages-summary]')];
            return new Set(seen.map((each) => each.textContent)).size === 1
                && /12 pages/.test(seen[0].textContent);
        }"""
    )


@lab_only
def test_after_a_reload_the_view_is_up_to_date_and_live(opened, server):
    notebook = opened
    page = notebook.page
    notebook.save()
    notebook.do("ask('@c', 3)")
    name = page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
    again = server.open(page, name)
    row(page, "@c").wait_for()
    again.do("ask('@d', 4)")
    row(page, "@d").wait_for()


@lab_only
def test_a_budget_is_previewed_while_a_cell_runs(opened):
    notebook = opened
    page = notebook.page
    running = notebook.insert("import threading; threading.Event().wait(60)")
    notebook.start(running)
    slider = page.get_by_test_id("pages-budget")
    slider.focus()
    slider.press("Home")
    page.get_by_test_id("pages-going").first.wait_for()
    notebook.interrupt()
    assert not notebook.wait(running, timeout=10)
