"""Where each node of the tree is drawn: a pure function, the twin of ``js/src/trie/layout.ts``.

x is the token position, the same scale for every lane, monotone and linear between the positions
where some node starts or ends; short edges are widened to ``MIN_WIDTH`` so that they can be seen
and hit. y is the lane: each leaf has one, an inner node spans those of its children. A fixture that
both test suites read keeps the two languages in agreement.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_jupyter.widgets.tree_data import NodeJson, TreeJson

MIN_WIDTH = 84.0
_MIN_SHARE = 0.7
_STEPS = 48


@dataclass(frozen=True, slots=True)
class Scale:
    """Token positions to x: piecewise linear through ``(positions[i], xs[i])``."""

    positions: tuple[int, ...]
    xs: tuple[float, ...]

    def at(self, position: int) -> float:
        """Pixels of a token position, clamped to the scale's ends."""
        if position <= self.positions[0]:
            return self.xs[0]
        if position >= self.positions[-1]:
            return self.xs[-1]
        i = bisect_right(self.positions, position) - 1
        p0, p1 = self.positions[i], self.positions[i + 1]
        x0, x1 = self.xs[i], self.xs[i + 1]
        return x0 + (x1 - x0) * (position - p0) / (p1 - p0)


@dataclass(frozen=True, slots=True)
class Box:
    """A node's place: ``[x0, x1)`` in pixels, ``lanes`` lanes from ``lane`` on."""

    node: NodeJson
    x0: float
    x1: float
    lane: int
    lanes: int
    depth: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All boxes, parents before children."""

    boxes: tuple[Box, ...]
    lanes: int
    width: float
    scale: Scale


def layout(tree: TreeJson, width: float, min_width: float = MIN_WIDTH) -> Layout:
    """Place every node within ``width`` pixels; boxes don't overlap."""
    nodes = tree["nodes"]
    children: dict[int, list[NodeJson]] = defaultdict(list)
    for node in nodes:
        children[node["parent"]].append(node)
    leaves: dict[int, int] = {}
    for node in reversed(nodes):
        leaves[node["id"]] = sum(leaves[c["id"]] for c in children[node["id"]]) or 1
    scale = fit_scale(nodes, width, min_width)
    next_lane: dict[int, int] = defaultdict(int)
    depth: dict[int, int] = {}
    boxes: list[Box] = []
    for node in nodes:
        key, parent = node["id"], node["parent"]
        lane = next_lane[parent]
        next_lane[parent] += leaves[key]
        next_lane[key] = lane
        depth[key] = depth.get(parent, 0) + 1
        x0, x1 = scale.at(node["start"]), scale.at(node["end"])
        boxes.append(Box(node, x0, x1, lane, leaves[key], depth[key]))
    lanes = max((box.lane + box.lanes for box in boxes), default=0)
    return Layout(tuple(boxes), lanes, width, scale)


def fit_scale(nodes: Sequence[NodeJson], width: float, min_width: float) -> Scale:
    """The scale on which every edge is at least ``min_width`` wide and the whole fits ``width``.

    The minimum gives way where it alone would fill more than a share of the width.
    """
    positions = sorted({0} | {node["start"] for node in nodes} | {node["end"] for node in nodes})
    if len(positions) == 1:
        return Scale((0, 1), (0.0, width))
    index = {position: i for i, position in enumerate(positions)}
    starts: list[list[int]] = [[] for _ in positions]
    for node in nodes:
        starts[index[node["end"]]].append(index[node["start"]])

    def place(per_token: float, least: float) -> list[float]:
        xs = [0.0]
        for i in range(1, len(positions)):
            x = xs[i - 1] + per_token * (positions[i] - positions[i - 1])
            xs.append(max(x, max((xs[s] + least for s in starts[i]), default=x)))
        return xs

    longest = place(0.0, 1.0)[-1]
    least = min(min_width, width * _MIN_SHARE / longest)
    low, high = 0.0, width / positions[-1]
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if place(middle, least)[-1] > width:
            high = middle
        else:
            low = middle
    xs = place(low, least)
    return Scale(tuple(positions), tuple(x * width / xs[-1] for x in xs))


def ruler(scale: Scale, gap: float = 64.0) -> list[tuple[int, float]]:
    """Round token positions for an axis with their x, at least ``gap`` pixels apart."""
    total, width = scale.positions[-1], scale.xs[-1]
    steps = (factor * 10**power for power in count() for factor in (1, 2, 5))
    step = next(step for step in steps if total / step * gap <= width or step >= total)
    ticks: list[tuple[int, float]] = []
    for position in range(0, total + 1, step):
        x = scale.at(position)
        if not ticks or x - ticks[-1][1] >= gap:
            ticks.append((position, x))
    return ticks
