"""What one model has in a store: found by chain keys, read with every check, written later."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mlx_jupyter.cache import keys, store_file, store_format
from mlx_jupyter.cache.store_file import Damaged, Header
from mlx_jupyter.cache.store_listing import Entry, Usage, remove
from mlx_jupyter.cache.store_reading import AHEAD, Reading
from mlx_jupyter.cache.store_writer import Put, touch
from mlx_jupyter.cache.trie import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from mlx_jupyter.cache.store import Store
    from mlx_jupyter.cache.store_file import Content, Into
    from mlx_jupyter.cache.store_format import Tensor

T = TypeVar("T")

LABEL = "model.json"
"""The file beside a model's pages that has its name."""

_LABEL_BYTES = 4096


class Shelf:
    """See the module; made by ``Store.shelf``. Any thread.

    Args:
        store: keeps it.
        fingerprint: the model's.
        name: the model's, for lists.

    Attributes:
        root: the chain key at offset 0.
    """

    def __init__(self, store: Store, fingerprint: str, name: str) -> None:
        self.root = keys.root(fingerprint)
        self._name = name
        self._store = store
        self._listing = store.listings.of(self.root.hex())

    def find(self, parent: bytes) -> tuple[Entry, ...]:
        """What hangs on a chain key, by end; what other kernels wrote included."""
        return self._listing.find(parent) if self._store.on else ()

    def tokens(self, entry: Entry) -> np.ndarray | None:
        """The ids from an entry's base to its end, int32; None when it is gone or damaged."""

        def read() -> np.ndarray:
            with store_file.open_file(entry.path) as file:
                tokens = store_file.read_tokens(file, entry.place)
            _verify(entry, tokens)
            return tokens

        return self._attempt(entry, read)

    def header(self, entry: Entry) -> Header | None:
        """What an entry's file says that it holds; None when it is gone or damaged."""

        def read() -> Header:
            with store_file.open_file(entry.path) as file:
                return Header(file, entry.place)

        return self._attempt(entry, read)

    def read(self, entry: Entry) -> Content | None:
        """All that an entry's file holds; None when it is gone or damaged."""
        return self._read(entry, lambda: False)

    def reader(
        self,
        entries: Sequence[Entry],
        ahead_bytes: int = AHEAD,
        *,
        into: Callable[[Entry], Into | None] = lambda _: None,
        keep: bool = True,
        told_to_stop: Callable[[], bool] = lambda: False,
    ) -> Reading:
        """Read entries in order, ahead of their use; see ``Reading``.

        Args:
            entries: what to read.
            ahead_bytes: see ``Reading``.
            into: says for an entry where its tensors' bytes go; asked on other threads.
            keep: False: they are only checked, and not among what is given.
            told_to_stop: see ``Reading``.
        """

        def read(entry: Entry, stopped: Callable[[], bool]) -> Content | None:
            return self._read(entry, stopped, into(entry)) if keep else self._check(entry, stopped)

        return Reading(read, entries, ahead_bytes, told_to_stop)

    def put(
        self,
        kind: keys.Kind,
        parent: bytes,
        tokens: np.ndarray,
        start: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, str] | None = None,
    ) -> bool:
        """Have something written in the background; what is there already is only touched.

        Never waits. The tensors' buffers aren't copied: they mustn't change any more.

        Args:
            kind: what it is.
            parent: the chain key at its base.
            tokens: the ids from its base to its end, int32.
            start: its first token; for a snapshot its end.
            tensors: by name.
            meta: kept with it.

        Returns:
            whether it was queued; False when the queue is full or the store is off or pauses.

        Raises:
            ValueError: there is no such place, or the tensors can't be stored.
        """
        if not self._store.on:
            return False
        tokens = np.array(tokens, np.int32)
        end = keys.end(kind, start, len(tokens))
        key = keys.entry(parent, tokens, kind, start)
        child = keys.chain(parent, tokens) if end % PAGE == 0 else None
        directory = self._listing.directory / parent.hex()[:2]
        entry = Entry(kind, parent, key, start, end, child, directory=str(directory))
        sheet = store_format.lay_out(entry.place, tokens, tensors, meta or {})
        if sheet.nbytes > self._store.budget:
            return False
        return self._store.writer.put(Put(entry, sheet, lambda: self._prepare(directory)))

    def expect(self, parent: bytes) -> None:
        """What was last used of those that go on from a chain key may be asked for next.

        The operating system is told in the background, so that a disk's latency is over by then.
        """

        def do() -> None:
            key: bytes | None = parent
            left = AHEAD
            while key is not None and left > 0:
                found = [e for e in self.find(key) if e.kind == "rows"]
                best = max(found, key=lambda entry: (entry.used, entry.end), default=None)
                if best is None:
                    return
                store_file.will_need(best.path)
                left -= best.nbytes
                key = best.child

        if self._store.on:
            self._store.writer.do(do)

    def touch(self, entries: Iterable[Entry]) -> None:
        """Note in the background that these were used just now."""
        paths, now = [entry.path for entry in entries], self._store.now()

        def do() -> None:
            for path in paths:
                touch(path, now)

        if paths and self._store.on:
            self._store.writer.do(do)

    def forget(self, unwanted: Iterable[bytes]) -> int:
        """Remove what has these keys for good, also what is queued; how many files were removed."""
        if not self._store.on:
            return 0
        gone = set(unwanted)
        self._store.writer.drop(lambda entry: entry.key in gone)
        found = [entry for entry in self._listing.entries() if entry.key in gone]
        return sum(remove(entry.path, self._store.faults) for entry in found)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what is queued is written; False when ``timeout`` seconds passed first."""
        return self._store.flush(timeout)

    def usage(self) -> Usage:
        """What this model's files take."""
        return self._listing.usage() if self._store.on else Usage()

    def _read(
        self, entry: Entry, stopped: Callable[[], bool], into: Into | None = None
    ) -> Content | None:
        def read() -> Content:
            with store_file.open_file(entry.path) as file:
                content = store_file.read(file, entry.place, stopped, into)
            _verify(entry, content.tokens)
            return content

        return self._attempt(entry, read)

    def _check(self, entry: Entry, stopped: Callable[[], bool]) -> Content | None:
        def check() -> Content:
            with store_file.open_file(entry.path) as file:
                content = store_file.check(file, entry.place, stopped)
            _verify(entry, content.tokens)
            return content

        return self._attempt(entry, check)

    def _attempt(self, entry: Entry, read: Callable[[], T]) -> T | None:
        """What was read; None, noted and removed where that is right, when it can't be."""
        faults = self._store.faults
        try:
            return read()
        except (FileNotFoundError, store_file.Stopped):
            return None  # evicted: nothing is wrong
        except Damaged as error:
            faults.note("damaged", f"A stored page is ignored and removed, {error}: {entry.path}")
            self._discard(entry.path)
        except (OSError, MemoryError) as error:
            faults.note("unreadable", f"A stored page can't be read: {error!r}")
        return None

    def _discard(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()
            return
        with suppress(OSError):
            path.rmdir()

    def _prepare(self, directory: Path) -> None:
        """Make the directory for a file, with those above it and the model's label.

        Raises:
            OSError: it can't be made, or isn't only ours.
        """
        store, model = self._store.directory, self._listing.directory
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (model, directory):
            with suppress(FileExistsError):
                each.mkdir(mode=0o700)
        for each in (store, model):
            if reason := refusal(each):
                raise PermissionError(reason)
        with suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            handle = os.open(model / LABEL, flags, 0o600)
            with os.fdopen(handle, "w", encoding="ascii") as file:
                json.dump({"name": self._name[:200]}, file)


def _verify(entry: Entry, tokens: np.ndarray) -> None:
    """Raise ``Damaged`` unless these tokens are what the entry's keys were made of."""
    right = (
        len(tokens) == entry.end - entry.base
        and keys.entry(entry.parent, tokens, entry.kind, entry.start) == entry.key
        and (entry.child is None or keys.chain(entry.parent, tokens) == entry.child)
    )
    if not right:
        raise Damaged("its tokens aren't those of its name")


def refusal(directory: Path) -> str:
    """Why a directory can't be trusted; ``""`` when it can, or isn't there yet."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error)
    if not stat.S_ISDIR(found.st_mode):
        return f"{directory} is no directory"
    if found.st_uid != os.geteuid():
        return f"{directory} belongs to another user"
    if found.st_mode & 0o022:
        return f"others may write to {directory}"
    return ""


def label(directory: Path) -> str:
    """The name of the model whose directory this is; ``""`` when it isn't known."""
    try:
        with (directory / LABEL).open("rb") as file:
            name = json.loads(file.read(_LABEL_BYTES))["name"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return ""
    return name[:200] if isinstance(name, str) else ""


def take_down(directory: Path) -> None:
    """Remove a model's directory where nothing is in it any more."""
    with suppress(OSError):
        for shard in directory.iterdir():
            if shard.name != LABEL:
                shard.rmdir()
        (directory / LABEL).unlink(missing_ok=True)
        directory.rmdir()
