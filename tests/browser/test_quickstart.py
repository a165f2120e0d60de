"""The quickstart in JupyterLab, with the real model, cell by cell as a reader runs it."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"

REUSED = re.compile(r"reused ([\d,]+) of ([\d,]+) tokens")


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_it_is_committed_without_outputs():
    for cell in nbformat.read(QUICKSTART, as_version=4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.real
def test_every_cell_works_and_answers_stream(lab, tab):
    source = nbformat.read(QUICKSTART, as_version=4)
    path = lab.write("quickstart.ipynb", source)
    notebook = lab.open(tab, "quickstart.ipynb")

    footers = {}
    for index, cell in enumerate(source.cells):
        if cell.cell_type != "code":
            continue
        notebook.start(index)
        if cell.id == "tutor-1":
            early = notebook.wait_for_text(index, r"^(?!Reading|Loading)\w+ \w+")
            assert "/s" not in early, "nothing was shown before the end"
        assert notebook.wait(index), f"{cell.id}: {notebook.outputs(index)}"
        if cell.source.startswith("%%llm") and "--dry-run" not in cell.source:
            footers[cell.id] = notebook.wait_for_text(index, "/s", timeout=5)

    assert len(footers) == 7
    for name, least in {"question-2": 0.9, "tutor-3": 0.7, "fork": 0.7}.items():
        found = REUSED.search(footers[name])
        assert found, footers[name]
        assert number(found[1]) >= least * number(found[2]), footers[name]

    notebook.save()
    saved = path.read_text()
    assert len(saved) < 1_000_000
    assert "widget-state" not in saved
