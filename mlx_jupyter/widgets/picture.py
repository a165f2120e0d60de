"""The prefix cache drawn as an SVG: a static icicle with a card of its own."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from rich.cells import cell_len

from mlx_jupyter.widgets.drawing import BAND, MONO, PAD, Drawing, px
from mlx_jupyter.widgets.icicle import layout, ruler
from mlx_jupyter.widgets.tree_data import (
    AWAY,
    EMPTY,
    MEANING,
    RESIDENCES,
    clip_cells,
    counted,
    label,
    summary,
)

if TYPE_CHECKING:
    from mlx_jupyter.widgets.drawing import Shade
    from mlx_jupyter.widgets.icicle import Box, Scale
    from mlx_jupyter.widgets.tree_data import TreeJson

MARK_LETTERS = {
    "system": "S",
    "turn": "U",
    "prompt": "P",
    "thinking": "K",
    "answer": "A",
    "branch": "B",
    "periodic": "·",
    "interrupt": "!",
    "tip": "T",
}

_LANE, _GAP, _HEAD, _RULER = 42, 2, 30, 20
_STRIP = 3  # the height of window rows
_POLE = 16  # the height of a snapshot's line
_DIGIT = 6.2  # the width of a digit of the ruler
_NARROW = 6  # fewer characters a line than this, and a tall box has its text upright
_CHAR, _LINE = 6.7, 14  # of the 11 px monospace text


class Picture(Drawing):
    """The icicle under construction.

    Args:
        whole: the whole cache, for the figures.
        tree: the branches to draw.
        hidden: how many branches that leaves out.
        shade: of the card.
        width: in pixels; the height follows.
    """

    def __init__(
        self, whole: TreeJson, tree: TreeJson, hidden: int, shade: Shade, width: int
    ) -> None:
        super().__init__(whole["alt"], shade, width)
        self.whole = whole
        self.tree = tree
        self.hidden = hidden
        self.placed = layout(tree, width - 2 * PAD)

    def draw(self) -> str:
        """The finished document."""
        placed, hidden = self.placed, self.hidden
        self._head()
        top = PAD + _HEAD + _RULER
        bottom = top + max(1, placed.lanes) * _LANE
        if placed.boxes:
            self._ruler(placed.scale, top)
            for box in placed.boxes:
                if box.x1 - box.x0 >= 0.5:
                    self._box(box, placed.scale, top)
        else:
            self.text(PAD, top, EMPTY, self.colours["text"], size=13)
        if hidden:
            told = f"… and {counted(hidden, 'branch', 'branches')} used less recently, not drawn"
            self.text(PAD, bottom + _LINE, told, self.colours["muted"])
            bottom += _LINE + 4
        return self.finished(round(self._legend(bottom + 20)) + PAD)

    def _head(self) -> None:
        name = clip_cells(self.whole["model"] or "No model", 40)
        y = PAD + 13
        self.text(PAD, y, name, self.colours["text"], size=14, weight="600")
        if self.tree["nodes"]:
            x = PAD + 9 * cell_len(name) + 14
            self.text(x, y, summary(self.whole), self.colours["muted"], size=12)

    def _ruler(self, scale: Scale, top: float) -> None:
        for position, x in ruler(scale):
            told = f"{position:,}"
            made = self.text(PAD + x + 3, top - 8, told, self.colours["muted"], size=10)
            if x + 3 + _DIGIT * len(told) > self.width - 2 * PAD:
                made.set("x", px(PAD + x - 3))
                made.set("text-anchor", "end")
            self.line(PAD + x, top - 16, top - 2, self.colours["line"])

    def _box(self, box: Box, scale: Scale, top: float) -> None:
        node, active = box.node, box.node.get("active", False)
        x, y = PAD + box.x0, top + box.lane * _LANE
        w, h = box.x1 - box.x0 - _GAP, box.lanes * _LANE - _GAP
        w = max(w, 0.5)
        for start, end, residence, _ in node["runs"]:
            x0, x1 = PAD + scale.at(start), PAD + scale.at(end)
            piece = max(0.5, min(x1, x + w) - x0)
            self.rect(x0, y, piece, h, self.colours[f"{residence}-tint"])
            self.rect(x0, y + h - BAND, piece, BAND, f"url(#{residence})")
        for start, end, residence, _ in node.get("strips", ()):
            x0, x1 = PAD + scale.at(start), PAD + scale.at(end)
            self._strip(x0, y, max(1.0, min(x1, x + w) - x0), residence)
        outline = self.rect(x, y, w, h, "none", rx=2)
        outline.set("stroke", self.colours["active" if active else "line"])
        outline.set("stroke-width", "2" if active else "1")
        if node["runs"] and all(run[2] == "gone" for run in node["runs"]):
            outline.set("stroke-dasharray", "4 3")
        self._labels(box, x + 5, y, w - 9, h)
        for at, kind, residence, _ in node.get("marks", ()):
            self._mark(min(PAD + scale.at(at), x + w) - 1, y, h, kind, residence)

    def _labels(self, box: Box, x: float, y: float, w: float, h: float) -> None:
        node, text = box.node, label(box.node["text"])
        cells = int(w / _CHAR)
        rows = int((h - BAND - 6) // _LINE)
        owners = clip_cells(", ".join(node.get("owners", ())), 24)
        if cells < _NARROW and rows >= _NARROW and w >= 10:
            upright = self.text(0, 0, clip_cells(text, int((h - 12) / _CHAR)), self.colours["text"])
            upright.set("font-family", MONO)
            upright.set("transform", f"translate({px(x + w / 2 - 3)} {px(y + 6)}) rotate(90)")
            return
        if cells < 2:
            return
        lines = _wrapped(text, cells, rows)
        if owners and rows == 1:
            beside = cells - cell_len(owners) - 2
            if beside >= 4:
                lines = [clip_cells(text, beside)]
                right = x + w - cell_len(owners) * _CHAR
                self._owner(right, y + _LINE, owners)
        elif owners:
            lines = _wrapped(text, cells, rows - 1)
            self._owner(x, y + _LINE * (len(lines) + 1), clip_cells(owners, cells))
        for i, line in enumerate(lines):
            made = self.text(x, y + _LINE * (i + 1), line, self.colours["text"])
            made.set("font-family", MONO)
            made.set("xml:space", "preserve")

    def _owner(self, x: float, y: float, owners: str) -> None:
        made = self.text(x, y, owners, self.colours["text"], weight="700")
        made.set("font-family", MONO)

    def _strip(self, x: float, y: float, w: float, residence: str) -> None:
        """Window rows: a thin line along the top, broken where they aren't in memory."""
        bar = self.rect(x, y + 1, w, _STRIP, self.colours[residence])
        if residence in AWAY:
            bar.set("fill", self.colours[f"{residence}-tint"])
            bar.set("stroke", self.colours[residence])
            bar.set("stroke-width", "1")
            bar.set("stroke-dasharray", "3 2")
        ET.SubElement(bar, "title").text = f"window rows {MEANING[residence]}"

    def _mark(self, x: float, y: float, h: float, kind: str, residence: str) -> None:
        """A snapshot: a flag, hollow where it isn't in memory."""
        away = residence in AWAY
        ink = self.colours[residence] if away else self.colours["active"]
        self.line(x, y + max(h - _POLE, 0), y + h, ink, width=1.5)  # no longer: text is above
        flag = self.rect(x - 10.5, y + h - 11.5, 10.5, 11.5, self.colours["card"] if away else ink)
        if away:
            flag.set("stroke", ink)
            flag.set("stroke-width", "1")
        where = f" {MEANING[residence]}" if away else ""
        ET.SubElement(flag, "title").text = f"{kind} snapshot{where}"
        letter = self.text(
            x - 5,
            y + h - 2,
            MARK_LETTERS.get(kind, "?") if kind else "",
            ink if away else self.colours["card"],
            size=9,
            weight="700",
        )
        letter.set("text-anchor", "middle")

    def _legend(self, y: float) -> float:
        """Explain what occurs, in as many rows as it takes; gives the last row's baseline."""
        nodes = self.tree["nodes"]
        held = {run[2] for node in nodes for run in node["runs"]}
        marks = [mark for node in nodes for mark in node.get("marks", ())]
        kinds = {mark[1] for mark in marks}
        strips = {run[2] for node in nodes for run in node.get("strips", ())}
        entries = [(name, f"{name}: {MEANING[name]}") for name in RESIDENCES if name in held]
        if any(node.get("active") for node in nodes):
            entries.append(("active", "active path"))
        entries += [(kind, f"{kind} snapshot") for kind in MARK_LETTERS if kind in kinds]
        away = [place for place in AWAY if any(mark[2] == place for mark in marks)]
        entries += [(f"mark-{place}", f"snapshot {MEANING[place]}") for place in away]
        entries += [
            (f"strip-{place}", "window rows" + (f" {MEANING[place]}" if place in AWAY else ""))
            for place in RESIDENCES
            if place in strips
        ]
        x = float(PAD)
        for key, text in entries:
            flag = key.startswith("mark-") or key in MARK_LETTERS
            lead = 16 if flag else 27
            wide = lead + 6.2 * len(text)
            if x > PAD and x + wide > self.width - PAD:
                x, y = float(PAD), y + 18
            if key in RESIDENCES:
                self.swatch(x, y, key)
            elif key == "active":
                box = self.rect(x + 1, y - 9, 20, 11, "none", rx=2)
                box.set("stroke", self.colours["active"])
                box.set("stroke-width", "2")
            elif key.startswith("strip-"):
                self._strip(x, y - 7, 22, key.removeprefix("strip-"))
            elif key.startswith("mark-"):
                self._mark(x + 11, y - 9, 11, "", key.removeprefix("mark-"))
            else:
                self._mark(x + 11, y - 9, 11, key, "device")
            self.text(x + lead, y, text, self.colours["muted"])
            x += wide + 12
        return y


def _wrapped(text: str, cells: int, rows: int) -> list[str]:
    """The text in lines of ``cells`` terminal cells, broken at spaces where there are some.

    The last line ends with an ellipsis if something is left over.
    """
    lines: list[str] = []
    while text and len(lines) < rows - 1 and cell_len(text) > cells:
        taken = clip_cells(text, cells + 1).removesuffix("…")
        if not taken:
            break
        space = taken.rfind(" ")
        if space > len(taken) // 3 and not text[len(taken) :].startswith(" "):
            taken = taken[: space + 1]
        lines.append(taken)
        text = text[len(taken) :].lstrip(" ")
    if text:
        lines.append(clip_cells(text, cells))
    return lines
