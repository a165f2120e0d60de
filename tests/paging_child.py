"""Kernels that share a store, page at random and compare with cold runs; for ``test_paging``.

A ``World`` is what one process sees: a directory with pages, some kernels on it, a disk that may
fail. It does one random step after another, and ``verify`` says what must hold after each.

Run as a script it is a parent of processes (``nursery.py``) that each live in a world of their own
on one directory, until they are killed. It has imported MLX but never used it: only so do its
children find MLX's threads alive.
"""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from driver import Always, Bench, FakeBench, new_cache, prompt
from fakes import LETTERS
from mlx_jupyter.cache import store_file, store_writer, tiers
from mlx_jupyter.cache.forgetting import forget
from mlx_jupyter.cache.store import Store
from mlx_jupyter.errors import Interrupted
from nursery import Nursery, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_jupyter.cache.store_writer import Put

ROOMY = 1 << 30
LENGTHS = [30, 64, 100, 255, 256, 257, 300, 400, 511, 513, 600, 700]
LONGEST = 800

QUIET = {
    "new": 12,
    "append": 20,
    "fork": 12,
    "rerun": 16,
    "edit": 8,
    "retry": 6,
    "cancel": 8,
    "stop reading": 8,
    "fail": 4,
    "evict": 16,
    "save next": 8,
    "save all": 14,
    "note": 4,
    "flush": 6,
    "pin": 2,
    "unpin": 2,
    "release": 2,
    "clear": 2,
    "restart": 10,
    "switch": 14,
    "later": 4,
}
"""What may happen without anything being lost on disk, and how often."""

LOSSES = {
    "clear store": 2,
    "lost": 2,
    "forget": 3,
    "forget files": 3,
    "exact": 3,
    "delete": 6,
    "truncate": 6,
    "flip": 6,
    "swap": 5,
    "replace": 2,
    "remove": 2,
    "litter": 2,
    "full": 5,
    "broken write": 4,
    "broken read": 5,
    "stall": 5,
    "short": 3,
}
"""What takes something away, or makes the disk fail."""


class Disk:
    """The disk below the store of this process: it can fail, hang, and do things by halves.

    Attributes:
        open: clear it, and whoever writes waits.
        errors: operation -> (how many more succeed, what the one after them raises).
        halves: reads and writes do a part of what was asked for.
    """

    def __init__(self) -> None:
        self.open = threading.Event()
        self.heal()

    def heal(self) -> None:
        """Work as a disk should."""
        self.errors: dict[str, tuple[int, int]] = {}
        self.halves = False
        self.open.set()

    def asked(self, what: str, nbytes: int) -> int:
        """How much of it to do."""
        if what == "write":
            self.open.wait()
        left, error = self.errors.get(what, (1 << 62, 0))
        if left <= 0:
            raise OSError(error, os.strerror(error))
        self.errors[what] = left - 1, error
        return max(nbytes // 3, 1) if self.halves else nbytes

    def under(self) -> Callable[[], None]:
        """Put it under the store's modules; what takes it away again."""
        disk = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                return super().write(memoryview(data)[: disk.asked("write", len(data))])

        def readv(file: io.FileIO, parts: list[memoryview]) -> int:
            asked = disk.asked("read", sum(part.nbytes for part in parts))
            within = [p[: max(asked - at, 0)] for p, at in zip(parts, starts(parts), strict=True)]
            return really(file, [part for part in within if part.nbytes])

        fake: Any = SimpleNamespace(FileIO=File)
        really = store_file._readv
        store_writer.io, store_file._readv = fake, readv

        def restore() -> None:
            self.heal()
            store_writer.io, store_file._readv = io, really

        return restore


def starts(parts: list[memoryview]) -> Iterator[int]:
    """Where each part begins in all of them."""
    return accumulate((part.nbytes for part in parts[:-1]), initial=0)


class Kernel(FakeBench):
    """One kernel with a fake model."""

    def _check_rows(self, kind: str, stacks: Any, tokens: np.ndarray, start: int) -> None:
        if stacks:  # else they lie on disk
            super()._check_rows(kind, stacks, tokens, start)


@dataclass
class Setting:
    """What a world is like.

    Attributes:
        kinds: of the fake model's layers, or one family's name.
        share: memory's budget in terms of a live cache of the longest conversation; 0: roomy.
        host: likewise, of the host's memory; 0: there is none beside the device's.
        store_budget: of the store.
        always: reading in is always chosen.
        kernels: how many in this process.
        processes: how many there are.
        window: of the window layers.
        chunk: of the prefill.
        calm: nothing is ever lost on disk.
    """

    kinds: tuple[str, ...] = ("rows",)
    share: float = 0
    host: float = 0
    store_budget: int = ROOMY
    always: bool = True
    kernels: int = 2
    processes: int = 1
    window: int = 32
    chunk: int = 64
    calm: bool = False

    @classmethod
    def by(cls, dice: random.Random, kinds: Sequence[str], **more: Any) -> Setting:
        """One at random."""
        made = {
            "kinds": tuple(kinds),
            "share": dice.choice([0, 0.3, 0.7, 1.3, 2.5]),
            "host": dice.choice([0, 0, 0.3, 1.3, 5]),
            "store_budget": dice.choice([ROOMY, ROOMY, 400_000, 60_000, 12_000]),
            "always": dice.random() < 0.8,
            "kernels": dice.choice([1, 2, 3]),
            "window": dice.choice([4, 32, 300]),
            "chunk": dice.choice([16, 64, 256]),
        }
        return cls(**{**made, **more})


@dataclass
class World:
    """See the module.

    Attributes:
        place: the store's directory.
        setting: what it is like.
        disk: below the store.
        told: what was done.
    """

    place: Path
    setting: Setting
    disk: Disk = field(default_factory=Disk)
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ahead = 0.0  # seconds that the store's clock is ahead
        self.prompts: list[list[int]] = [prompt(300, 1)]
        self.known: list[list[int]] = [prompt(300, 1)]
        self.kept: list[list[int]] = []
        self.written: dict[Path, bytes] = {}  # what was put: its digest
        self.tokens: dict[Path, np.ndarray] = {}  # what calm files are of
        self.biggest = 0
        self._family = self.setting.kinds[0] not in ("rows", "window", "state")
        self.longest = 200 if self._family else LONGEST
        self._right: dict[tuple[int, ...], list[int]] = {}
        whole = self._whole()
        self.budget = int(self.setting.share * whole) or ROOMY
        self.host_budget = int(self.setting.host * whole)
        self.kernels = [self._kernel() for _ in range(self.setting.kernels)]
        self.at = 0

    def _bench(self, budget: int = ROOMY) -> Any:
        setting = self.setting
        if self._family:
            return Bench(setting.kinds[0], budget)
        made = Kernel(setting.kinds, budget, window=setting.window, chunk=setting.chunk)
        made._right = self._right
        return made

    def _whole(self) -> int:
        """Bytes of a live cache of the longest conversation."""
        bench = self._bench()
        bench.ask(prompt(self.longest), 2, verify=False)
        return bench.cache.live.nbytes()

    def _kernel(self, store: Store | None = None) -> Any:
        bench = self._bench(self.budget)
        if store is None:
            store = Store(
                self.place,
                budget=self.setting.store_budget,
                now=lambda: time.time() + self.ahead,
            )
            self._watch(store)
        bench.store = store
        bench.shelf = store.shelf("a model", "a model")
        bench.cache = new_cache(bench.model, self.budget, bench.shelf, self.host_budget)
        if self.setting.always:
            bench.cache.rates = Always()
        bench.recent: list[list[int]] = []
        return bench

    def _watch(self, store: Store) -> None:
        """Note what is put, as it is then."""
        put = store.writer.put

        def noted(job: Put) -> bool:
            queued = put(job)
            if queued and not self._family:
                sum_ = xxhash.xxh3_128()
                for part in job.sheet.parts:
                    sum_.update(part)
                # Whoever puts the same again, puts the same.
                before = self.written.setdefault(job.path, sum_.digest())
                assert before == sum_.digest(), f"{job.entry} is put with another content"
            return queued

        store.writer.put = noted

    @property
    def here(self) -> Any:
        """The kernel that is used now."""
        return self.kernels[self.at]

    # --- steps -------------------------------------------------------------------------------

    def step(self, act: str, dice: random.Random) -> None:
        """Do one thing."""
        self.told.append(f"{self.at}: {act}")
        told = getattr(self, "_" + act.replace(" ", "_"))(dice)
        self.told[-1] += f" {told}" if told is not None else ""

    def _run(self, ids: list[int], dice: random.Random, **options: Any) -> str:
        kernel, cache = self.here, self.here.cache
        ids = ids[: self.longest]
        owner = f"cell {dice.randrange(4)}"
        marks = [(at, "turn") for at in (len(ids) // 2, len(ids) - 4) if at > 0]
        options = {"owner": owner, "marks": marks[: dice.randrange(3)], **options}
        if dice.random() < 0.2:
            options["think_end"] = (dice.choice(LETTERS),)
        count = dice.choice([1, 2, 5, 12, 30])
        at = options.pop("at", None)
        self.prompts.append(ids)
        if at is None:
            run = kernel.ask(ids, count, **options)
            assert run.finish == "length"
            assert run.cached + run.computed == len(ids), (run.cached, run.computed, len(ids))
            kernel.recent.append(ids)
        else:
            run = kernel.cancelled(ids, at, count, **options)
        self.known.append([*ids, *run.tokens])
        return (
            f"{len(ids)} + {count} tokens, {run.cached} cached, {options}, {cache.nbytes()} bytes"
        )

    def _new(self, dice: random.Random) -> str:
        n = dice.choice(LENGTHS) + dice.choice([0, 0, -1, 1, 17])
        seed = dice.randrange(8)
        if dice.random() < 0.5:  # a short beginning that many share
            return self._run([*prompt(40), *prompt(n, seed)], dice)
        return self._run(prompt(n, seed), dice)

    def _append(self, dice: random.Random) -> str:
        base = self.known[-1] if dice.random() < 0.7 else dice.choice(self.known)
        more = prompt(dice.choice([1, 10, 100, 256]), dice.randrange(8))
        return self._run([*base[: self.longest - len(more)], *more], dice)

    def _fork(self, dice: random.Random) -> str:
        base = dice.choice(self.known)
        cut = dice.choice([dice.randint(1, len(base)), min(256, len(base)), min(300, len(base))])
        return self._run([*base[:cut], *prompt(dice.randint(1, 200), dice.randrange(8))], dice)

    def _rerun(self, dice: random.Random) -> str:
        return self._run(dice.choice([self.prompts[-1], dice.choice(self.prompts)]), dice)

    def _edit(self, dice: random.Random) -> str:
        base = list(dice.choice(self.prompts))
        at = dice.randrange(len(base))
        base[at] = (base[at] + 1) % 250
        return self._run(base, dice)

    def _retry(self, dice: random.Random) -> str:
        base = dice.choice(self.prompts)
        return self._run([*base[:-4], *prompt(dice.randint(1, 9), dice.randrange(8))], dice)

    def _cancel(self, dice: random.Random) -> str:
        return self._run(dice.choice(self.known), dice, at=dice.randrange(10))

    def _stop_reading(self, dice: random.Random) -> str:
        """Cancel while stored pages are read."""
        cache = self.here.cache
        opened, left = cache.open, dice.randrange(4)

        def cancelled() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        cache.open = lambda *args, **named: opened(*args, **named, cancelled=cancelled)
        try:
            return self._run(dice.choice(self.known), dice)
        except Interrupted:
            return "and it stopped"
        finally:
            del cache.open

    def _fail(self, dice: random.Random) -> str:
        left = dice.randrange(20)

        def boom(_: int) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise RuntimeError("boom")

        model = self.here.model
        model.before_call = boom
        try:
            self.here.ask(dice.choice(self.known), 4, verify=False, owner="fails")
        except RuntimeError as error:
            assert str(error) == "boom"  # noqa: PT017 - it may also end before
        finally:
            model.before_call = None
        return f"{left}"

    def _evict(self, dice: random.Random) -> str:
        cache = self.here.cache
        nbytes = dice.choice([None, None, cache.nbytes() // 2, cache.nbytes() // 4, 1])
        cache.evict(nbytes)
        return f"{nbytes}, {cache.nbytes()} left"

    def _save_next(self, dice: random.Random) -> None:
        for _ in range(dice.randint(1, 6)):
            self.here.cache.tiers.save_next()

    def _save_all(self, dice: random.Random) -> str:
        left = 200 if self.disk.open.is_set() else 5  # never done while it stands still

        def until() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        kernel = self.here
        kernel.cache.tiers.save_all(until)
        if dice.random() < 0.8:
            self._flush(dice)
            kernel.cache.tiers.note()
            self._keep()
        return f"{kernel.store.usage()}"

    def _keep(self) -> None:
        """What is whole now is on disk, and stays there."""
        kernel = self.here
        if not self.setting.calm or self.setting.store_budget < ROOMY or kernel.cache.exact:
            return
        for ids in kernel.recent:
            if len(ids) >= tiers.WORTH and self._plan(ids).recomputed == 1:
                self.kept.append(ids)
        kernel.recent = []

    def _plan(self, ids: list[int]) -> Any:
        return self.here.cache.plan(np.array(ids, np.int32))

    def _note(self, dice: random.Random) -> None:
        self.here.cache.tiers.note()

    def _flush(self, dice: random.Random) -> None:
        self.disk.open.set()
        assert self.here.store.flush(60)

    def _pin(self, dice: random.Random) -> None:
        self.here.cache.pin(f"cell {dice.randrange(4)}")

    def _unpin(self, dice: random.Random) -> None:
        self.here.cache.unpin(f"cell {dice.randrange(4)}")

    def _release(self, dice: random.Random) -> None:
        cache, owner = self.here.cache, f"cell {dice.randrange(4)}"
        if owner not in cache.pins:
            cache.release(owner)

    def _clear(self, dice: random.Random) -> None:
        self.here.cache.clear()
        self.here.recent = []

    def _restart(self, dice: random.Random) -> str:
        """A fresh cache, and maybe a fresh store, as in a fresh kernel."""
        store = self.here.store
        if again := dice.random() < 0.5:
            self.disk.open.set()
            store.close(60)
        self.kernels[self.at] = self._kernel(None if again else store)
        return "with a new store" if again else "on the same store"

    def _switch(self, dice: random.Random) -> None:
        self.at = (self.at + 1) % len(self.kernels)

    def _later(self, dice: random.Random) -> None:
        self.ahead += dice.choice([61, 1e4, 1e6])

    # --- losses ------------------------------------------------------------------------------

    def _clear_store(self, dice: random.Random) -> None:
        self.here.store.clear()
        self.here.cache.tiers.lost()

    def _lost(self, dice: random.Random) -> None:
        self.here.cache.tiers.lost()

    def _forget(self, dice: random.Random) -> str:
        kernel, owner = self.here, f"cell {dice.randrange(4)}"
        return f"{owner}: {forget(kernel.cache, kernel.shelf, owner, [], [])}"

    def _forget_files(self, dice: random.Random) -> str:
        entries = list(self.here.shelf._listing.entries())
        unwanted = [entry.key for entry in entries if dice.random() < 0.5]
        return str(self.here.shelf.forget(unwanted))

    def _exact(self, dice: random.Random) -> str:
        cache = self.here.cache
        cache.exact = not cache.exact
        return str(cache.exact)

    def _files(self) -> list[Path]:
        found = sorted(self.place.rglob("*.safetensors"))
        return [path for path in found if path.is_file()]  # never a pipe, never /dev/zero

    def _victims(self, dice: random.Random) -> list[Path]:
        files = self._files()
        chosen = dice.sample(files, min(len(files), dice.choice([1, 1, 3, 10])))
        for each in chosen:
            self.written.pop(each, None)
        return chosen

    def _damage(self, dice: random.Random, how: Callable[[Path, bytes], None]) -> str:
        chosen = self._victims(dice)
        for path in chosen:
            with suppress(OSError):
                how(path, path.read_bytes())
        return " ".join(path.name[33:49] for path in chosen)

    def _delete(self, dice: random.Random) -> str:
        return self._damage(dice, lambda path, _: path.unlink())

    def _truncate(self, dice: random.Random) -> str:
        return self._damage(dice, lambda path, b: os.truncate(path, dice.randrange(len(b) or 1)))

    def _flip(self, dice: random.Random) -> str:
        def flip(path: Path, data: bytes) -> None:
            changed = bytearray(data)
            changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            path.write_bytes(changed)

        return self._damage(dice, flip)

    def _swap(self, dice: random.Random) -> str:
        files = self._files()
        return self._damage(dice, lambda path, _: path.write_bytes(dice.choice(files).read_bytes()))

    def _replace(self, dice: random.Random) -> str:
        def replace(path: Path, _: bytes) -> None:
            path.unlink()
            dice.choice(
                [path.mkdir, lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path)]
            )()

        return self._damage(dice, replace)

    def _remove(self, dice: random.Random) -> None:
        self.written.clear()
        shutil.rmtree(self.place, ignore_errors=True)

    def _litter(self, dice: random.Random) -> None:
        for shard in self.place.glob("*/*/"):
            with suppress(OSError):
                (shard / f".{dice.getrandbits(64):016x}.part").write_bytes(b"half")

    def _full(self, dice: random.Random) -> None:
        self.disk.errors["write"] = dice.randrange(6), errno.ENOSPC

    def _broken_write(self, dice: random.Random) -> None:
        self.disk.errors["write"] = dice.randrange(6), errno.EIO

    def _broken_read(self, dice: random.Random) -> None:
        self.disk.errors["read"] = dice.randrange(12), errno.EIO

    def _short(self, dice: random.Random) -> None:
        self.disk.halves = True

    def _stall(self, dice: random.Random) -> None:
        self.disk.open.clear()

    def _heal(self, dice: random.Random) -> None:
        self.disk.heal()

    # --- what must hold ----------------------------------------------------------------------

    def verify(self) -> None:
        """After every step."""
        for kernel in self.kernels:
            kernel.audit()
            assert kernel.cache.tally.host <= self.host_budget
            if self.setting.calm:
                self._check_twins(kernel)
        names = [t.name for t in threading.enumerate() if t.ident is not None]
        assert names.count("mlx-pages") <= len(self.kernels), names
        assert "mlx-read-ahead" not in names, names
        self._check_store()
        if self.kept:
            ids = self.kept[len(self.told) % len(self.kept)]
            if not self.here.cache.exact:
                self.here.cache.tiers.adopt(np.array(ids, np.int32))
                plan = self._plan(ids)
                assert plan.recomputed == 1, f"{len(ids)} tokens were kept: {plan}"

    def _check_twins(self, kernel: Any) -> None:
        """What is said to have a file has one, with its own tokens."""
        for node in kernel.cache.trie.nodes():
            tokens = np.concatenate([n.tokens for n in node.path()])
            for thing in (*node.pages, *node.strips, *node.marks.values()):
                is_mark = thing in node.marks.values()
                entry = thing.entry if is_mark else thing.twin
                end = thing.at if is_mark else thing.end
                if entry is None:
                    assert thing.residence != "disk", thing
                    continue
                if not entry.path.is_file():
                    assert self._is_in_a_longer_one(kernel, entry), f"{thing} has no file"
                    continue
                if entry.path not in self.tokens:
                    with store_file.open_file(entry.path) as file:
                        self.tokens[entry.path] = store_file.read_tokens(file, entry.place)
                theirs, ours = self.tokens[entry.path], tokens[entry.base : end]
                assert (theirs[: len(ours)] == ours).all(), f"{entry} isn't of {thing}"

    def _is_in_a_longer_one(self, kernel: Any, entry: Any) -> bool:
        """Whether what was a tip has grown, in another kernel."""
        ours = self.tokens.get(entry.path)
        for other in kernel.shelf.find(entry.parent):
            if (other.kind, other.start) == (entry.kind, entry.start) and other.end > entry.end:
                theirs = kernel.shelf.tokens(other)
                if ours is None or (theirs[: len(ours)] == ours).all():
                    return True
        return False

    def _check_store(self) -> None:
        sizes = list(filter(None, map(_size, self.place.rglob("*.safetensors"))))
        self.biggest = max([self.biggest, *sizes])
        others = len(self.kernels) + self.setting.processes - 1
        allowed = self.setting.store_budget + others * self.biggest
        assert sum(sizes) <= allowed, f"{sum(sizes)} bytes on disk, {allowed} may be"
        opened = open_files(self.place)
        assert len(opened) <= 4 * len(self.kernels), opened
        if self.setting.processes == 1 and not self._family:
            self._check_written()

    def _check_written(self) -> None:
        """Files have what was put, as it was then."""
        for path, digest in self.written.items():
            if not path.is_file():
                continue
            data = path.read_bytes()
            body = data[8 + int.from_bytes(data[:8], "little") :]
            assert xxhash.xxh3_128(body).digest() == digest, f"{path} isn't what was put"

    def end(self) -> None:
        """Nothing is left open; every conversation is still answered."""
        self.disk.heal()
        for kernel in self.kernels:
            for ids in self.prompts[-4:]:
                kernel.ask(ids, 3)
        self.verify()
        self.leave()
        assert not open_files(self.place), open_files(self.place)

    def leave(self) -> None:
        """End all threads."""
        self.disk.heal()
        for kernel in self.kernels:
            assert kernel.store.close(60)


def _size(path: Path) -> int:
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size if path.is_file() and not path.is_symlink() else 0


def open_files(place: Path) -> list[str]:
    """What this process has open below a directory."""
    found: list[str] = []
    for handle in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{handle}"))
    return [each for each in found if each.startswith(str(place))]


Program = list[tuple[str, int]]
"""Steps: what to do, and the seed of how."""


def run_program(world: World, program: Program) -> None:
    """Do the steps; what was done is told when something is wrong."""
    restore = world.disk.under()
    try:
        for act, seed in program:
            world.step(act, random.Random(seed))
            world.verify()
        world.end()
    except BaseException as error:
        error.add_note("\n".join(["The program:", *world.told]))
        raise
    finally:
        restore()
        for kernel in world.kernels:
            kernel.store.close(60)


def weighted(*steps: dict[str, int]) -> list[str]:
    """Each step as often as its weight."""
    return [act for each in steps for act, weight in each.items() for _ in range(weight)]


# --- processes ----------------------------------------------------------------------------------


DAMAGE = {"delete": 2, "truncate": 2, "flip": 2, "forget": 1, "forget files": 1}
"""What one process may do to the files of another."""


def wander(place: str, seed: int, steps: int, damage: bool, setting: dict[str, Any]) -> None:
    """Live in a world on a directory that others use too, for so many steps."""
    dice = random.Random(seed)
    made = Setting.by(dice, setting.pop("kinds"), kernels=1, **setting)
    acts = weighted(QUIET, DAMAGE if damage else {})
    program = [(dice.choice(acts), dice.randrange(1 << 30)) for _ in range(steps)]
    run_program(World(Path(place), made), program)


class Wanderers(Nursery):
    """The script as seen from the tests.

    Args:
        errors: a file for what children have to say of their end.
    """

    def __init__(self, errors: Path) -> None:
        super().__init__(__file__, errors)
        self.errors = errors

    def start_in(
        self, place: Path, seed: int, *, steps: int, damage: bool = False, **setting: Any
    ) -> int:
        """Start a process in a world; its pid."""
        return self.start(place=str(place), seed=seed, steps=steps, damage=damage, setting=setting)

    def kill(self, pid: int) -> None:
        """Kill a process, and see that nothing else had ended it."""
        os.kill(pid, signal.SIGKILL)
        assert self.reap(pid) in (0, -signal.SIGKILL), self.errors.read_text()[-20_000:]


def _do(**task: Any) -> None:
    """Wander; whatever the end, MLX's threads aren't waited for."""
    try:
        wander(**task)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    os._exit(0)


if __name__ == "__main__":
    serve(_do)
