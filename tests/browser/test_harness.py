"""The harness itself, on notebooks that don't load the extension."""

from __future__ import annotations

import time

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook


def test_run_read_interrupt_restart_save(server, tab):
    cells = [
        new_markdown_cell("# Title"),
        new_code_cell("x = 20\nprint('out', x + 1)"),
        new_code_cell(
            "import time\nfor i in range(600):\n    print('tick', i)\n    time.sleep(0.1)"
        ),
    ]
    path = server.write("harness.ipynb", new_notebook(cells=cells))
    notebook = server.open(tab, "harness.ipynb")
    assert notebook.count() == 3

    assert notebook.run(1)
    assert notebook.text(1).strip() == "out 21"

    notebook.start(2)
    notebook.wait_for_text(2, "tick 1", timeout=10)
    started = time.monotonic()
    notebook.interrupt()
    assert not notebook.wait(2, timeout=10)
    assert time.monotonic() - started < 5
    assert notebook.outputs(2)[-1]["ename"] == "KeyboardInterrupt"

    assert notebook.do("x")[0]["data"]["text/plain"] == "20"
    notebook.restart()
    assert notebook.do("x")[0]["ename"] == "NameError"
    notebook.save()
    assert "out 21" in path.read_text()
