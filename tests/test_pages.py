"""Pages by conversation: their data, their static forms, the widget's Python half."""

import json
import os
import re
import threading
import weakref
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given, settings
from rich.cells import cell_len

from fakes import fake_engine, letters
from mlx_jupyter.cache.preview import Leaving, Preview
from mlx_jupyter.cache.view import StripView, TreeView
from mlx_jupyter.engine.history import Sample
from mlx_jupyter.engine.status import MemoryUse
from mlx_jupyter.engine.storage import StoreUse
from mlx_jupyter.errors import EngineClosed
from mlx_jupyter.widgets import PagesView
from mlx_jupyter.widgets.pages import PagesReport, Questions, pages_report
from mlx_jupyter.widgets.pages_data import cells, grouped, pages_json, preview_json, totals
from mlx_jupyter.widgets.pages_forms import pages_html, pages_svg, pages_text
from test_forms import JS, demo_tree, node, trees

FIXTURE = JS / "test" / "fixtures" / "pages.json"
LIVE = "application/vnd.jupyter.widget-view+json"


class Told:
    """What ``pages_json`` needs of a status."""

    def __init__(self, view, files=12):
        self.memory = MemoryUse(
            weights=538_000_000,
            live=view.live_bytes,
            stored=view.stored_bytes,
            budget=view.budget,
            cache=3_000_000,
            limit=8_000_000_000,
        )
        self.store = StoreUse(nbytes=47_000_000, files=files)


def demo_view():
    """The demo tree, with window rows at its first node."""
    view = demo_tree()
    system = replace(view.root.children[0], strips=(StripView(0, 212, 1_000_000),))
    return replace(view, root=replace(view.root, children=(system,)))


def demo():
    view = demo_view()
    samples = [
        Sample(i, 10.0 + i, 538_000_000, 9_000_000 * i, 20_000_000 * i, i, view.budget, 8 * 10**9)
        for i in range(4)
    ]
    return pages_json(view, Told(view), samples)


def test_fixture_of_the_javascript_tests_is_what_python_makes():
    data = demo()
    groups = [
        {
            "title": group.title,
            "pages": [list(cell) for cell in group.pages],
            "strips": len(group.strips),
            "marks": len(group.marks),
        }
        for group in grouped(data)
    ]
    made = {"document": data, "groups": groups}
    if os.environ.get("MLX_JUPYTER_WRITE_FIXTURES"):
        FIXTURE.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    assert json.loads(FIXTURE.read_text(encoding="utf-8")) == json.loads(json.dumps(made))


@given(trees())
@settings(max_examples=60, deadline=None)
def test_every_page_is_in_one_group_and_nothing_is_lost(view):
    data = pages_json(view, Told(view), ())
    groups = grouped(data)
    pages = [page for n in view.nodes() for page in n.pages]
    drawn = [cell for group in groups for cell in group.pages]
    assert sum(cell[1] - cell[0] for cell in drawn) == sum(p.end - p.start for p in pages)
    assert len(drawn) == len(pages) == totals(data)[0]
    assert sorted(cell[:3] for cell in drawn) == sorted(
        (p.start, p.end, p.residence) for p in pages
    )
    marks = [m for n in view.nodes() for m in n.marks if m.nbytes]
    assert sum(len(group.marks) for group in groups) == len(marks)
    assert len({tuple(sorted(group.owners)) for group in groups}) == len(groups)
    assert not any(not group.owners for group in groups[:-1])
    sent = json.dumps(data, ensure_ascii=False)
    sent.encode()  # a lone surrogate would raise
    assert "null" not in re.sub(r'"(?:[^"\\]|\\.)*"', "", sent)  # patches remove with it


def test_groups_are_named_after_who_uses_them():
    shared = node(
        1,
        0,
        600,
        "system",
        node(2, 600, 900, "a", owners=("@a",)),
        node(3, 600, 700, "b", node(4, 700, 800, "c", owners=("In [4]",)), owners=("@b",)),
        node(5, 600, 640, "nobody's"),
    )
    view = TreeView(root=replace(TreeView().root, children=(shared,)))
    groups = grouped(pages_json(view, Told(view), ()))
    assert [(g.title, g.edges) for g in groups] == [
        ("shared by @a, @b, In [4]", ["1"]),
        ("@a", ["2"]),
        ("shared by @b, In [4]", ["3"]),
        ("In [4]", ["4"]),
        ("left over", ["5"]),
    ]
    assert [cell[:2] for cell in groups[0].pages] == [(0, 256), (256, 512), (512, 600)]
    many = replace(shared, owners=tuple(f"@{i}" for i in range(5)))
    view = TreeView(root=replace(TreeView().root, children=(many,)))
    assert grouped(pages_json(view, Told(view), ()))[0].title == "shared by 8: @0, @1, @2 …"


def test_pages_of_a_run_share_its_bytes():
    assert cells((100, 600, "device", 500), 256) == [
        (100, 256, "device", 156),
        (256, 512, "device", 256),
        (512, 600, "device", 88),
    ]


def test_a_preview_joins_neighbours_of_one_fate():
    told = Preview(
        5,
        (
            Leaving(1, "rows", 512, 600, 88, "gone"),
            Leaving(1, "rows", 256, 512, 256, "gone"),
            Leaving(1, "rows", 0, 256, 256, "disk"),
            Leaving(1, "state", 256, 256, 9, "gone"),
            Leaving(2, "window", 0, 10, 7, "gone"),
        ),
        900,
        284,
    )
    assert preview_json(told) == {
        "budget": 5,
        "before": 900,
        "after": 284,
        "leaving": [
            (1, "rows", 0, 256, 256, "disk"),
            (1, "rows", 256, 600, 344, "gone"),
            (1, "state", 256, 256, 9, "gone"),
            (2, "window", 0, 10, 7, "gone"),
        ],
    }


@given(trees())
@settings(max_examples=60, deadline=None)
def test_text_keeps_its_width(view):
    for width in (40, 70, 140):
        lines = pages_text(pages_json(view, Told(view), ()), width=width).split("\n")
        assert all(cell_len(line) <= width for line in lines)


def test_text_of_the_demo_tree():
    text = pages_text(demo())
    lines = text.splitlines()
    assert lines[0].startswith("smollm2-135m · 34 pages · 5,325 tokens held · ")
    assert lines[1] == (
        "weights 538 MB · live 59.0 MB · stored 232 MB · free 3.00 MB · "
        "on disk 47.0 MB · limit 8.00 GB"
    )
    contract = next(line for line in lines if line.startswith("shared by @contract"))
    assert re.search(r"▓+▒+░+▒", contract)
    assert "  window rows" in text
    assert "█ live  ▓ device  ▒ host  ░ disk  · gone" in lines[-1]


def test_nothing_cached_says_what_to_do():
    data = pages_json(TreeView(), Told(TreeView()), ())
    assert "Run a %%llm cell" in pages_text(data)
    assert "Run a %%llm cell" in pages_svg(data)


def test_many_conversations_are_cut_to_some():
    made = tuple(node(i, 0, 300, "x", owners=(f"In [{i}]",)) for i in range(1, 100))
    view = TreeView(root=replace(TreeView().root, children=made))
    data = pages_json(view, Told(view), ())
    assert "… and 39 conversations more" in pages_text(data)
    assert "… and 69 conversations more, not drawn" in pages_svg(data)


def test_a_long_conversation_is_drawn_in_part():
    view = TreeView(root=replace(TreeView().root, children=(node(1, 0, 4000 * 256, "x"),)))
    data = pages_json(view, Told(view), ())
    assert len(json.dumps(data["edges"])) < 300
    assert "3,400 more" in pages_svg(data)
    assert "(a sign is" in pages_text(data)


@given(trees())
@settings(max_examples=40, deadline=None)
def test_picture_is_valid_xml_of_shapes_and_text_only(view):
    for dark in (False, True):
        root = ET.fromstring(pages_svg(pages_json(view, Told(view), ()), dark=dark))
        tags = {element.tag.rpartition("}")[2] for element in root.iter()}
        assert tags <= {"svg", "title", "defs", "pattern", "path", "rect", "text"}


def test_picture_of_the_demo_shows_memory_and_every_residence():
    svg = pages_svg(demo())
    for told in ("budget 1.00 GB", "weights 538 MB", "on disk 47.0 MB", "host: 1,974 tokens"):
        assert told in svg
    assert re.match(r'<img src="data:image/svg\+xml;base64,', pages_html(demo()))


# --- the widget -------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch):
    found = []
    monkeypatch.setattr(
        PagesView, "send", lambda self, content, buffers=None: found.append(content)
    )
    return found


def hear(widget, **content):
    widget._handle_custom_msg(content, [])


def test_a_front_end_that_asks_gets_the_present(engine, sent):
    view = PagesView(engine)
    assert view.get_state()["snapshot"]["document"]["edges"] == {}
    engine.generate(tokens=letters(300), max_tokens=2, owner="@a")
    document = view.get_state("snapshot")["snapshot"]["document"]
    (edge,) = document["edges"].values()
    assert edge["owners"] == ["@a"]
    assert edge["runs"][0][2] == "live"
    assert sent == []


def until(found, wanted):
    """The first message of a kind; the feed's own thread sends it."""
    pause = threading.Event()
    for _ in range(600):
        for message in found:
            if wanted(message):
                return message
        pause.wait(0.05)
    raise AssertionError(found)


def test_an_open_view_is_told_what_changes(engine, sent):
    view = PagesView(engine)
    number = view.get_state()["snapshot"]["number"]
    hear(view, type="open", view="v", number=number)
    engine.generate(tokens=letters(300), max_tokens=2, owner="@a")
    until(sent, lambda m: m["type"] == "patch" and "edges" in m["patch"])
    numbers = [message["number"] for message in sent]
    assert numbers == [number + 1 + i for i in range(len(sent))]
    hear(view, type="close", view="v")
    assert view.feed.views == 0


def test_a_budget_is_previewed_then_applied(engine, sent):
    view = PagesView(engine)
    engine.generate(tokens=letters(600), max_tokens=2, owner="@a")
    engine.generate(tokens=letters(600, 1), max_tokens=2, owner="@b")
    before = engine.tree()
    hear(view, type="preview", budget=before.live_bytes, ask=1)
    told = until(sent, lambda m: m["type"] == "preview")
    assert told["ask"] == 1
    assert {row[5] for row in told["leaving"]} == {"gone"}
    assert engine.tree().version == before.version
    hear(view, type="apply", budget=before.live_bytes, ask=2)
    told = until(sent, lambda m: m["type"] == "apply")
    assert told == {"type": "apply", "ask": 2, "budget": before.live_bytes, "freed": told["freed"]}
    assert engine.tree().budget == before.live_bytes
    assert engine.tree().live_bytes + engine.tree().stored_bytes <= before.live_bytes


@pytest.mark.parametrize(
    "content",
    [
        {"type": "preview", "budget": -1, "ask": 1},
        {"type": "preview", "budget": "much", "ask": 1},
        {"type": "apply", "ask": 1},
        {"type": "drop everything"},
        {"type": None},
        {},
    ],
)
def test_what_makes_no_sense_is_passed_over(engine, sent, content):
    view = PagesView(engine)
    hear(view, **content)
    assert sent == []
    assert engine.status().memory.budget == engine.tree().budget


def test_of_previews_that_wait_the_last_is_answered():
    going, on, answered, done = (threading.Event() for _ in range(4))
    said = []

    def answer(question):
        going.set()
        on.wait(60)
        if question["ask"] == 5:
            raise EngineClosed
        return {"budget": question["budget"]}

    def send(message):
        said.append(message)
        if len(said) == 4:
            done.set()

    questions = Questions(answer, send)
    questions.put({"type": "preview", "budget": 1, "ask": 1})
    assert going.wait(60)
    questions.put({"type": "preview", "budget": 2, "ask": 2})
    questions.put({"type": "preview", "budget": 3, "ask": 3})
    questions.put({"type": "apply", "budget": 3, "ask": 4})
    questions.put({"type": "preview", "budget": 3, "ask": 5})
    on.set()
    assert done.wait(60)
    assert [message["ask"] for message in said] == [1, 3, 4, 5]
    assert "fault" in said[-1]
    assert not answered.is_set()


def test_a_view_keeps_no_engine_alive(sent):
    engine = fake_engine()
    view = PagesView(engine)
    gone = weakref.ref(engine)
    engine.close()
    del engine
    assert gone() is None
    assert view.get_state()["snapshot"]["document"]["model"] == "model"
    hear(view, type="preview", budget=1, ask=1)
    assert "fault" in until(sent, lambda m: m["type"] == "preview")


def test_report_and_bundle_have_their_static_forms(engine, sent):
    engine.generate(tokens=letters(300), max_tokens=2, owner="@a")
    report = pages_report(engine)
    assert isinstance(report, PagesReport)
    assert report._repr_mimebundle_() == {
        "text/plain": pages_text(report.data),
        "text/html": pages_html(report.data),
    }
    assert set(report.live()[0]) == {LIVE, "text/plain"}
    data, _ = PagesView(engine)._repr_mimebundle_()
    assert set(data) == {LIVE, "text/plain", "text/html"}
    assert "@a" in data["text/plain"]
