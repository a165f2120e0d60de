"""Static forms of the prefix cache: text for terminals, a picture for saved notebooks.

The picture is an SVG in the data URI of an ``<img>``: that is the one form of a drawing that
survives an untrusted notebook, nbconvert and GitHub. Both forms show the branches that matter (the
active one, then the latest used) and say how many they leave out. All text passes through
``tree_data.visible``; nothing of a model's output is ever markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len

from mlx_jupyter.units import human_bytes
from mlx_jupyter.widgets.drawing import image
from mlx_jupyter.widgets.picture import Picture
from mlx_jupyter.widgets.tree_data import (
    AWAY,
    EMPTY,
    MEANING,
    PLACE,
    RESIDENCES,
    clip_cells,
    counted,
    held_tokens,
    label,
    latest_branches,
    node_bytes,
    summary,
    tree_json,
)

if TYPE_CHECKING:
    from mlx_jupyter.cache.view import TreeView
    from mlx_jupyter.widgets.tree_data import NodeJson, TreeJson

TEXT_LINES = 80
PICTURE_LANES = 24


def tree_text(view: TreeView, *, width: int = 100) -> str:
    """The tree as plain text, one node a line, no line wider than ``width`` terminal cells.

    Columns: a star on the active path, token range, tokens held, where their rows are, bytes of
    the node's own, uses, then the decoded text with its owners, snapshots and window rows.
    """
    whole = tree_json(view)
    title = f"{whole['model'] or 'No model'} · {summary(whole)}"
    if not whole["nodes"]:
        return "\n".join(clip_cells(line, width) for line in (title, EMPTY))
    tree, hidden = latest_branches(whole, TEXT_LINES // 2)
    nodes = tree["nodes"][:TEXT_LINES]
    rows = [_columns(node) for node in nodes]
    names = ("tokens", "held", "where", "bytes", "uses")
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    guides = _guides(tree)
    room = max(8, width - sum(widths) - 2 * len(widths) - 2)
    lines = [title, "", "  " + _aligned(names, widths) + "  text"]
    for node, row in zip(nodes, rows, strict=True):
        star = "* " if node.get("active") else "  "
        guide = clip_left(guides[node["id"]], max(0, room // 3))
        lines.append(star + _aligned(row, widths) + "  " + guide + _told(node, room - len(guide)))
    if hidden:
        lines.append(f"… and {counted(hidden, 'branch', 'branches')} used less recently")
    elif len(nodes) < len(tree["nodes"]):
        lines.append(f"… and {counted(len(tree['nodes']) - len(nodes), 'node', 'nodes')} more")
    lines += _legend(nodes, width)
    return "\n".join(clip_cells(line, width).rstrip() for line in lines)


def _legend(nodes: list[NodeJson], width: int) -> list[str]:
    """What the signs that occur mean."""
    found = {run[2] for node in nodes for run in node["runs"]}
    marks = [mark for node in nodes for mark in node.get("marks", ())]
    strips = [run for node in nodes for run in node.get("strips", ())]
    signs = [f"{name}: {MEANING[name]}" for name in RESIDENCES if name in found]
    lines = ["* held by the live cache"] if any(node.get("active") for node in nodes) else []
    if found - {"live", "device"}:
        lines += _rows(signs, width)
    signs = ["◆ snapshot"] if any(mark[2] not in AWAY for mark in marks) else []
    signs += ["◇ snapshot on disk or in host memory"] if any(m[2] in AWAY for m in marks) else []
    signs += ["≡ rows of sliding windows"] if strips else []
    if strips or any(mark[2] in AWAY for mark in marks):
        lines += _rows(signs, width)
    return lines


def _rows(signs: list[str], width: int) -> list[str]:
    """Signs in as many lines as it takes."""
    lines: list[str] = []
    for sign in signs:
        joined = f"{lines[-1]} · {sign}" if lines else sign
        if lines and cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(sign)
    return lines


def _columns(node: NodeJson) -> tuple[str, str, str, str, str]:
    where = [name for name in RESIDENCES if any(run[2] == name for run in node["runs"])]
    where = where[:-1] if len(where) > 1 and where[-1] == "gone" else where  # "held" tells
    own = node_bytes(node)
    return (
        f"{node['start']}–{node['end']}",
        str(held_tokens(node)),
        "+".join(where),
        human_bytes(own) if own else "–",
        str(node["uses"]),
    )


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    left = {2}
    cells = (
        cell.ljust(width) if i in left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells)


def _told(node: NodeJson, room: int) -> str:
    """The node's text, clipped so that its owners, snapshots and window rows stay readable."""
    notes = ""
    if owners := node.get("owners"):
        notes += "  ← " + ", ".join(owners)
    if marks := node.get("marks"):
        for sign, away in (("◆", False), ("◇", True)):
            some = [f"{mark[1]} {mark[0]}" for mark in marks if (mark[2] in AWAY) == away]
            notes += f"  {sign} " + ", ".join(some) if some else ""
    for residence in dict.fromkeys(run[2] for run in node.get("strips", ())):
        rows = sum(b - a for a, b, place, _ in node["strips"] if place == residence)
        notes += f"  ≡ {rows}" + (f" {PLACE[residence]}" if residence in AWAY else "")
    text = label(node["text"])
    notes = clip_cells(notes, max(room // 2, room - cell_len(text)))
    return clip_cells(text, room - cell_len(notes)) + notes


def _guides(tree: TreeJson) -> dict[int, str]:
    """Box-drawing prefixes by node id."""
    last: dict[int, int] = {node["parent"]: node["id"] for node in tree["nodes"]}
    trunk: dict[int, str] = {}
    guides: dict[int, str] = {}
    for node in tree["nodes"]:
        key, parent = node["id"], node["parent"]
        final = last[parent] == key
        if parent in trunk:
            guides[key] = trunk[parent] + ("└ " if final else "├ ")
            trunk[key] = trunk[parent] + ("  " if final else "│ ")
        else:
            guides[key] = trunk[key] = ""
    return guides


def clip_left(guide: str, width: int) -> str:
    """The end of a deep guide, so that the text beside it keeps its room."""
    return guide if len(guide) <= width else "…" + guide[len(guide) - width + 1 :]


def tree_svg(view: TreeView, *, width: int = 960, dark: bool = False) -> str:
    """The tree as a static icicle: x = token position, one lane per branch.

    The picture has a card of its own in a light or dark shade and is valid XML whatever the
    model's text contains.
    """
    whole = tree_json(view)
    tree, hidden = latest_branches(whole, PICTURE_LANES)
    return Picture(whole, tree, hidden, "dark" if dark else "light", width).draw()


def tree_html(view: TreeView, *, width: int = 960, dark: bool = False) -> str:
    """The picture as an ``<img>`` with a data URI."""
    svg = tree_svg(view, width=width, dark=dark)
    return image(svg, tree_json(view)["alt"], width)
