"""The answers of several models side by side.

In a notebook they are one display that is updated: a table with a column for each model, static
HTML whose text is escaped, and a plain text with one answer after the other for everything else
that reads the file. A terminal gets one after the other as they come.
"""

from __future__ import annotations

import html
import time
import uuid
from typing import TYPE_CHECKING

from IPython.core.displaypub import CapturingDisplayPublisher

from mlx_jupyter.notebook.display import (
    BYTES_PER_SECOND,
    Collecting,
    Silent,
    Terminal,
    in_kernel,
)
from mlx_jupyter.notebook.markdown import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from IPython.core.interactiveshell import InteractiveShell

    from mlx_jupyter.engine.request import Event
    from mlx_jupyter.notebook.commands import View
    from mlx_jupyter.notebook.display import Bundle, Screen

    class Column(Screen, Protocol):
        """A screen that can be told why there is no answer."""

        def tell(self, line: str) -> None:
            """Show a line under what there is."""
            ...


_CELL = "text-align:left;vertical-align:top;white-space:pre-wrap;overflow-wrap:anywhere"


class Board:
    """A column for each of several models.

    Attributes:
        screens: theirs, in the same order.
    """

    screens: Sequence[Column]

    def close(self) -> None:
        """Nothing more comes."""


def board_for(shell: InteractiveShell, view: View, names: Sequence[str]) -> Board:
    """The board that suits the shell and the view.

    Args:
        shell: where it is shown.
        view: how; columns are the view ``md``, which is Markdown for a single answer.
        names: the models', as they were asked for.
    """
    if view == "none":
        return _Hidden(names)
    captured = isinstance(shell.display_pub, CapturingDisplayPublisher)
    if captured or in_kernel(shell):
        return _Shown(shell, view, names, live=not captured)
    return _Printed(view, names)


class _SilentColumn(Silent):
    def tell(self, line: str) -> None:
        """Nothing."""


class _Hidden(Board):
    def __init__(self, names: Sequence[str]) -> None:
        self.screens = [_SilentColumn() for _ in names]


class _PrintedColumn(Terminal):
    """A column on standard output: begins with its model's name."""

    def __init__(self, view: View, name: str, *, first: bool) -> None:
        super().__init__(view)
        self._head = ("" if first else "\n") + f"{name}:\n"

    def show(self, events: Sequence[Event]) -> None:
        """Write what is new."""
        self._begin()
        super().show(events)

    def finish(self, text: str, footer: str) -> None:
        """Write what is missing of the text, then the footer."""
        self._begin()
        super().finish(text, footer)

    def tell(self, line: str) -> None:
        """Write a line of its own."""
        self._begin()
        self._end_line()
        self._write(f"[{line}]\n")

    def _begin(self) -> None:
        self._write(self._head)
        self._head = ""


class _Printed(Board):
    def __init__(self, view: View, names: Sequence[str]) -> None:
        self.screens = [_PrintedColumn(view, n, first=not i) for i, n in enumerate(names)]


class _ShownColumn(Collecting):
    """A column of a display that the board publishes."""

    def __init__(self, view: View, name: str, changed: Callable[[bool], None]) -> None:
        super().__init__(view)
        self.name = name
        self.body = ""
        self.footer = ""
        self._changed = changed

    def show(self, events: Sequence[Event]) -> None:
        """Show the text so far, or progress while there is none."""
        self.take(events)
        self.body = self.text()
        self.footer = "" if self.body else self.progress
        self._changed(False)

    def finish(self, text: str, footer: str) -> None:
        """Show the whole text with its footer."""
        self.body, self.footer = self.text(text), footer
        self._changed(True)

    def fail(self) -> None:
        """Keep the text that is there, take progress away."""
        self.footer = ""

    def tell(self, line: str) -> None:
        """Put a line in the footer's place."""
        self.footer = line
        self._changed(True)


class _Shown(Board):
    """One display, updated in place; with ``live`` off published once, at the end."""

    def __init__(
        self, shell: InteractiveShell, view: View, names: Sequence[str], *, live: bool
    ) -> None:
        self._columns = [_ShownColumn(view, name, self._changed) for name in names]
        self.screens = self._columns
        self._shell = shell
        self._view = view
        self._live = live
        self._id = uuid.uuid4().hex
        self._shown: Bundle | None = None
        self._next = 0.0

    def close(self) -> None:
        """Publish what hasn't been."""
        self._live = True
        self._changed(True)

    def _changed(self, at_once: bool) -> None:
        now = time.monotonic()
        if not self._live or (not at_once and now < self._next):
            return
        data = self._bundle()
        self._next = now + sum(map(len, data.values())) / BYTES_PER_SECOND
        if data != self._shown:
            self._shell.display_pub.publish(
                data, {}, transient={"display_id": self._id}, update=self._shown is not None
            )
            self._shown = data

    def _bundle(self) -> Bundle:
        parts = []
        for each in self._columns:
            lines = [f"{each.name}:", *([each.body] if each.body else [])]
            lines += [f"[{each.footer}]"] if each.footer else []
            parts.append(plain("\n".join(lines)))
        data = {"text/plain": "\n\n".join(parts)}
        if self._view == "md":
            data["text/html"] = self._table()
        return data

    def _table(self) -> str:
        width = f"width:{100 // len(self._columns)}%"
        heads = "".join(
            f'<th scope="col" style="{_CELL};{width}">{_escaped(c.name)}</th>'
            for c in self._columns
        )
        rows = [
            "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells)
            for cells in (
                [_escaped(c.body) for c in self._columns],
                [f"<em>{_escaped(c.footer)}</em>" if c.footer else "" for c in self._columns],
            )
        ]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return (
            '<table style="width:100%;table-layout:fixed">'
            f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
        )


def _escaped(text: str) -> str:
    return html.escape(plain(text), quote=True)
