"""The prefix cache's description as compact JSON, the one input of every drawing of the tree.

Promises: parents come before children and siblings stay in their order, so that a reader needs no
recursion; texts are clipped and free of control characters, so that they can be shown anywhere;
token ids never leave the kernel. Fields that would say nothing (no marks, not active) are left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NotRequired, TypedDict

from rich.cells import cell_len

from mlx_jupyter.units import human_bytes

if TYPE_CHECKING:
    from mlx_jupyter.cache.view import NodeView, PageView, StripView, TreeView

LABEL_CHARS = 200
TAIL_CHARS = 60
EMPTY = "Nothing is cached yet. Run a %%llm cell, then look again."
RESIDENCES = ("live", "device", "host", "disk", "gone")
MEANING = {
    "live": "in the model's cache",
    "device": "stored on the device",
    "host": "stored in host memory",
    "disk": "stored on disk",
    "gone": "to be recomputed",
}
"""The same words as in ``js/src/lib/model.ts``."""

AWAY = ("host", "disk")
"""Where something lies that is read before it is used."""
PLACE = {"host": "on the host", "disk": "on disk"}

_NAMED = {"\n": "↵", "\t": "⇥", "\r": "␍"}
# Controls, invisible formatting that can reorder or hide text, lone surrogates, non-characters.
_UNSHOWABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)

# Chat templates' control tokens and the line ends after them: noise where room is short.
_CONTROL = re.compile(r"(?:(?:<\|[^|<>]{1,32}\|>|<(?:start|end)_of_turn>|</?s>)[↵ ]*)+")
_ROLE = re.compile("▪(system|user|assistant|model|tool)↵+")

Run = tuple[int, int, str, int]
"""Neighbouring pages of one residence: start, end, residence, bytes."""

Mark = tuple[int, str, str, int]
"""A snapshot: offset, kind, residence, bytes."""


class NodeJson(TypedDict):
    """One edge of the tree."""

    id: int
    parent: int
    start: int
    end: int
    text: str
    tail: NotRequired[str]
    runs: list[Run]
    strips: NotRequired[list[Run]]
    marks: NotRequired[list[Mark]]
    uses: int
    used: int
    owners: NotRequired[list[str]]
    active: NotRequired[bool]


class TreeJson(TypedDict):
    """A whole prefix cache at one moment."""

    version: int
    model: str
    alt: str
    live: int
    live_bytes: int
    stored_bytes: int
    budget: int
    page_size: int
    clock: int
    layers: list[tuple[str, int]]
    nodes: list[NodeJson]


def tree_json(view: TreeView) -> TreeJson:
    """The description as JSON-able data, without token ids."""
    nodes: list[NodeJson] = []
    stack = [(child, view.root.id) for child in reversed(view.root.children)]
    while stack:
        node, parent = stack.pop()
        nodes.append(_node_json(node, parent))
        stack.extend((child, node.id) for child in reversed(node.children))
    tree = TreeJson(
        version=view.version,
        model=visible(view.model),
        alt="",
        live=view.live,
        live_bytes=view.live_bytes,
        stored_bytes=view.stored_bytes,
        budget=view.budget,
        page_size=view.page_size,
        clock=view.clock,
        layers=[(kind, count) for kind, count in view.layers],
        nodes=nodes,
    )
    tree["alt"] = alt_text(tree)
    return tree


def _node_json(node: NodeView, parent: int) -> NodeJson:
    made = NodeJson(
        id=node.id,
        parent=parent,
        start=node.start,
        end=node.end,
        text=clip_chars(node.text, LABEL_CHARS),
        runs=page_runs(node.pages),
        uses=node.uses,
        used=node.last_used,
    )
    if len(node.text) > LABEL_CHARS:
        made["tail"] = "…" + visible(node.text[-TAIL_CHARS:])
    if node.strips:
        made["strips"] = page_runs(node.strips)
    if node.marks:
        made["marks"] = [(m.at, m.kind, m.residence, m.nbytes) for m in node.marks]
    if node.owners:
        made["owners"] = [clip_chars(owner, TAIL_CHARS) for owner in node.owners]
    if node.active:
        made["active"] = True
    return made


def page_runs(pages: tuple[PageView, ...] | tuple[StripView, ...]) -> list[Run]:
    """Neighbouring pages or strips of one residence joined, their bytes added."""
    runs: list[Run] = []
    for page in pages:
        if runs and runs[-1][2] == page.residence and runs[-1][1] == page.start:
            start, _, residence, nbytes = runs[-1]
            runs[-1] = (start, page.end, residence, nbytes + page.nbytes)
        else:
            runs.append((page.start, page.end, page.residence, page.nbytes))
    return runs


def visible(text: str) -> str:
    """The text on one line, with every control or hidden character made visible."""
    return _UNSHOWABLE.sub(_show, text)


def _show(match: re.Match[str]) -> str:
    char = match[0]
    code = ord(char)
    return _NAMED.get(char) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def label(text: str) -> str:
    """A visible text for a narrow place.

    Each run of a template's control tokens becomes one small square, and a role after it is written
    as in a play.
    """
    return _ROLE.sub(r" ▪\1: ", _CONTROL.sub("▪", text)).strip() or "(no text)"


def clip_chars(text: str, limit: int) -> str:
    """``visible`` text of at most ``limit`` characters of the original, with an ellipsis if cut."""
    return visible(text) if len(text) <= limit else visible(text[: limit - 1]) + "…"


def latest_branches(tree: TreeJson, limit: int) -> tuple[TreeJson, int]:
    """The tree cut down to ``limit`` branches, and how many were left out.

    Kept are the active branch, then those used last.
    """
    nodes = tree["nodes"]
    hidden = leaf_count(tree) - limit
    if hidden <= 0:
        return tree, 0
    parents = {node["parent"] for node in nodes}
    by_id = {node["id"]: node for node in nodes}
    leaves = [node for node in nodes if node["id"] not in parents]
    leaves.sort(key=lambda node: (node.get("active", False), node["used"]), reverse=True)
    kept: set[int] = set()
    for leaf in leaves[:limit]:
        node: NodeJson | None = leaf
        while node is not None and node["id"] not in kept:
            kept.add(node["id"])
            node = by_id.get(node["parent"])
    return TreeJson(**{**tree, "nodes": [n for n in nodes if n["id"] in kept]}), hidden


def held_tokens(node: NodeJson) -> int:
    """Tokens of the edge whose rows are somewhere."""
    return sum(end - start for start, end, residence, _ in node["runs"] if residence != "gone")


def node_bytes(node: NodeJson) -> int:
    """Bytes of its own that the node's pages, window rows and snapshots hold."""
    things = (*node["runs"], *node.get("strips", ()), *node.get("marks", ()))
    return sum(thing[3] for thing in things)


def leaf_count(tree: TreeJson) -> int:
    """Branches: nodes without children."""
    return len(tree["nodes"]) - len(
        {node["parent"] for node in tree["nodes"]} & {node["id"] for node in tree["nodes"]}
    )


def summary(tree: TreeJson) -> str:
    """One line of figures: tokens held, branches, bytes against the budget."""
    if not tree["nodes"]:
        return "nothing cached"
    total = sum(node["end"] - node["start"] for node in tree["nodes"])
    held = sum(held_tokens(node) for node in tree["nodes"])
    tokens = f"{total:,} tokens" if held == total else f"{held:,} of {total:,} tokens held"
    used = human_bytes(tree["live_bytes"] + tree["stored_bytes"])
    of = f" of {human_bytes(tree['budget'])}" if tree["budget"] else ""
    away = [f"{n:,} {PLACE[place]}" for place in AWAY if (n := tokens_at(tree, place))]
    tokens += f" ({', '.join(away)})" if away else ""
    return f"{tokens} · {counted(leaf_count(tree), 'branch', 'branches')} · {used}{of}"


def tokens_at(tree: TreeJson, place: str) -> int:
    """Tokens whose rows are in one place."""
    runs = (run for node in tree["nodes"] for run in node["runs"])
    return sum(end - start for start, end, residence, _ in runs if residence == place)


def alt_text(tree: TreeJson) -> str:
    """What a picture of the tree says, for those who can't see it."""
    name = tree["model"] or "no model"
    return f"Prefix cache of {name}: {summary(tree)} (version {tree['version']})"


def clip_cells(text: str, width: int) -> str:
    """The text cut to ``width`` terminal cells, with an ellipsis if something was cut."""
    if cell_len(text) <= width:
        return text
    used = 0
    for i, char in enumerate(text):
        used += cell_len(char)
        if used > width - 1:
            return text[:i] + "…" if width > 0 else ""
    return text


def counted(number: int, one: str, many: str) -> str:
    """The number with the right form of its noun."""
    return f"{number:,} {one if number == 1 else many}"
