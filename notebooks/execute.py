"""Execute a notebook for real and tell, cell by cell, what it answers.

usage: python notebooks/execute.py SOURCE.ipynb DESTINATION.ipynb

The source is only read. The destination is written even when a cell fails, so that one can look
at what happened; the exit status is then 1. Widget state isn't stored: a saved notebook shows
every widget's static form.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

CELL_TIMEOUT = 300
"""Seconds that one cell may take."""

MOST = 5
"""Lines shown of one output."""

WIDTH = 96


def text_of(output: Any) -> str:
    """An output as a person would read it in a terminal."""
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return str(output.data.get("text/plain", ""))


def gist(text: str, indent: str = "      │ ") -> str:
    """The beginning and the last line of a text (an answer's footer), wrapped for a terminal."""
    lines = [part for line in text.strip().splitlines() for part in textwrap.wrap(line, WIDTH)]
    if len(lines) > MOST + 1:
        lines = [*lines[: MOST - 1], f"… {len(lines) - MOST} more lines", lines[-1]]
    return "\n".join(indent + line for line in lines)


class Narrator:
    """Prints what is going on: nbclient calls these before and after each cell."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self.started = 0.0

    def begin(self, cell: Any, cell_index: int) -> None:
        """A cell starts: its place and first line."""
        self.started = time.monotonic()
        if cell.cell_type == "code":
            first = (cell.source.strip().splitlines() or [""])[0]
            print(f"  {cell_index + 1:2}/{self.cells}  {first}", flush=True)

    def end(self, cell: Any, **_: Any) -> None:
        """A cell ended: how long it took and the head of its output."""
        for output in cell.get("outputs", []):
            if shown := gist(text_of(output)):
                print(shown)
        print(f"         {time.monotonic() - self.started:.1f} s", flush=True)


def execute(source: Path, destination: Path) -> bool:
    """Run every cell of ``source``; True when all of them succeeded."""
    notebook = nbformat.read(source, as_version=4)
    destination.parent.mkdir(parents=True, exist_ok=True)
    narrator = Narrator(len(notebook.cells))
    # A live widget would be of no use in the file that is written: its kernel is gone.
    os.environ["MLX_JUPYTER_WIDGETS"] = "off"
    kernel_log = destination.with_suffix(".kernel.log")
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        store_widget_state=False,
        resources={"metadata": {"path": str(destination.parent)}},
        on_cell_start=narrator.begin,
        on_cell_executed=narrator.end,
    )
    with kernel_log.open("wb") as log:
        try:
            client.execute(stderr=log)
        except CellExecutionError:
            print(f"The cell failed; its traceback is in {destination}", file=sys.stderr)
            return False
        except DeadKernelError:
            print(f"The kernel died; its last words are in {kernel_log}", file=sys.stderr)
            return False
        finally:
            nbformat.write(notebook, destination)
    return True


def main(arguments: list[str]) -> int:
    """The command line."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    return 0 if execute(Path(arguments[0]), Path(arguments[1]).resolve()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
