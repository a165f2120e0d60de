"""Static forms of the tree: JSON, layout, text and picture."""

import base64
import json
import os
import pathlib
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from mlx_jupyter.cache.view import MarkView, NodeView, PageView, TreeView
from mlx_jupyter.widgets.forms import clip_cells, tree_html, tree_svg, tree_text
from mlx_jupyter.widgets.icicle import Scale, layout, ruler
from mlx_jupyter.widgets.picture import COLOURS
from mlx_jupyter.widgets.tree_data import human_bytes, latest_branches, tree_json, visible

JS = pathlib.Path(__file__).parent.parent / "js"
FIXTURE = JS / "test" / "fixtures" / "demo.json"
ROW_BYTES = 46_080  # a token of SmolLM2-135M in float32


def node(key, start, end, text, *children, where="device", last=1, **more):
    """A node whose pages, cut at multiples of 256, are all in one place or in the given ones."""
    places = [where] if isinstance(where, str) else where
    cuts = [start, *range((start // 256 + 1) * 256, end, 256), end]
    pages = tuple(
        PageView(a, b, place, 0 if place in {"live", "gone"} else (b - a) * ROW_BYTES, last)
        for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))
        for place in [places[min(i, len(places) - 1)]]
    )
    tokens = np.arange(start, end, dtype=np.int32)
    return NodeView(key, start, end, tokens, children, pages, last_used=last, text=text, **more)


def demo_tree():
    """A system prompt shared by three conversations; six turns, a retry, one evicted branch."""
    turn = "<|im_end|>\n<|im_start|>"
    talk = node(
        9, 590, 816, f"{turn}user\nHow would I notice it?{turn}assistant\nAs a shorter wait before "
        f"the first word.{turn}user\nAnd on a GPU? 🚀{turn}assistant\nThere the copy is nearly free.",
        node(10, 816, 1104, f"{turn}user\nSo why evict?{turn}assistant\nBecause memory runs out: each "
             "token's rows cost 46 kB here, and a long document fills the budget in a minute.",
             where="live", active=True, uses=2, last=14, owners=("@demo", "In [11]"),
             marks=(MarkView(1104, "tip", "device", 9_400_000),)),
        node(11, 816, 880, f"{turn}user\nIs it lossless?{turn}assistant\nYes: bit for bit.",
             uses=1, last=10, owners=("In [10]",)),
        where="live", active=True, uses=4, last=14, owners=("In [5]", "In [9]"),
        marks=(MarkView(760, "prompt", "device", 9_400_000),),
    )  # fmt: skip
    first = node(
        2, 212, 402, f"What is a prefix cache?{turn}assistant\nA prefix cache keeps what the model "
        f"computed for the beginning of a prompt, so that …{turn}user\n",
        node(3, 402, 590, f"Give an example.{turn}assistant\nTwo cells that share a system prompt …",
             talk,
             node(12, 590, 668, f"{turn}user\nHow is it tested?{turn}assistant\nAgainst a cold run.",
                  uses=1, last=9, owners=("In [6]", "@tests")),
             where="live", active=True, uses=7, last=14, owners=("In [4]",)),
        node(4, 402, 415, f"Shorter.{turn}assistant\n", uses=1, last=5, owners=("In [4] retry",)),
        where="live", active=True, uses=9, last=14, owners=("In [3]",),
    )  # fmt: skip
    document = node(
        5, 212, 4608, "Here is a contract of 4,000 tokens.\n\nArticle 1\n\tThe parties agree that "
        + "the goods are delivered at the agreed time and place. " * 20 + "Sum it up in three lines.",
        node(6, 4608, 4790, f"{turn}assistant\n1. Delivery is on time. 2. …", where="host", uses=2,
             last=11, owners=("@contract", "In [7]")),
        node(7, 4608, 4674, f"{turn}assistant\nVersion française : les parties …", where="gone",
             uses=1, last=6, owners=("In [8]",)),
        where=["device"] * 5 + ["host"] * 6 + ["disk"] * 4 + ["gone"] * 2 + ["host"],
        uses=3, last=11,
        marks=(MarkView(4200, "periodic", "disk", 9_400_000),),
    )  # fmt: skip
    lost = node(
        13, 212, 360, "translate: 你好世界，今天天气很好 → English", where="gone", uses=1, last=2
    )
    system = node(
        1, 0, 212, "<|im_start|>system\nYou are a patient tutor. <b>Answer</b> in plain words.\n" * 2,
        first, document, lost, where="live", active=True, uses=14, last=14,
        marks=(MarkView(212, "system", "device", 9_400_000),),
    )  # fmt: skip
    root = NodeView(0, 0, 0, np.zeros(0, np.int32), (system,))
    stored = sum(n.nbytes for n in TreeView(root=root).nodes())
    return TreeView(
        model="smollm2-135m", root=root, live=1104, live_bytes=1280 * ROW_BYTES, stored_bytes=stored,
        budget=1_000_000_000, clock=14, layers=(("rows", 30),), version=42,
    )  # fmt: skip
