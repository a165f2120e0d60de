"""The prefix cache drawn as an SVG: a static icicle with a card of its own.

A page's theme can't reach into an image, so the picture brings its background, in a light or a dark
shade. It is built as a tree of elements and serialised, so that it is valid XML whatever the
model's text contains.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len

from mlx_jupyter.widgets.icicle import layout, ruler
from mlx_jupyter.widgets.tree_data import (
    EMPTY,
    RESIDENCES,
    clip_cells,
    counted,
    label,
    summary,
)

if TYPE_CHECKING:
    from mlx_jupyter.widgets.icicle import Box, Scale
    from mlx_jupyter.widgets.tree_data import TreeJson

MARK_LETTERS = {
    "system": "S",
    "turn": "U",
    "prompt": "P",
    "answer": "A",
    "branch": "B",
    "periodic": "·",
    "interrupt": "!",
    "tip": "T",
}

Shade = Literal["light", "dark"]

# The same palette as js/src/design/tokens.css (a test compares them). Strong colours have 3:1
# against the card, text has 4.5:1 against every tint.
COLOURS: dict[Shade, dict[str, str]] = {
    "light": {
        "card": "#ffffff",
        "text": "#1b1f24",
        "muted": "#57606a",
        "line": "#8c959f",
        "active": "#1b1f24",
        "live": "#0072b2",
        "live-tint": "#d7eaf6",
        "device": "#008060",
        "device-tint": "#d5efe6",
        "host": "#b85c00",
        "host-tint": "#fbe6cf",
        "disk": "#a3477f",
        "disk-tint": "#f6dfec",
        "gone": "#6e7781",
        "gone-tint": "#ffffff",
    },
    "dark": {
        "card": "#16191d",
        "text": "#eef1f4",
        "muted": "#a9b3bd",
        "line": "#6b7580",
        "active": "#ffffff",
        "live": "#56b4e9",
        "live-tint": "#143a52",
        "device": "#2fc29a",
        "device-tint": "#11402f",
        "host": "#f0a04b",
        "host-tint": "#4a2f12",
        "disk": "#e08fc0",
        "disk-tint": "#4a2339",
        "gone": "#98a2ac",
        "gone-tint": "#16191d",
    },
}

_SANS = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif'
_MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'
_PAD, _LANE, _GAP, _BAND, _HEAD, _RULER = 12, 42, 2, 6, 30, 20
_NARROW = 6  # fewer characters a line than this, and a tall box has its text upright
_CHAR, _LINE = 6.7, 14  # of the 11 px monospace text


class Picture:
    """One SVG under construction.

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
        self.whole = whole
        self.tree = tree
        self.hidden = hidden
        self.colours = COLOURS[shade]
        self.width = width
        self.placed = layout(tree, width - 2 * _PAD)
        self.svg = ET.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "width": str(width),
                "role": "img",
                "font-family": _SANS,
                "font-size": "11",
            },
        )
        ET.SubElement(self.svg, "title").text = whole["alt"]

    def draw(self) -> str:
        """The finished document."""
        placed, hidden = self.placed, self.hidden
        self._patterns()
        card = self._rect(0.5, 0.5, self.width - 1, 0, self.colours["card"], rx=6)
        self._head()
        top = _PAD + _HEAD + _RULER
        bottom = top + max(1, placed.lanes) * _LANE
        if placed.boxes:
            self._ruler(placed.scale, top)
            for box in placed.boxes:
                if box.x1 - box.x0 >= 0.5:
                    self._box(box, placed.scale, top)
        else:
            self._text(_PAD, top, EMPTY, self.colours["text"], size=13)
        if hidden:
            told = f"… and {counted(hidden, 'branch', 'branches')} used less recently, not drawn"
            self._text(_PAD, bottom + _LINE, told, self.colours["muted"])
            bottom += _LINE + 4
        height = round(self._legend(bottom + 20)) + _PAD
        self.svg.set("height", str(height))
        self.svg.set("viewBox", f"0 0 {self.width} {height}")
        card.set("height", _px(height - 1))
        return ET.tostring(self.svg, encoding="unicode")

    def _head(self) -> None:
        name = clip_cells(self.whole["model"] or "No model", 40)
        y = _PAD + 13
        self._text(_PAD, y, name, self.colours["text"], size=14, weight="600")
        if self.tree["nodes"]:
            x = _PAD + 9 * cell_len(name) + 14
            self._text(x, y, summary(self.whole), self.colours["muted"], size=12)

    def _ruler(self, scale: Scale, top: float) -> None:
        for position, x in ruler(scale):
            self._text(_PAD + x + 3, top - 8, f"{position:,}", self.colours["muted"], size=10)
            self._line(_PAD + x, top - 16, top - 2, self.colours["line"])

    def _box(self, box: Box, scale: Scale, top: float) -> None:
        node, active = box.node, box.node.get("active", False)
        x, y = _PAD + box.x0, top + box.lane * _LANE
        w, h = box.x1 - box.x0 - _GAP, box.lanes * _LANE - _GAP
        w = max(w, 0.5)
        for start, end, residence, _ in node["runs"]:
            x0, x1 = _PAD + scale.at(start), _PAD + scale.at(end)
            piece = max(0.5, min(x1, x + w) - x0)
            self._rect(x0, y, piece, h, self.colours[f"{residence}-tint"])
            self._rect(x0, y + h - _BAND, piece, _BAND, f"url(#{residence})")
        outline = self._rect(x, y, w, h, "none", rx=2)
        outline.set("stroke", self.colours["active" if active else "line"])
        outline.set("stroke-width", "2" if active else "1")
        if node["runs"] and all(run[2] == "gone" for run in node["runs"]):
            outline.set("stroke-dasharray", "4 3")
        self._labels(box, x + 5, y, w - 9, h)
        for at, kind, _, _ in node.get("marks", ()):
            self._mark(min(_PAD + scale.at(at), x + w) - 1, y, h, kind)

    def _labels(self, box: Box, x: float, y: float, w: float, h: float) -> None:
        node, text = box.node, label(box.node["text"])
        cells = int(w / _CHAR)
        rows = int((h - _BAND - 6) // _LINE)
        owners = clip_cells(", ".join(node.get("owners", ())), 24)
        if cells < _NARROW and rows >= _NARROW and w >= 10:
            upright = self._text(
                0, 0, clip_cells(text, int((h - 12) / _CHAR)), self.colours["text"]
            )
            upright.set("font-family", _MONO)
            upright.set("transform", f"translate({_px(x + w / 2 - 3)} {_px(y + 6)}) rotate(90)")
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
            made = self._text(x, y + _LINE * (i + 1), line, self.colours["text"])
            made.set("font-family", _MONO)
            made.set("xml:space", "preserve")

    def _owner(self, x: float, y: float, owners: str) -> None:
        made = self._text(x, y, owners, self.colours["text"], weight="700")
        made.set("font-family", _MONO)

    def _mark(self, x: float, y: float, h: float, kind: str) -> None:
        self._line(x, y, y + h, self.colours["active"], width=1.5)
        flag = self._rect(x - 10, y + h - 11, 10, 11, self.colours["active"])
        ET.SubElement(flag, "title").text = f"{kind} snapshot"
        letter = self._text(
            x - 5,
            y + h - 2,
            MARK_LETTERS.get(kind, "?"),
            self.colours["card"],
            size=9,
            weight="700",
        )
        letter.set("text-anchor", "middle")

    def _legend(self, y: float) -> float:
        """Explain what occurs, in as many rows as it takes; gives the last row's baseline."""
        nodes = self.tree["nodes"]
        held = {run[2] for node in nodes for run in node["runs"]}
        kinds = {mark[1] for node in nodes for mark in node.get("marks", ())}
        entries = [(name, name) for name in RESIDENCES if name in held]
        if any(node.get("active") for node in nodes):
            entries.append(("active", "active path"))
        entries += [(kind, f"{kind} snapshot") for kind in MARK_LETTERS if kind in kinds]
        x = float(_PAD)
        for key, text in entries:
            wide = 27 + 6.6 * len(text)
            if x > _PAD and x + wide > self.width - _PAD:
                x, y = float(_PAD), y + 18
            if key in RESIDENCES:
                self._rect(x, y - 9, 22, 11, self.colours[f"{key}-tint"])
                self._rect(x, y - 4, 22, _BAND, f"url(#{key})")
            elif key == "active":
                box = self._rect(x + 1, y - 9, 20, 11, "none", rx=2)
                box.set("stroke", self.colours["active"])
                box.set("stroke-width", "2")
            else:
                self._mark(x + 22, y - 9, 11, key)
            self._text(x + 27, y, text, self.colours["muted"])
            x += wide + 12
        return y

    def _patterns(self) -> None:
        """Fills that tell the residences apart without colour."""
        defs = ET.SubElement(self.svg, "defs")
        shapes = {
            "live": "M0 0H6V6H0Z",
            "device": "M0 0H4V6H0Z",
            "host": "M0 6L6 0H3L0 3ZM6 6V3L3 6Z",
            "disk": "M1 1H5V5H1Z",
            "gone": "M0 0H6V1H0Z",
        }
        for name, path in shapes.items():
            pattern = ET.SubElement(
                defs,
                "pattern",
                {"id": name, "width": "6", "height": "6", "patternUnits": "userSpaceOnUse"},
            )
            ET.SubElement(pattern, "path", {"d": path, "fill": self.colours[name]})

    def _rect(self, x: float, y: float, w: float, h: float, fill: str, rx: float = 0) -> ET.Element:
        made = ET.SubElement(
            self.svg,
            "rect",
            {"x": _px(x), "y": _px(y), "width": _px(w), "height": _px(h), "fill": fill},
        )
        if rx:
            made.set("rx", _px(rx))
        return made

    def _line(self, x: float, y0: float, y1: float, colour: str, width: float = 1) -> None:
        ET.SubElement(
            self.svg,
            "path",
            {"d": f"M{_px(x)} {_px(y0)}V{_px(y1)}", "stroke": colour, "stroke-width": _px(width)},
        )

    def _text(
        self, x: float, y: float, text: str, colour: str, size: float = 11, weight: str = ""
    ) -> ET.Element:
        made = ET.SubElement(self.svg, "text", {"x": _px(x), "y": _px(y), "fill": colour})
        if size != 11:
            made.set("font-size", _px(size))
        if weight:
            made.set("font-weight", weight)
        made.text = text
        return made


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


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
