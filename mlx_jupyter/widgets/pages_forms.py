"""Static forms of the pages: text for terminals, a picture for saved notebooks.

In the text each page is a sign, or several pages are one where they are many. All text passes
through ``tree_data.visible``; nothing of a model's output is ever markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len

from mlx_jupyter.units import human_bytes
from mlx_jupyter.widgets.drawing import image
from mlx_jupyter.widgets.pages_data import NOTHING, grouped, summary, totals
from mlx_jupyter.widgets.pages_picture import PagesPicture
from mlx_jupyter.widgets.tree_data import RESIDENCES, clip_cells, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_jupyter.widgets.pages_data import Cell, Group, PagesJson

SIGNS = {"live": "█", "device": "▓", "host": "▒", "disk": "░", "gone": "·"}
TEXT_GROUPS = 60
TITLE_CELLS = 34
LEAST_MAP, MOST_MAP = 8, 64


def pages_text(data: PagesJson, *, width: int = 100) -> str:
    """The pages as plain text, a conversation a line, no line wider than ``width`` cells.

    Columns: whose, how many pages, tokens by residence, bytes of its own, a sign for each page.
    """
    lines = [f"{data['model'] or 'No model'} · {summary(data)}", memory_line(data)]
    if not data["edges"]:
        return "\n".join(clip_cells(line, width) for line in (lines[0], NOTHING))
    groups = grouped(data)
    shown = groups[:TEXT_GROUPS]
    present = [name for name in RESIDENCES if name in totals(data)[1]]
    head = ["conversation", "pages", *present, "bytes"]
    titles = min(TITLE_CELLS, width // 3)
    rows = [row for group in shown for row in _rows(group, present, titles)]
    columns = zip(head, *(row for row, _ in rows), strict=True)
    widths = [max(map(cell_len, column)) for column in columns]
    room = width - sum(widths) - 2 * len(widths)
    most = max(len(found) for _, found in rows)
    room = min(MOST_MAP, room)
    scale = -(-most // room) if room >= LEAST_MAP else 0
    lines += ["", _aligned(head, widths)]
    for row, found in rows:
        signs = "  " + signed(found, scale) if scale else ""
        lines.append((_aligned(row, widths) + signs).rstrip())
    if len(groups) > len(shown):
        more = counted(len(groups) - len(shown), "conversation", "conversations")
        lines.append(f"… and {more} more")
    if scale:
        each = "a page" if scale == 1 else f"{scale} pages"
        key = "  ".join(f"{SIGNS[name]} {name}" for name in present)
        lines += ["", f"{key}   (a sign is {each})"]
    return "\n".join(clip_cells(line, width) for line in lines)


def memory_line(data: PagesJson) -> str:
    """One line of figures of the memory."""
    memory = data["memory"]
    bands = {
        "weights": memory["weights"],
        "live": memory["live"],
        "stored": memory["stored"],
        "free": memory["free"],
    }
    parts = [f"{name} {human_bytes(nbytes)}" for name, nbytes in bands.items() if nbytes]
    if memory["files"]:
        parts.append(f"on disk {human_bytes(memory['disk'])}")
    if memory["limit"]:
        parts.append(f"limit {human_bytes(memory['limit'])}")
    return " · ".join(parts)


def _rows(group: Group, present: Sequence[str], title: int) -> list[tuple[list[str], list[Cell]]]:
    """A conversation's line; where there are any, those of its window rows and snapshots."""
    tokens = group.tokens()
    held = group.nbytes()
    row = [
        clip_cells(group.title, title),
        f"{len(group.pages):,}",
        *(f"{tokens[name]:,}" if name in tokens else "–" for name in present),
        human_bytes(held) if held else "–",
    ]
    rows = [(row, group.pages)]
    dashes = ["–"] * len(present)
    if group.strips:
        size = human_bytes(sum(cell[3] for cell in group.strips))
        rows.append((["  window rows", f"{len(group.strips):,}", *dashes, size], group.strips))
    if group.marks:
        size = human_bytes(sum(mark[3] for mark in group.marks))
        found = [(mark[0], mark[0], mark[2], mark[3]) for mark in group.marks]
        rows.append((["  snapshots", f"{len(group.marks):,}", *dashes, size], found))
    return rows


def signed(found: Sequence[Cell], scale: int) -> str:
    """A sign for each ``scale`` neighbours: that of the residence most of them have."""
    signs = ""
    for i in range(0, len(found), scale):
        part = [cell[2] for cell in found[i : i + scale]]
        signs += SIGNS[max(RESIDENCES, key=part.count)]
    return signs


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = []
    for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
        blank = " " * (width - cell_len(cell))
        cells.append(cell + blank if i == 0 else blank + cell)
    return "  ".join(cells)


def pages_svg(data: PagesJson, *, width: int = 960, dark: bool = False) -> str:
    """The pages and the memory over time as a drawing; valid XML whatever the texts contain."""
    return PagesPicture(data, "dark" if dark else "light", width).draw()


def pages_html(data: PagesJson, *, width: int = 960, dark: bool = False) -> str:
    """The drawing as an ``<img>`` with a data URI."""
    return image(pages_svg(data, width=width, dark=dark), data["alt"], width)
