"""Static forms of the tree: JSON, layout, text and picture."""

import base64
import json
import os
import pathlib
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from mlx_jupyter.cache.view import MarkView, NodeView, PageView, StripView, TreeView
from mlx_jupyter.units import human_bytes
from mlx_jupyter.widgets.drawing import COLOURS
from mlx_jupyter.widgets.forms import clip_cells, tree_html, tree_svg, tree_text
from mlx_jupyter.widgets.icicle import Scale, layout, ruler
from mlx_jupyter.widgets.tree_data import (
    label,
    latest_branches,
    node_bytes,
    tree_json,
    visible,
)

JS = pathlib.Path(__file__).parent.parent / "js"
FIXTURE = JS / "test" / "fixtures" / "demo.json"
ROW_BYTES = 46_080  # a token of SmolLM2-135M in float32


def node(key, start, end, text, *children, where="device", last=1, **more):
    """A node whose pages, cut at multiples of 256, are all in one place or in the given ones."""
    places = [where] if isinstance(where, str) else where
    cuts = [start, *range((start // 256 + 1) * 256, end, 256), end]
    pages = tuple(
        PageView(a, b, place, 0 if place in {"live", "gone"} else (b - a) * ROW_BYTES, last)
        for i, (a, b) in enumerate(pairwise(cuts))
        for place in [places[min(i, len(places) - 1)]]
    )
    tokens = np.arange(start, end, dtype=np.int32)
    return NodeView(key, start, end, tokens, children, pages, last_used=last, text=text, **more)


def demo_tree():
    """A system prompt shared by three conversations; six turns, a retry, one evicted branch."""
    turn = "<|im_end|>\n<|im_start|>"
    talk = node(
        9,
        590,
        816,
        f"{turn}user\nHow would I notice it?{turn}assistant\nAs a shorter wait before "
        f"the first word.{turn}user\nAnd on a GPU? 🚀{turn}assistant\n"
        "There the copy is nearly free.",
        node(
            10,
            816,
            1104,
            f"{turn}user\nSo why evict?{turn}assistant\nBecause memory "
            "runs out: each token costs 46 kB here, and a document fills the budget.",
            where="live",
            active=True,
            uses=2,
            last=14,
            owners=("@demo", "In [11]"),
            marks=(MarkView(1104, "tip", "device", 9_400_000),),
        ),
        node(
            11,
            816,
            880,
            f"{turn}user\nIs it lossless?{turn}assistant\nYes: bit for bit.",
            uses=1,
            last=10,
            owners=("In [10]",),
        ),
        where="live",
        active=True,
        uses=4,
        last=14,
        owners=("In [5]", "In [9]"),
        marks=(MarkView(760, "prompt", "device", 9_400_000),),
    )
    first = node(
        2,
        212,
        402,
        f"What is a prefix cache?{turn}assistant\nA prefix cache keeps what the model "
        f"computed for the beginning of a prompt, so that …{turn}user\n",
        node(
            3,
            402,
            590,
            f"Give an example.{turn}assistant\nTwo cells with the same system prompt …",
            talk,
            node(
                12,
                590,
                668,
                f"{turn}user\nHow is it tested?{turn}assistant\nAgainst a cold run.",
                uses=1,
                last=9,
                owners=("In [6]", "@tests"),
            ),
            where="live",
            active=True,
            uses=7,
            last=14,
            owners=("In [4]",),
        ),
        node(4, 402, 415, f"Shorter.{turn}assistant\n", uses=1, last=5, owners=("In [4] retry",)),
        where="live",
        active=True,
        uses=9,
        last=14,
        owners=("In [3]",),
    )
    document = node(
        5,
        212,
        4608,
        "Here is a contract of 4,000 tokens.\n\nArticle 1\n\tThe parties agree that "
        + "the goods are delivered at the agreed time and place. " * 20
        + "Sum it up in three lines.",
        node(
            6,
            4608,
            4790,
            f"{turn}assistant\n1. Delivery is on time. 2. …",
            where="host",
            uses=2,
            last=11,
            owners=("@contract", "In [7]"),
        ),
        node(
            7,
            4608,
            4674,
            f"{turn}assistant\nVersion française : les parties …",
            where="gone",
            uses=1,
            last=6,
            owners=("In [8]",),
        ),
        where=["device"] * 5 + ["host"] * 6 + ["disk"] * 4 + ["gone"] * 2 + ["host"],
        uses=3,
        last=11,
        marks=(MarkView(4200, "periodic", "disk", 9_400_000),),
    )
    lost = node(
        13, 212, 360, "translate: 你好世界，今天天气很好 → English", where="gone", uses=1, last=2
    )
    system = node(
        1,
        0,
        212,
        "<|im_start|>system\nYou are a patient tutor. <b>Answer</b> plainly.\n" * 2,
        first,
        document,
        lost,
        where="live",
        active=True,
        uses=14,
        last=14,
        marks=(MarkView(212, "system", "device", 9_400_000),),
    )
    root = NodeView(0, 0, 0, np.zeros(0, np.int32), (system,))
    stored = sum(n.nbytes for n in TreeView(root=root).nodes())
    return TreeView(
        model="smollm2-135m",
        root=root,
        live=1104,
        live_bytes=1280 * ROW_BYTES,
        stored_bytes=stored,
        budget=1_000_000_000,
        clock=14,
        layers=(("rows", 30),),
        version=42,
    )


# Trees of any shape, with texts that try to break out.
TEXTS = st.one_of(
    st.text(max_size=300),
    st.sampled_from(
        [
            "<script>alert(1)</script>",
            "]]>",
            "👩‍👩‍👧 e\u0301",
            "\x00\x1b[31m",
            "\ud800",
            "\u202eabc",
            "&lt;\"'",
        ]
    ),
)
PLACES = st.sampled_from(["live", "device", "host", "disk", "gone"])
KINDS = st.sampled_from(
    ["system", "turn", "prompt", "answer", "branch", "periodic", "interrupt", "tip"]
)


@st.composite
def trees(draw, most=40):
    children = {}
    spans = {0: (0, 0)}
    for key in range(1, draw(st.integers(0, most)) + 1):
        parent = draw(st.integers(max(0, key - 6), key - 1))
        start = spans[parent][1]
        spans[key] = (start, start + draw(st.one_of(st.integers(1, 9), st.integers(1, 20_000))))
        children.setdefault(parent, []).append(key)

    def build(key):
        start, end = spans[key]
        return node(
            key,
            start,
            end,
            draw(TEXTS),
            *map(build, children.get(key, ())),
            where=draw(st.lists(PLACES, min_size=1, max_size=3)),
            last=draw(st.integers(0, 9)),
            owners=tuple(draw(st.lists(TEXTS, max_size=2))),
            active=draw(st.booleans()),
            uses=draw(st.integers(0, 9)),
            marks=(MarkView(end, draw(KINDS), "device", 5),) if draw(st.booleans()) else (),
        )

    roots = tuple(map(build, children.get(0, ())))
    root = NodeView(0, 0, 0, np.zeros(0, np.int32), roots)
    return TreeView(model=draw(TEXTS), root=root, version=draw(st.integers(0, 9)))


def overlap(a, b):
    return (
        a.x0 < b.x1 - 1e-6
        and b.x0 < a.x1 - 1e-6
        and a.lane < b.lane + b.lanes
        and b.lane < a.lane + a.lanes
    )


def test_fixture_of_the_javascript_tests_is_what_python_makes():
    tree = tree_json(demo_tree())
    placed = layout(tree, 900)
    boxes = [
        [b.node["id"], round(b.x0, 6), round(b.x1, 6), b.lane, b.lanes, b.depth]
        for b in placed.boxes
    ]
    made = {"snapshot": tree, "layout": {"width": 900, "lanes": placed.lanes, "boxes": boxes}}
    if os.environ.get("MLX_JUPYTER_WRITE_FIXTURES"):
        FIXTURE.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    assert json.loads(FIXTURE.read_text(encoding="utf-8")) == json.loads(json.dumps(made))


@given(trees())
@settings(max_examples=60, deadline=None)
def test_layout_is_total_and_without_overlap(view):
    tree = tree_json(view)
    placed = layout(tree, 800)
    assert [b.node["id"] for b in placed.boxes] == [n.id for n in view.nodes()]
    for i, box in enumerate(placed.boxes):
        assert -1e-6 <= box.x0 < box.x1 <= 800 + 1e-6
        assert box.lanes >= 1
        assert not any(overlap(box, other) for other in placed.boxes[i + 1 :])
    if placed.boxes:
        assert max(b.x1 for b in placed.boxes) == pytest.approx(800)


@given(trees())
@settings(max_examples=60, deadline=None)
def test_json_is_compact_and_safe_to_send(view):
    tree = tree_json(view)
    sent = json.dumps(tree, ensure_ascii=False).encode()  # a lone surrogate would raise
    assert len(sent) < 2000 + 3000 * max(1, len(tree["nodes"]))
    for made, given_ in zip(tree["nodes"], view.nodes(), strict=True):
        assert sum(end - start for start, end, *_ in made["runs"]) == given_.end - given_.start
        assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e]", made["text"])
        assert "tokens" not in made


@given(trees(), st.integers(40, 140))
@settings(max_examples=60, deadline=None)
def test_text_keeps_its_width_and_shows_every_node(view, width):
    lines = tree_text(view, width=width).split("\n")
    assert all(cell_len(line) <= width for line in lines)
    ranges = [f"{n.start}–{n.end}" for n in view.nodes()]
    if len(ranges) <= 30:
        assert [r for line in lines[3:] for r in re.findall(r"^[* ] +(\d+–\d+)", line)] == ranges


@given(trees(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_picture_is_valid_xml_of_shapes_and_text_only(view, dark):
    root = ET.fromstring(tree_svg(view, dark=dark))
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "title", "defs", "pattern", "path", "rect", "text"}
    assert not any(
        name.startswith("on") or "href" in name for e in root.iter() for name in e.attrib
    )


def test_picture_html_is_one_image_that_says_what_it_shows():
    found = re.fullmatch(
        r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)" width="960" style="[^"]+">',
        tree_html(demo_tree()),
    )
    assert found
    ET.fromstring(base64.b64decode(found[1]))
    assert found[2].startswith("Prefix cache of smollm2-135m: 5,325 of 6,051 tokens held")
    assert len(found[0]) < 60_000


def test_text_of_the_demo_tree():
    text = tree_text(demo_tree())
    first = text.splitlines()[3]
    assert re.match(r"\*     0–212   212  live +9\.40 MB    14  ▪system: You are", first)
    assert "◆ system 212" in first
    assert "│ │ └ ▪user: How is" in text
    assert "← In [4] retry" in text
    assert "* held by the live cache" in text
    assert "device+host+disk" in text
    assert "disk: stored on disk" in text
    assert "(1,974 on the host, 1,024 on disk)" in text.splitlines()[0]


def away_tree():
    """Pages, window rows and snapshots in memory and on disk, side by side."""
    leaf = node(
        2,
        300,
        900,
        "far",
        where=["device", "disk", "host"],
        marks=(MarkView(400, "turn", "device", 5), MarkView(900, "thinking", "disk", 0)),
        strips=(StripView(350, 400, 7, "device"), StripView(820, 900, 0, "disk")),
    )
    root = node(1, 0, 300, "near", leaf, where="live", marks=(MarkView(300, "system", "live", 0),))
    return TreeView(model="m", root=NodeView(0, 0, 0, np.zeros(0, np.int32), (root,)))


def test_what_lies_on_disk_is_told_apart_in_the_text():
    text = tree_text(away_tree(), width=140)
    near, far = text.splitlines()[3:5]
    assert "◆ system 300" in near
    assert "device+host+disk" in far
    assert "◆ turn 400  ◇ thinking 900" in far
    assert "≡ 50  ≡ 80 on disk" in far
    assert "◆ snapshot · ◇ snapshot on disk or in host memory · ≡ rows of sliding windows" in text
    assert all(cell_len(line) <= 60 for line in tree_text(away_tree(), width=60).splitlines())


def test_a_tree_in_memory_needs_no_legend_for_other_places():
    text = tree_text(TreeView(root=NodeView(0, 0, 0, np.zeros(0, np.int32), (node(1, 0, 9, "x"),))))
    assert "disk" not in text
    assert "◇" not in text


@pytest.mark.parametrize("dark", [False, True])
def test_what_lies_on_disk_is_told_apart_in_the_picture(dark):
    svg = tree_svg(away_tree(), dark=dark)
    told = [each.text for each in ET.fromstring(svg).iter() if each.text]
    for sign in (
        "disk: stored on disk",
        "host: stored in host memory",
        "thinking snapshot",
        "thinking snapshot stored on disk",
        "snapshot stored on disk",
        "window rows",
        "window rows stored on disk",
    ):
        assert sign in told
    assert "K" in told
    assert "?" not in told


def test_bytes_of_window_rows_are_the_nodes():
    far = tree_json(away_tree())["nodes"][1]
    assert far["strips"] == [(350, 400, "device", 7), (820, 900, "disk", 0)]
    assert node_bytes(far) == sum(run[3] for run in far["runs"]) + 5 + 7


def test_the_rulers_last_number_stays_within_the_card():
    view = TreeView(root=NodeView(0, 0, 0, np.zeros(0, np.int32), (node(1, 0, 3000, "x"),)))
    (last,) = [e for e in ET.fromstring(tree_svg(view)).iter() if e.text == "3,000"]
    assert last.get("text-anchor") == "end"


def test_an_empty_tree_says_what_to_do():
    assert "Run a %%llm cell" in tree_text(TreeView())
    assert "Run a %%llm cell" in tree_svg(TreeView())
    assert tree_json(TreeView())["nodes"] == []


def test_a_large_tree_is_cut_to_the_branches_that_matter():
    leaves = tuple(node(i, 10, 20 + i, f"leaf {i}", last=i, active=i == 5) for i in range(2, 302))
    root = NodeView(
        0, 0, 0, np.zeros(0, np.int32), (node(1, 0, 10, "trunk", *leaves, active=True),)
    )
    view = TreeView(root=root)
    kept, hidden = latest_branches(tree_json(view), 24)
    assert hidden == 276
    assert {n["id"] for n in kept["nodes"]} == {1, 5, *range(279, 302)}
    assert "276 branches used less recently, not drawn" in tree_svg(view)
    text = tree_text(view)
    assert "… and 260 branches used less recently" in text
    assert len(text.splitlines()) < 50


def test_deep_trees_need_no_recursion():
    made = node(5000, 4999, 5000, "tip")
    for key in range(4999, 0, -1):
        made = node(key, key - 1, key, "x", made)
    view = TreeView(root=NodeView(0, 0, 0, np.zeros(0, np.int32), (made,)))
    assert len(layout(tree_json(view), 900).boxes) == 5000
    assert "4920 nodes more" in tree_text(view).replace(",", "")
    assert len(tree_svg(view)) < 3_000_000


def test_hidden_characters_become_visible():
    assert visible("a\nb\tc\rd") == "a↵b⇥c␍d"
    assert visible("\x00\x1b\u202e\ud800\ufeff") == "\\x00\\x1b\\u202e\\ud800\\ufeff"
    assert visible("👩‍👩‍👧 é 你好") == "👩‍👩‍👧 é 你好"


def test_labels_shorten_control_tokens():
    assert label("<|im_end|>↵<|im_start|>user↵Hi<b>") == "▪user: Hi<b>"
    assert label("so.<end_of_turn>↵<start_of_turn>model↵") == "so. ▪model:"
    assert label("a < b |> c") == "a < b |> c"
    assert label("") == "(no text)"


def test_narrow_tall_boxes_have_their_text_upright():
    leaves = [node(100 + i, 2000, 2100, f"leaf {i}") for i in range(9)]
    made = node(29, 1999, 2000, "twig", *leaves)
    for key in range(28, 0, -1):
        made = node(key, (key - 1) * 70, key * 70 if key < 28 else 1999, f"trunk {key}", made)
    view = TreeView(root=NodeView(0, 0, 0, np.zeros(0, np.int32), (made,)))
    assert "rotate(90)" in tree_svg(view)


def test_clipping_counts_terminal_cells():
    assert clip_cells("你好世界", 5) == "你好…"
    assert clip_cells("abc", 3) == "abc"
    assert clip_cells("abcd", 3) == "ab…"
    assert clip_cells("abcd", 0) == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (14_249_999, "14.2 MB"), (999_600, "1.00 MB")],
)
def test_bytes_for_people(number, text):
    assert human_bytes(number) == text


def test_ruler_ticks_are_round_and_apart():
    ticks = ruler(Scale((0, 100_000), (0.0, 900.0)))
    assert [p for p, _ in ticks] == [i * 10_000 for i in range(11)]
    assert ruler(Scale((0, 3), (0.0, 900.0)))[-1] == (3, 900.0)


def contrast(a, b):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("shade", ["light", "dark"])
def test_contrast_meets_aa(shade):
    colours = COLOURS[shade]
    for name in ("live", "device", "host", "disk", "gone"):
        tint = colours[f"{name}-tint"]
        assert contrast(colours["text"], tint) >= 4.5
        assert contrast(colours[name], tint) >= 3
        assert contrast(colours[name], colours["card"]) >= 3
    assert contrast(colours["muted"], colours["card"]) >= 4.5
    assert contrast(colours["line"], colours["card"]) >= 3


def test_palette_is_the_design_language_of_the_widgets():
    css = (JS / "src" / "design" / "tokens.css").read_text(encoding="utf-8")
    pairs = dict(re.findall(r"--mj-([\w-]+): light-dark\(([^)]+)\)", css))
    for name in ("muted", "line", "active", "live", "device", "host", "disk", "gone"):
        assert pairs[name] == f"{COLOURS['light'][name]}, {COLOURS['dark'][name]}"
    for name in ("live-tint", "device-tint", "host-tint", "disk-tint"):
        assert pairs[name] == f"{COLOURS['light'][name]}, {COLOURS['dark'][name]}"
