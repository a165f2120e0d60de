"""What static pictures are made of: a card, the palette, patterns, text and legends as SVG.

A page's theme can't reach into an image, so a picture brings its background, in a light or a dark
shade. It is built as a tree of elements and serialised, so that it is valid XML whatever the
model's text contains.
"""

from __future__ import annotations

import base64
import html
import xml.etree.ElementTree as ET
from typing import Literal

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

SANS = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif'
MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'
PAD = 12
"""Pixels between the card's edge and what it holds."""

BAND = 6
"""Pixels of the band that has a residence's pattern."""


class Drawing:
    """One SVG under construction: a card with a title.

    Args:
        title: what it shows, for those who can't see it.
        shade: of the card.
        width: in pixels; the height follows.
    """

    def __init__(self, title: str, shade: Shade, width: int) -> None:
        self.colours = COLOURS[shade]
        self.width = width
        self.svg = ET.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "width": str(width),
                "role": "img",
                "font-family": SANS,
                "font-size": "11",
            },
        )
        ET.SubElement(self.svg, "title").text = title
        self._patterns()
        self._card = self.rect(0.5, 0.5, width - 1, 0, self.colours["card"], rx=6)

    def finished(self, height: int) -> str:
        """The document, so many pixels high."""
        self.svg.set("height", str(height))
        self.svg.set("viewBox", f"0 0 {self.width} {height}")
        self._card.set("height", px(height - 1))
        return ET.tostring(self.svg, encoding="unicode")

    def _patterns(self) -> None:
        """Fills that tell the residences apart without colour."""
        defs = ET.SubElement(self.svg, "defs")
        shapes = {
            "live": "M0 0H6V6H0Z",
            "device": "M0 0H4V6H0Z",
            "host": "M0 6L6 0H3L0 3ZM6 6V3L3 6Z",
            "disk": "M1 1H5V5H1Z",
            "gone": "M0 0H6V1H0Z",
            "weights": "M0 0L6 6V4L2 0ZM0 4L2 6H0Z",
        }
        for name, path in shapes.items():
            pattern = ET.SubElement(
                defs,
                "pattern",
                {"id": name, "width": "6", "height": "6", "patternUnits": "userSpaceOnUse"},
            )
            colour = self.colours["muted" if name == "weights" else name]
            ET.SubElement(pattern, "path", {"d": path, "fill": colour})

    def rect(self, x: float, y: float, w: float, h: float, fill: str, rx: float = 0) -> ET.Element:
        """A rectangle with its upper left corner at ``(x, y)``."""
        made = ET.SubElement(
            self.svg,
            "rect",
            {"x": px(x), "y": px(y), "width": px(w), "height": px(h), "fill": fill},
        )
        if rx:
            made.set("rx", px(rx))
        return made

    def swatch(self, x: float, y: float, residence: str) -> None:
        """A residence's sign in a legend, beside a text with its baseline at ``y``."""
        self.rect(x, y - 9, 22, 11, self.colours[f"{residence}-tint"])
        self.rect(x, y - 4, 22, BAND, f"url(#{residence})")

    def line(self, x: float, y0: float, y1: float, colour: str, width: float = 1) -> None:
        """An upright line."""
        ET.SubElement(
            self.svg,
            "path",
            {"d": f"M{px(x)} {px(y0)}V{px(y1)}", "stroke": colour, "stroke-width": px(width)},
        )

    def text(
        self, x: float, y: float, text: str, colour: str, size: float = 11, weight: str = ""
    ) -> ET.Element:
        """A text whose baseline begins at ``(x, y)``."""
        made = ET.SubElement(self.svg, "text", {"x": px(x), "y": px(y), "fill": colour})
        if size != 11:
            made.set("font-size", px(size))
        if weight:
            made.set("font-weight", weight)
        made.text = text
        return made


def px(value: float) -> str:
    """A length as SVG has it."""
    return f"{value:.1f}".removesuffix(".0")


def image(svg: str, alt: str, width: int) -> str:
    """The drawing as an ``<img>`` with a data URI: what every viewer of notebooks shows."""
    uri = base64.b64encode(svg.encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{uri}" alt="{html.escape(alt, quote=True)}" '
        f'width="{width}" style="max-width: 100%; height: auto">'
    )
