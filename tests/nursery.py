"""Scripts that fork processes for tests: started once, so that each child begins at once.

A script that ends in ``serve`` reads one JSON object a line. ``{"reap": pid}`` waits for a child's
end and answers how it ended (as ``waitstatus_to_exitcode``); anything else is a task, for which a
child is forked, and the answer is its pid. ``Nursery`` is such a script as the tests see it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Nursery:
    """A running script: a context manager that starts and reaps its children.

    Args:
        script: the file.
        errors: a file for what the children have to say of their end; else it goes where this
            process's errors go.
    """

    def __init__(self, script: str, errors: Path | None = None) -> None:
        with ExitStack() as opened:
            self._process = subprocess.Popen(
                [sys.executable, script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=opened.enter_context(errors.open("w")) if errors else None,
                text=True,
                start_new_session=True,
            )

    def start(self, **task: Any) -> int:
        """Start a task; its pid."""
        return int(self._ask(task))

    def reap(self, pid: int) -> int:
        """Wait for its end; its exit code, negative for a signal."""
        return int(self._ask({"reap": pid}))

    def _ask(self, question: dict[str, Any]) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve(do: Callable[..., None]) -> None:
    """Be such a script, until nobody asks any more; a child calls ``do`` with its task."""
    for line in sys.stdin:
        question = json.loads(line)
        if (reaped := question.pop("reap", None)) is not None:
            print(os.waitstatus_to_exitcode(os.waitpid(reaped, 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(2, 1)
        do(**question)
        sys.exit(0)
