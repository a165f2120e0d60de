"""The pages of a prefix cache and its memory as JSON, the one input of every picture of them.

One object, made so that two moments of it differ in little: what can change by itself has a key of
its own. The edges of the trie are kept by id with their parent, and who uses an edge follows from
the owners below it (``grouped`` here, ``js/src/pages/groups.ts`` there): a new cell changes one
edge and not all those above it. Texts are clipped and free of control characters; token ids never
leave the kernel. What would say nothing is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NotRequired, TypedDict

from mlx_jupyter.units import human_bytes
from mlx_jupyter.widgets.tree_data import RESIDENCES, clip_chars, counted, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_jupyter.cache.preview import Leaving, Preview
    from mlx_jupyter.cache.view import NodeView, PageView, StripView, TreeView
    from mlx_jupyter.engine.history import Sample
    from mlx_jupyter.engine.status import Status
    from mlx_jupyter.widgets.tree_data import Mark, Run

TEXT_CHARS = 60
OWNER_CHARS = 40
NAMED = 3
"""Owners that a shared group's title names."""

NOTHING = "Nothing is cached yet. Run a %%llm cell, then look again."
LEFT_OVER = "left over"
"""The title of what no cell or branch leads to any more."""


class EdgeJson(TypedDict):
    """One edge of the trie and what it holds.

    ``runs`` are neighbouring pages of one residence. Within a run pages end at multiples of the
    page size, and each has its tokens' share of the bytes.
    """

    parent: int
    start: int
    end: int
    used: int
    text: str
    runs: list[Run]
    owners: NotRequired[list[str]]
    strips: NotRequired[list[Run]]
    marks: NotRequired[list[Mark]]


class MemoryJson(TypedDict):
    """Bytes in use; ``disk`` and ``files`` are those of the store, of all kernels."""

    weights: int
    live: int
    stored: int
    free: int
    budget: int
    limit: int
    disk: int
    files: int


SampleJson = tuple[float, int, int, int, int, int, int]
"""Seconds, weights, live, stored, free, budget, limit."""


class PagesJson(TypedDict):
    """Everything at one moment; ``budget`` is that of the model's own cache."""

    model: str
    alt: str
    page: int
    clock: int
    budget: int
    cached: int
    memory: MemoryJson
    edges: dict[str, EdgeJson]
    samples: dict[str, SampleJson]


def pages_json(view: TreeView, status: Status, samples: Sequence[Sample]) -> PagesJson:
    """A moment as JSON-able data.

    Args:
        view: the prefix cache that is shown.
        status: the engine's.
        samples: its memory over time.
    """
    edges: dict[str, EdgeJson] = {}
    stack = [(child, view.root.id) for child in reversed(view.root.children)]
    while stack:
        node, parent = stack.pop()
        edges[str(node.id)] = _edge(node, parent, view.page_size)
        stack.extend((child, node.id) for child in reversed(node.children))
    memory, store = status.memory, status.store
    made = PagesJson(
        model=visible(view.model),
        alt="",
        page=view.page_size,
        clock=view.clock,
        budget=view.budget,
        cached=view.live_bytes + view.stored_bytes,
        memory=MemoryJson(
            weights=memory.weights,
            live=memory.live,
            stored=memory.stored,
            free=memory.cache,
            budget=memory.budget,
            limit=memory.limit,
            disk=store.nbytes,
            files=store.files,
        ),
        edges=edges,
        samples={
            str(s.number): (round(s.at, 3), s.weights, s.live, s.stored, s.free, s.budget, s.limit)
            for s in samples
        },
    )
    made["alt"] = alt_text(made)
    return made


def _edge(node: NodeView, parent: int, size: int) -> EdgeJson:
    made = EdgeJson(
        parent=parent,
        start=node.start,
        end=node.end,
        used=node.last_used,
        text=clip_chars(node.text, TEXT_CHARS),
        runs=_runs(node.pages, size),
    )
    if node.owners:
        made["owners"] = [clip_chars(owner, OWNER_CHARS) for owner in node.owners]
    if node.strips:
        made["strips"] = _runs(node.strips, size)
    if marks := [m for m in node.marks if m.nbytes or m.residence == "disk"]:
        made["marks"] = [(m.at, m.kind, m.residence, m.nbytes) for m in marks]
    return made


def _runs(pages: Iterable[PageView | StripView], size: int) -> list[Run]:
    """Neighbours of one residence joined where they meet at a multiple of ``size``."""
    runs: list[Run] = []
    for page in pages:
        last = runs[-1] if runs else None
        if last and last[1] == page.start and last[2] == page.residence and not page.start % size:
            runs[-1] = (last[0], page.end, page.residence, last[3] + page.nbytes)
        else:
            runs.append((page.start, page.end, page.residence, page.nbytes))
    return runs


Cell = tuple[int, int, str, int]
"""One page or strip: start, end, residence, bytes."""


def cells(run: Run, size: int) -> list[Cell]:
    """The pages of a run."""
    start, end, residence, nbytes = run
    cuts = [start, *range((start // size + 1) * size, end, size), end]
    return [(a, b, residence, round(nbytes * (b - a) / (end - start))) for a, b in pairwise(cuts)]


LeavingJson = tuple[int, str, int, int, int, str]
"""What would go: edge, kind, start, end, bytes now, residence then."""


class PreviewJson(TypedDict):
    """What a budget would do, as ``Preview``; neighbours are joined."""

    budget: int
    before: int
    after: int
    leaving: list[LeavingJson]


def preview_json(preview: Preview) -> PreviewJson:
    """What a budget would do as JSON-able data."""
    leaving: list[LeavingJson] = []
    for each in sorted(preview.leaving, key=_place):
        last = leaving[-1] if leaving and each.kind != "state" else None
        if last and (*last[:2], last[3], last[5]) == (each.node, each.kind, each.start, each.to):
            nbytes = last[4] + each.nbytes
            leaving[-1] = (each.node, each.kind, last[2], each.end, nbytes, each.to)
        else:
            leaving.append((each.node, each.kind, each.start, each.end, each.nbytes, each.to))
    return PreviewJson(
        budget=preview.budget, before=preview.before, after=preview.after, leaving=leaving
    )


def _place(leaving: Leaving) -> tuple[int, str, int]:
    return leaving.node, leaving.kind, leaving.start


@dataclass(slots=True)
class Group:
    """What the same cells and branches use.

    Attributes:
        owners: these, in the order of the trie; empty for what is left over.
        edges: ids, parents before children.
        pages: one for each page.
        strips: one for each strip of window rows.
        marks: the snapshots that hold something.
    """

    owners: tuple[str, ...]
    edges: list[str] = field(default_factory=list)
    pages: list[Cell] = field(default_factory=list)
    strips: list[Cell] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Whose it is."""
        if not self.owners:
            return LEFT_OVER
        if len(self.owners) == 1:
            return self.owners[0]
        named = ", ".join(self.owners[:NAMED])
        if len(self.owners) <= NAMED:
            return f"shared by {named}"
        return f"shared by {len(self.owners)}: {named} …"

    def tokens(self) -> dict[str, int]:
        """Tokens by residence, without zeros."""
        found = {
            name: sum(end - start for start, end, where, _ in self.pages if where == name)
            for name in RESIDENCES
        }
        return {name: count for name, count in found.items() if count}

    def nbytes(self) -> int:
        """Bytes of its own in memory."""
        held = sum(cell[3] for cell in self.pages) + sum(cell[3] for cell in self.strips)
        return held + sum(mark[3] for mark in self.marks)


def grouped(data: PagesJson) -> list[Group]:
    """The edges by who uses them, in the order of the trie; what is left over comes last."""
    order = preorder(data["edges"])
    users: dict[str, dict[str, None]] = {key: {} for key in order}
    for key in reversed(order):  # children first: what a child is used by, its parent is too
        edge = data["edges"][key]
        own = dict.fromkeys(edge.get("owners", ()))
        users[key] = own | users[key]
        parent = str(edge["parent"])
        if parent in users:
            users[parent] = users[key] | users[parent]
    groups: dict[tuple[str, ...], Group] = {}
    for key in order:
        owners = tuple(users[key])
        group = groups.setdefault(tuple(sorted(owners)), Group(owners))
        edge = data["edges"][key]
        group.edges.append(key)
        for run in edge["runs"]:
            group.pages.extend(cells(run, data["page"]))
        for run in edge.get("strips", ()):
            group.strips.extend(cells(run, data["page"]))
        group.marks.extend(edge.get("marks", ()))
    return sorted(groups.values(), key=lambda group: not group.owners)


def preorder(edges: dict[str, EdgeJson]) -> list[str]:
    """The ids, parents before children, siblings by age."""
    below: dict[int, list[int]] = {}
    for key, edge in edges.items():
        below.setdefault(edge["parent"], []).append(int(key))
    roots = sorted((p for p in below if str(p) not in edges), reverse=True)
    stack = [key for root in roots for key in sorted(below[root], reverse=True)]
    order: list[str] = []
    while stack:
        number = stack.pop()
        order.append(str(number))
        stack.extend(sorted(below.get(number, []), reverse=True))
    return order


def totals(data: PagesJson) -> tuple[int, dict[str, int]]:
    """How many pages there are, and tokens by residence, without zeros."""
    count = 0
    tokens = dict.fromkeys(RESIDENCES, 0)
    for edge in data["edges"].values():
        for run in edge["runs"]:
            count += len(cells(run, data["page"]))
            tokens[run[2]] += run[1] - run[0]
    return count, {name: n for name, n in tokens.items() if n}


def summary(data: PagesJson) -> str:
    """One line of figures: pages, tokens, bytes against the budget."""
    if not data["edges"]:
        return "nothing cached"
    count, tokens = totals(data)
    held = sum(n for name, n in tokens.items() if name != "gone")
    of = f" of {human_bytes(data['budget'])}" if data["budget"] else ""
    return (
        f"{counted(count, 'page', 'pages')} · {held:,} tokens held · "
        f"{human_bytes(data['cached'])}{of}"
    )


def by_residence(tokens: dict[str, int]) -> str:
    """``212 live, 1,068 device``."""
    return ", ".join(f"{count:,} {name}" for name, count in tokens.items())


def alt_text(data: PagesJson) -> str:
    """What a picture of the pages says, for those who can't see it."""
    name = data["model"] or "no model"
    where = by_residence(totals(data)[1])
    return f"Pages of {name}: {summary(data)}" + (f"; tokens: {where}" if where else "")
