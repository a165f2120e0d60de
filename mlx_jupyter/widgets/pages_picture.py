"""The pages of a prefix cache drawn as an SVG: memory over time above, a conversation a row."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import groupby
from typing import TYPE_CHECKING

from rich.cells import cell_len

from mlx_jupyter.units import human_bytes
from mlx_jupyter.widgets.drawing import PAD, Drawing, px
from mlx_jupyter.widgets.pages_data import NOTHING, grouped, summary, totals
from mlx_jupyter.widgets.tree_data import RESIDENCES, clip_cells, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_jupyter.widgets.drawing import Shade
    from mlx_jupyter.widgets.pages_data import Cell, Group, PagesJson, SampleJson

PICTURE_GROUPS = 30
PICTURE_CELLS = 600
"""Pages of one conversation that are drawn; of a longer one the beginning and how many more."""

ALL_CELLS = 1500
"""Pages that are drawn in all: the picture is part of a file that people save and send."""

_CELL, _GAP, _SMALL = 12, 2, 8
_TITLE, _FIGURES = 190, 120
_CHART, _AXIS = 84, 64
_CUT = 0.6  # of the scale that weights may take; what is below is cut off
_ROW = 8  # between two conversations
_CHAR = 6.3  # of the 11 px text

BANDS = (("weights", "weights"), ("live", "live"), ("stored", "device"), ("free buffers", "gone"))
"""What is stacked, from below, and the pattern that fills it."""


class PagesPicture(Drawing):
    """The picture under construction.

    Args:
        data: everything.
        shade: of the card.
        width: in pixels; the height follows.
    """

    def __init__(self, data: PagesJson, shade: Shade, width: int) -> None:
        super().__init__(data["alt"], shade, width)
        self.data = data
        self._room = ALL_CELLS

    def draw(self) -> str:
        """The finished document."""
        name = clip_cells(self.data["model"] or "No model", 40)
        self.text(PAD, PAD + 13, name, self.colours["text"], size=14, weight="600")
        if not self.data["edges"]:
            self.text(PAD, PAD + 40, NOTHING, self.colours["text"], size=13)
            return self.finished(PAD + 40 + PAD)
        x = PAD + 9 * cell_len(name) + 14
        self.text(x, PAD + 13, summary(self.data), self.colours["muted"], size=12)
        y = float(PAD + 30)
        samples = list(self.data["samples"].values())
        if len(samples) > 1:
            y = self._memory(samples, y)
        groups = grouped(self.data)
        for group in groups[:PICTURE_GROUPS]:
            y = self._group(group, y) + _ROW
        if len(groups) > PICTURE_GROUPS:
            more = counted(len(groups) - PICTURE_GROUPS, "conversation", "conversations")
            self.text(PAD, y + 8, f"… and {more} more, not drawn", self.colours["muted"])
            y += 20
        return self.finished(round(self._legend(y + 14)) + PAD)

    # --- memory ------------------------------------------------------------------------------

    def _memory(self, samples: Sequence[SampleJson], top: float) -> float:
        """The bands and lines; gives where they end."""
        left, right, bottom = PAD + _AXIS, self.width - PAD, top + _CHART
        stacks = [_stacked(sample) for sample in samples]
        most = max(stack[-1] for stack in stacks)
        weights, budget, limit = samples[-1][1], samples[-1][5], samples[-1][6]
        lines = [("budget", budget, weights + budget), ("limit", limit, limit)]
        least = min(sample[1] for sample in samples)
        cut = most > least > _CUT * most
        base = max(0.0, least - (most - least) / 2) if cut else 0.0
        reach = base + 3 * (most - base)
        most = max([most, *(value for _, _, value in lines if value <= reach)]) or 1
        step = (right - left) / len(samples)

        def at(value: float) -> float:
            return bottom - (bottom - top - 12) * max(0.0, value - base) / (most - base)

        below = [0.0] * len(samples)
        for i, (_, colour) in enumerate(BANDS):
            above = [float(stack[i]) for stack in stacks]
            points = _steps([at(value) for value in above], left, step)
            points += _steps([at(value) for value in below], left, step)[::-1]
            path = "M" + "L".join(f"{px(x)} {px(y)}" for x, y in points) + "Z"
            tint = self.colours.get(f"{colour}-tint", self.colours["card"])
            for fill in (tint, f"url(#{colour})"):
                ET.SubElement(self.svg, "path", {"d": path, "fill": fill})
            below = above
        self._rule(left, right, bottom, "line", "")
        self.text(PAD, top + 10, human_bytes(most), self.colours["muted"], size=10)
        self.text(PAD, bottom, human_bytes(base), self.colours["muted"], size=10)
        for name, nbytes, value in lines:
            if 0 < value <= most:
                self._rule(left, right, at(value), "text", "4 3" if name == "budget" else "1 3")
                told = f"{name} {human_bytes(nbytes)}"
                self.text(right - _CHAR * len(told), at(value) - 3, told, self.colours["text"])
        last = samples[-1]
        figures = [
            (colour, f"{name} {human_bytes(value)}")
            for (name, colour), value in zip(BANDS, last[1:5], strict=True)
        ]
        if self.data["memory"]["files"]:
            figures.append(("", f"on disk {human_bytes(self.data['memory']['disk'])}"))
        figures += [
            ("", f"{name} {human_bytes(nbytes)} (above the chart)")
            for name, nbytes, value in lines
            if value > most
        ]
        x, y = float(left), bottom + 18
        for colour, told in figures:
            wide = (14 if colour else 0) + _CHAR * len(told)
            if x > left and x + wide > right:
                x, y = float(left), y + 16
            if colour:
                self.rect(x, y - 9, 10, 10, f"url(#{colour})")
            self.text(x + (14 if colour else 0), y, told, self.colours["muted"])
            x += wide + 16
        return y + 18

    def _rule(self, x0: float, x1: float, y: float, colour: str, dashes: str) -> None:
        made = ET.SubElement(
            self.svg,
            "path",
            {"d": f"M{px(x0)} {px(y)}H{px(x1)}", "stroke": self.colours[colour]},
        )
        if dashes:
            made.set("stroke-dasharray", dashes)

    # --- pages -------------------------------------------------------------------------------

    def _group(self, group: Group, top: float) -> float:
        """A conversation's cells beside its title; gives where they end."""
        title = clip_cells(group.title, int((_TITLE - 12) / _CHAR))
        weight = "600" if group.owners else ""
        self.text(PAD, top + 10, title, self.colours["text"], weight=weight)
        held = sum(count for name, count in group.tokens().items() if name != "gone")
        told = f"{held:,} tokens"
        right = self.width - PAD
        self.text(right - _CHAR * len(told), top + 10, told, self.colours["muted"])
        bottom = self._cells(group.pages, top, _CELL)
        if group.strips:
            self.text(PAD + 10, bottom + 9, "window rows", self.colours["muted"], size=10)
            bottom = self._cells(group.strips, bottom + 2, _SMALL)
        if group.marks:
            self.text(PAD + 10, bottom + 9, "snapshots", self.colours["muted"], size=10)
            found = [(mark[0], mark[0], mark[2], mark[3]) for mark in group.marks]
            bottom = self._cells(found, bottom + 2, _SMALL)
        return bottom

    def _cells(self, found: Sequence[Cell], top: float, size: int) -> float:
        left, right = PAD + _TITLE, self.width - PAD - _FIGURES
        pitch = size + _GAP
        columns = max(1, int((right - left + _GAP) // pitch))
        shown = found[: max(0, min(PICTURE_CELLS, self._room))]
        self._room -= len(shown)
        for at in range(0, len(shown), columns):
            x = left
            for residence, run in groupby(shown[at : at + columns], key=lambda cell: cell[2]):
                count = len(list(run))
                self._run(x, top + at // columns * pitch, size, count, residence)
                x += count * pitch
        bottom = top + -(-len(shown) // columns) * pitch
        if len(found) > len(shown):
            told = f"… and {len(found) - len(shown):,} more"
            self.text(left, bottom + 10, told, self.colours["muted"])
            bottom += 14
        return max(bottom, top + pitch)

    def _run(self, x: float, y: float, size: int, count: int, residence: str) -> None:
        """Neighbours of one residence as one path."""
        side = size - 1
        cell = f"h{side}v{side}h-{side}z"
        path = f"M{px(x + 0.5)} {px(y + 0.5)}{cell}" + f"m{size + _GAP} 0{cell}" * (count - 1)
        fills = ["none"] if residence == "gone" else [f"{residence}-tint", residence]
        for fill in fills:
            made = ET.SubElement(self.svg, "path", {"d": path})
            made.set("fill", self.colours.get(fill, fill) if fill != residence else f"url(#{fill})")
        made.set("stroke", self.colours[residence])
        if residence == "gone":
            made.set("stroke-dasharray", "2 1")

    def _legend(self, y: float) -> float:
        x = float(PAD)
        tokens = totals(self.data)[1]
        for name in RESIDENCES:
            if name not in tokens:
                continue
            told = f"{name}: {tokens[name]:,} tokens"
            self._run(x, y - 10, _CELL, 1, name)
            self.text(x + 18, y, told, self.colours["muted"])
            x += 18 + _CHAR * len(told) + 16
        return y


def _steps(heights: Sequence[float], left: float, step: float) -> list[tuple[float, float]]:
    """The corners of a flight of steps, each ``step`` wide."""
    return [(left + (i + more) * step, y) for i, y in enumerate(heights) for more in (0, 1)]


def _stacked(sample: SampleJson) -> list[int]:
    """The upper edges of the bands at one moment, from below."""
    total, edges = 0, []
    for value in sample[1:5]:
        total += value
        edges.append(total)
    return edges
