"""Traces: which token ids were asked for, in which order, by whom.

A trace lets ``benchmarks/retention.py`` replay a notebook's requests against other policies and
budgets. It is JSON lines: a header, then one record a request:

* ``owner``: a number for the cell or branch, in the order of their first request; null for none;
* ``keep``: so many leading ids are those of the same owner's request before (prompt, then
  generated ids), ``ids``: the rest of the prompt;
* ``generated``: the ids that the model made, without the end token;
* ``marks``: ``[offset, kind]`` where the conversation will come back to.

There is no text and no name in it. Ids can be turned back into text with the model's tokenizer,
so a trace is as private as the notebook: the file can be read by its user only.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Self, cast, get_args

import numpy as np

from mlx_jupyter.cache.trie import common_prefix
from mlx_jupyter.cache.view import MarkKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from os import PathLike
    from types import TracebackType

log = logging.getLogger(__name__)

FORMAT = "mlx-jupyter trace"
VERSION = 1

OWNERS = 256
"""Owners whose last request the writer remembers; a forgotten one's next is written in full."""

_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One request of a trace.

    Attributes:
        ids: the prompt, int32, shape (prompt,).
        generated: what the model made of it, int32, without the end token.
        owner: number of the cell or branch that asked; None when nobody keeps the result.
        marks: (offset, kind) where the conversation will come back to.
    """

    ids: np.ndarray
    generated: np.ndarray
    owner: int | None = None
    marks: tuple[tuple[int, MarkKind], ...] = ()


class TraceWriter:
    """Writes a trace as requests end. A context manager; used on one thread.

    A failing disk ends the trace with a warning and never the request.

    Args:
        path: the file, overwritten; readable by its user only.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._numbers: dict[str, int] = {}
        self._before: OrderedDict[str | None, np.ndarray] = OrderedDict()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.fchmod(handle, 0o600)  # the file may have been there, open to others
        self._file: IO[str] | None = os.fdopen(handle, "w", encoding="ascii")
        self._write({"format": FORMAT, "version": VERSION})

    def request(
        self,
        ids: Sequence[int] | np.ndarray,
        generated: Sequence[int] | np.ndarray,
        owner: str | None = None,
        marks: Iterable[tuple[int, MarkKind]] = (),
    ) -> None:
        """Add one request.

        Args:
            ids: the prompt.
            generated: the ids that the model made.
            owner: the cell or branch that asked.
            marks: (offset, kind) where the conversation will come back to.
        """
        prompt, made = np.asarray(ids, np.int32), np.asarray(generated, np.int32)
        keep = common_prefix(self._before.pop(owner, _NONE), prompt)
        self._before[owner] = np.concatenate([prompt, made])
        if len(self._before) > OWNERS:
            self._before.popitem(last=False)
        number = None if owner is None else self._numbers.setdefault(owner, len(self._numbers))
        self._write(
            {
                "owner": number,
                "keep": keep,
                "ids": prompt[keep:].tolist(),
                "generated": made.tolist(),
                "marks": [[int(at), kind] for at, kind in marks],
            }
        )

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            log.warning("The trace ends here, its file can't be written: %s", error)
            self.close()

    def close(self) -> None:
        """Close the file; what comes after is ignored."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                log.debug("closing the trace failed", exc_info=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read(path: str | PathLike[str]) -> list[Step]:
    """The requests of a trace, gzipped or not.

    A record that was cut short (the process ended in the middle of a write) ends the trace.

    Raises:
        ValueError: the file is no trace, or one of another version.
        OSError: it can't be read.
    """
    opened = gzip.open if os.fspath(path).endswith(".gz") else open
    with cast("IO[str]", opened(path, "rt", encoding="ascii")) as file:
        lines = file.read().split("\n")
    header = _record(lines[0])
    if header is None or header.get("format") != FORMAT:
        raise ValueError(f"{os.fspath(path)} is no trace of mlx-jupyter.")
    if header.get("version") != VERSION:
        raise ValueError(f"The trace has version {header.get('version')}, known is {VERSION}.")
    before: dict[int | None, np.ndarray] = {}
    steps: list[Step] = []
    for number, line in enumerate(lines[1:], 2):
        record = _record(line)
        if record is None:
            if any(lines[number:]):
                raise ValueError(f"Line {number} of the trace is no record.")
            break
        steps.append(_step(record, before, number))
    return steps


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _step(record: dict[str, Any], before: dict[int | None, np.ndarray], line: int) -> Step:
    try:
        owner, keep = record["owner"], record["keep"]
        rest, made = (np.array(record[name], np.int32) for name in ("ids", "generated"))
        marks = tuple((int(at), cast("MarkKind", kind)) for at, kind in record["marks"])
        known = before.get(owner, _NONE)
        if not 0 <= keep <= len(known) or not {kind for _, kind in marks} <= _KINDS:
            raise ValueError("a part is out of range")
        ids = np.concatenate([known[:keep], rest])
        before[owner] = np.concatenate([ids, made])
        return Step(ids, made, owner, marks)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"Line {line} of the trace is damaged: {error}") from error


_KINDS = frozenset(get_args(MarkKind))
