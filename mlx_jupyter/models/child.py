"""Child processes for downloads: cancelled at once, watched for progress, never deadlocked.

A download runs in a process of its own, in a session of its own, so that an interrupt of the
kernel's process group doesn't tear it half-way and a cancel can end it whatever it waits for.
Its output goes to a file, so that a full pipe can't block it, and its last line is kept.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from mlx_jupyter.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

PERIOD = 0.1
"""Seconds between two looks at the cancel flag and the progress."""

STALL = 180.0
"""Seconds without any progress after which a download is given up; the tools' own timeouts and
retries come first."""

GRACE = 2.0
"""Seconds between asking a child to end and ending it."""


class ChildFailed(Exception):
    """The child ended with an error or stood still; the text is its last line."""


def run(
    command: Sequence[str],
    log: Path,
    *,
    measure: Callable[[], int],
    cancelled: Callable[[], bool],
    env: Mapping[str, str] | None = None,
    stall: float = STALL,
) -> None:
    """Run ``command`` to its end.

    Args:
        command: program and arguments; no shell.
        log: file for its standard output and error.
        measure: called each period; a number that changes while there is progress.
        cancelled: looked at each period.
        env: additions to the environment.
        stall: seconds without a change of ``measure`` after which the child is given up.

    Raises:
        Interrupted: ``cancelled`` answered True; the child is gone.
        ChildFailed: it ended with a status other than 0, couldn't start or stood still.
    """
    try:
        with log.open("wb") as out:
            child = subprocess.Popen(  # noqa: S603 - our own arguments, no shell
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
    except OSError as error:
        raise ChildFailed(str(error)) from error
    try:
        _watch(child, measure, cancelled, stall)
    finally:
        end(child)
    if child.returncode:
        raise ChildFailed(last_line(log) or f"ended with status {child.returncode}")


def _watch(
    child: subprocess.Popen[bytes],
    measure: Callable[[], int],
    cancelled: Callable[[], bool],
    stall: float,
) -> None:
    seen, since = -1, time.monotonic()
    while True:
        if cancelled():
            raise Interrupted
        now = measure()
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > stall:
            raise ChildFailed(f"no progress for {stall:g} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(PERIOD)
            return


def end(child: subprocess.Popen[bytes]) -> None:
    """Make sure that ``child`` and its own children are gone."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)


def last_line(log: Path) -> str:
    """The line of a tool's output that says why it failed: its last error line, else its last."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "×"))]
    return (errors or lines or [""])[-1][:500]


def tree_bytes(directory: Path) -> int:
    """Bytes of all files below ``directory``, which may change meanwhile."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total
