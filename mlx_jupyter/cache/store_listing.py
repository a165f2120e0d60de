"""What is stored, told by the files' names alone.

A model's directory has one directory for each first byte of a parent key that occurs, so that each
has few files. A name carries all that an index needs; what doesn't look like one of ours isn't
listed and never touched. Listings are kept, and made again when a directory's own time shows that
something was added or removed, by whatever process.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mlx_jupyter.cache import keys
from mlx_jupyter.cache.trie import PAGE
from mlx_jupyter.latch import holding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_jupyter.cache.store_faults import Faults

FINE, COARSE = 20_000_000, 2_000_000_000
"""Nanoseconds after which a directory's time would show a further change: clocks tick, and where
every time is a whole second they tick slowly."""

_NAME = re.compile(
    r"([0-9a-f]{32})-(rows|window|state)-(\d{1,9})-(\d{1,9})-([0-9a-f]{32})(?:-([0-9a-f]{32}))?"
    r"\.safetensors"
)
_SHARD = re.compile(r"[0-9a-f]{2}")
_MODEL = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"\.[0-9a-f]{16}\.part")


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored file.

    Attributes:
        kind: what it holds.
        parent: the chain key at its base.
        key: its own key.
        start: its first token; a snapshot's end.
        end: the position after its last token.
        child: the chain key at its end, where that is a page boundary; None elsewhere.
        nbytes: the file's size.
        used: seconds since the epoch at its last use, when it was listed.
        directory: where it lies.
    """

    kind: keys.Kind
    parent: bytes
    key: bytes
    start: int
    end: int
    child: bytes | None = None
    nbytes: int = 0
    used: float = 0.0
    directory: str = ""

    @property
    def base(self) -> int:
        """The offset of the chain key that it hangs on."""
        return keys.base(self.end)

    @property
    def name(self) -> str:
        """The file's name."""
        child = f"-{self.child.hex()}" if self.child else ""
        place = f"{self.kind}-{self.start}-{self.end}"
        return f"{self.parent.hex()}-{place}-{self.key.hex()}{child}.safetensors"

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.directory, self.name)

    @property
    def place(self) -> dict[str, str]:
        """What the file's metadata say of it."""
        return {
            "kind": self.kind,
            "parent": self.parent.hex(),
            "key": self.key.hex(),
            "start": str(self.start),
            "end": str(self.end),
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """What files take.

    Attributes:
        files: how many.
        nbytes: their bytes.
    """

    files: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """What one directory holds.

    Attributes:
        stamp: (inode, time) of the directory when it was listed.
        settled: whether a later change would have given it another time.
        by_name: the files.
        by_parent: the same by the chain key that they hang on.
        nbytes: of all files.
        parts: names of files that are being written, or were when their process died.
    """

    stamp: tuple[int, int]
    settled: bool
    by_name: dict[str, Entry]
    by_parent: dict[bytes, tuple[Entry, ...]]
    nbytes: int
    parts: tuple[str, ...]


_EMPTY = Shard((0, 0), False, {}, {}, 0, ())


class Listing:
    """The files of one model; any thread.

    Args:
        directory: the model's.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._shards: dict[str, Shard] = {}
        self._gate = threading.RLock()

    def find(self, parent: bytes) -> tuple[Entry, ...]:
        """What hangs on a chain key."""
        return self.shard(parent.hex()[:2]).by_parent.get(parent, ())

    def usage(self) -> Usage:
        """What all files take."""
        sizes = [entry.nbytes for entry in self.entries()]
        return Usage(len(sizes), sum(sizes))

    def shards(self, *, again: bool = False) -> Iterator[tuple[str, Shard]]:
        """Every directory with its content; ``again``: listed anew, for the times of last use."""
        for name in _subdirectories(self.directory, _SHARD):
            yield name, self.shard(name, again=again)

    def entries(self, *, again: bool = False) -> Iterator[Entry]:
        """Every file."""
        for _, shard in self.shards(again=again):
            yield from shard.by_name.values()

    def shard(self, name: str, *, again: bool = False) -> Shard:
        """The content of one directory, from memory where nothing changed."""
        return holding(self._gate, lambda: self._fresh(name, again))

    def _fresh(self, name: str, again: bool) -> Shard:
        directory = os.path.join(self.directory, name)
        asked = time.time_ns()
        try:
            found = os.lstat(directory)
        except OSError:
            self._shards.pop(name, None)
            return _EMPTY
        if not stat.S_ISDIR(found.st_mode):
            return _EMPTY
        stamp = (found.st_ino, found.st_mtime_ns)
        held = self._shards.get(name)
        if held is not None and held.settled and held.stamp == stamp and not again:
            return held
        tick = FINE if found.st_mtime_ns % 1_000_000_000 else COARSE
        known = held.by_name if held is not None else {}
        listed = _listed(directory, known, stamp, asked - found.st_mtime_ns > tick, again)
        self._shards[name] = listed
        return listed


class Listings:
    """The listings of all models; any thread.

    Args:
        directory: the store's.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: dict[str, Listing] = {}

    def of(self, model: str) -> Listing:
        """The listing of one, by its directory's name."""
        return self._known.setdefault(model, Listing(self.directory / model))

    def __iter__(self) -> Iterator[Listing]:
        """Those that have a directory now."""
        return map(self.of, _subdirectories(self.directory, _MODEL))


def remove(path: Path, faults: Faults) -> bool:
    """Remove a file; False when it isn't there, or can't be removed, which is noted."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        faults.note("unreadable", f"A stored page can't be removed: {error}")
        return False
    return True


def _subdirectories(directory: Path, name: re.Pattern[str]) -> list[str]:
    """The names of the directories in it that match."""
    try:
        with os.scandir(directory) as found:
            return sorted(
                e.name for e in found if name.fullmatch(e.name) and e.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def _listed(
    directory: str, known: dict[str, Entry], stamp: tuple[int, int], settled: bool, again: bool
) -> Shard:
    """What a directory holds; ``known`` entries are looked at anew only where ``again`` says so.

    Files never change under their name, but for the time of their last use.
    """
    by_name: dict[str, Entry] = {}
    parts: list[str] = []
    try:
        with os.scandir(directory) as found:
            for item in found:
                entry = known.get(item.name)
                if entry is None or again or not item.is_file(follow_symlinks=False):
                    entry = _entry(directory, item, entry)
                if entry is not None:
                    by_name[item.name] = entry
                elif _PART.fullmatch(item.name):
                    parts.append(item.name)
    except OSError:
        return _EMPTY
    by_parent: dict[bytes, list[Entry]] = {}
    for entry in by_name.values():
        by_parent.setdefault(entry.parent, []).append(entry)
    held = {
        parent: tuple(sorted(entries, key=lambda e: (e.end, e.start, e.kind, e.key)))
        for parent, entries in by_parent.items()
    }
    nbytes = sum(entry.nbytes for entry in by_name.values())
    return Shard(stamp, settled, by_name, held, nbytes, tuple(parts))


def _entry(directory: str, item: os.DirEntry[str], known: Entry | None) -> Entry | None:
    """What a name says; None for what isn't ours, or went just now."""
    match = _NAME.fullmatch(item.name)
    if match is None or match[1][:2] != directory[-2:]:
        return None
    kind = cast("keys.Kind", match[2])
    start, end, child = int(match[3]), int(match[4]), match[6]
    possible = start == end > 0 if kind == "state" else keys.base(end) <= start < end
    if not possible or (child is not None) != (end % PAGE == 0):
        return None
    try:
        found = item.stat(follow_symlinks=False)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    if known is not None and (known.nbytes, known.used) == (found.st_size, found.st_mtime):
        return known
    return Entry(
        kind,
        bytes.fromhex(match[1]),
        bytes.fromhex(match[5]),
        start,
        end,
        bytes.fromhex(child) if child else None,
        found.st_size,
        found.st_mtime,
        directory,
    )
