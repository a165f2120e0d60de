"""The disk store of pages: what is read is right, whatever happens to disk and processes."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import random
import signal
import stat
import struct
import threading
import time
import weakref
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import store_child
from mlx_jupyter.cache import (
    keys,
    store_budget,
    store_faults,
    store_file,
    store_format,
    store_listing,
)
from mlx_jupyter.cache.store import Entry, Store, Tensor, Usage
from mlx_jupyter.cache.store_budget import items
from mlx_jupyter.cache.store_ledger import LONG, Ledger
from nursery import Nursery
from store_child import PAGE, everything, ids_of, is_right, put

FDS = Path("/proc/self/fd")
BIG = 1 << 40


@pytest.fixture
def place(tmp_path):
    return tmp_path / "pages"


@pytest.fixture
def store(place):
    made = Store(place, budget=BIG)
    yield made
    made.close(10)


@pytest.fixture
def shelf(store):
    return store.shelf("model", "A model")


@pytest.fixture(autouse=True)
def warned(monkeypatch):
    """What was told in this process; every test begins with nothing told."""
    told: set[str] = set()
    monkeypatch.setattr(store_faults, "_told", told)
    return told


@pytest.fixture(scope="module")
def nursery():
    with Nursery(store_child.__file__) as made:
        yield made


def stored(shelf, seed=0, start=0, end=PAGE, kind="rows", **more) -> Entry:
    """One thing, put and written."""
    ids = ids_of(seed)
    assert put(shelf, ids, start, end, kind, **more)
    assert shelf._store.flush(10)
    parent = keys.chains(shelf.root, ids[: keys.base(end)])[-1]
    start = end if kind == "state" else start
    key = keys.entry(parent, ids[keys.base(end) : end], kind, start)
    (found,) = [e for e in shelf.find(parent) if e.key == key]
    return found


def threads(name) -> list[threading.Thread]:
    # One whose start was interrupted stays listed, but there is no such thread.
    return [t for t in threading.enumerate() if t.name == name and t.ident is not None]


# --- round trips --------------------------------------------------------------------------------

WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "U32": 4, "I64": 8, "U8": 1, "BOOL": 1, "F64": 8}


@st.composite
def tensors(draw):
    made = {}
    names = st.text(max_size=20).filter(lambda n: n not in ("tokens", "__metadata__"))
    for name in draw(st.lists(names, max_size=5, unique=True)):
        dtype = draw(st.sampled_from(sorted(WIDTHS)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        count = int(np.prod(shape)) * WIDTHS[dtype]
        made[name] = Tensor(dtype, shape, draw(st.binary(min_size=count, max_size=count)))
    return made


@st.composite
def places(draw):
    end = draw(st.integers(1, 4 * PAGE))
    kind = draw(st.sampled_from(["rows", "window", "state"]))
    return kind, end if kind == "state" else draw(st.integers(keys.base(end), end - 1)), end


class TestRoundTrip:
    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    @given(
        tensors=tensors(),
        place=places(),
        meta=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
        seed=st.integers(0, 1000),
    )
    def test_what_is_put_is_read(self, tmp_path_factory, tensors, place, meta, seed):
        kind, start, end = place
        ids = ids_of(seed)
        tokens = ids[keys.base(end) : end]
        store = Store(tmp_path_factory.mktemp("pages"), budget=BIG)
        shelf = store.shelf("model")
        parent = keys.chains(shelf.root, ids[: keys.base(end)])[-1]
        assert shelf.put(kind, parent, tokens, start, tensors, meta)
        assert store.flush(10)
        (entry,) = shelf.find(parent)
        assert (entry.kind, entry.start, entry.end, entry.parent) == (kind, start, end, parent)
        assert entry.key == keys.entry(parent, tokens, kind, start)
        assert entry.child == (keys.chain(parent, tokens) if end % PAGE == 0 else None)
        assert entry.nbytes == entry.path.stat().st_size
        content = shelf.read(entry)
        assert content.meta == meta
        assert content.tokens.dtype == np.int32
        assert content.tokens.tolist() == tokens.tolist() == shelf.tokens(entry).tolist()
        assert content.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            found = content.tensors[name]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert bytes(found.data) == tensor.data
            width = WIDTHS[tensor.dtype]
            assert not found.data.size or found.data.ctypes.data % width == 0, "aligned"
        with shelf.reader([entry], keep=False) as reading:
            ((_, checked),) = reading
        assert (checked.tensors, checked.meta) == ({}, meta)
        assert checked.tokens.tolist() == tokens.tolist()
        assert store.close(10)
        assert store.faults.count == 0

    def test_other_tools_open_the_file(self, shelf):
        from safetensors import safe_open

        values = np.arange(12, dtype=np.float32).reshape(3, 4)
        odd = np.arange(3, dtype=np.uint16)
        made = {"k": Tensor("F32", (3, 4), values), "b": Tensor("BF16", (3,), odd)}
        assert shelf.put("rows", shelf.root, ids_of(0)[:7], 0, made, {"of": "the caller"})
        shelf._store.flush(10)
        (entry,) = shelf.find(shelf.root)
        with safe_open(entry.path, "np") as file:
            assert set(file.keys()) == {"k", "b", "tokens"}
            assert (file.get_tensor("k") == values).all()
            assert (file.get_tensor("tokens") == ids_of(0)[:7]).all()
            assert file.metadata()["kind"] == "rows"
            assert file.metadata()["meta.of"] == "the caller"

    def test_any_contiguous_buffer_will_do(self, shelf):
        whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        made = {
            "array": Tensor("F32", (2, 3, 4), whole),
            "view": Tensor("F32", (3, 4), whole[1]),
            "memory": Tensor("F32", (4,), memoryview(whole[0, 0])),
            "scalar": Tensor("F32", (), np.array(2.5, np.float32)),
            "none": Tensor("F32", (0, 7), np.zeros((0, 7), np.float32)),
        }
        shelf.put("rows", shelf.root, ids_of(0)[:7], 0, made)
        shelf._store.flush(10)
        (entry,) = shelf.find(shelf.root)
        found = {k: t.data.view(np.float32) for k, t in shelf.read(entry).tensors.items()}
        assert found["array"].tolist() == list(range(24))
        assert found["view"].tolist() == list(range(12, 24))
        assert found["memory"].tolist() == [0, 1, 2, 3]
        assert found["scalar"].tolist() == [2.5]
        assert found["none"].tolist() == []

    @pytest.mark.parametrize(
        "tensor",
        [
            Tensor("F32", (3,), b"1234"),
            Tensor("F31", (1,), b"1234"),
            Tensor("F32", (2, 2), np.zeros((4, 4), np.float32)[::2, ::2]),
        ],
    )
    def test_what_cannot_be_stored_is_refused_at_once(self, shelf, tensor):
        with pytest.raises(ValueError, match="tensor"):
            shelf.put("rows", shelf.root, ids_of(0)[:7], 0, {"x": tensor})
        with pytest.raises(ValueError, match="tokens"):
            shelf.put("rows", shelf.root, ids_of(0)[:7], 0, {"tokens": tensor})
        with pytest.raises(ValueError, match="No rows"):
            shelf.put("rows", shelf.root, ids_of(0)[:7], 8, {})

    def test_buffers_are_not_copied_and_then_let_go_of(self, shelf, monkeypatch):
        gate, began, write = threading.Event(), threading.Event(), store_format.write
        seen = []

        def slow(file, sheet):
            seen.append([part.obj for part in sheet.parts])
            began.set()
            assert gate.wait(10)
            write(file, sheet)

        monkeypatch.setattr(store_format, "write", slow)
        data = np.zeros(1000, np.uint8)
        alive = weakref.ref(data)
        shelf.put("rows", shelf.root, ids_of(0)[:7], 0, {"x": Tensor("U8", (1000,), data)})
        assert began.wait(10)
        assert any(np.shares_memory(data, np.asarray(part)) for part in seen.pop())
        del data
        gc.collect()
        assert alive() is not None, "they belong to the writer"
        gate.set()
        shelf._store.flush(10)
        gc.collect()
        assert alive() is None

    def test_tokens_may_change_after_they_were_put(self, shelf):
        ids = ids_of(0)
        put(shelf, ids, 0, PAGE)
        ids[:] = 0
        shelf._store.flush(10)
        (entry,) = shelf.find(shelf.root)
        assert is_right(entry, shelf.read(entry))


# --- what is found ------------------------------------------------------------------------------


class TestFinding:
    def test_an_index_made_from_the_files_alone(self, place):
        first = Store(place, budget=BIG)
        shelf = first.shelf("model", "A model")
        for seed in range(8):
            for start, end in [(0, 256), (256, 300), (300, 512), (512, 700)]:
                put(shelf, ids_of(seed), start, end)
            put(shelf, ids_of(seed), 0, 600, "state")
        assert first.close(10)
        again = Store(place, budget=BIG)
        shelf = again.shelf("model")
        for seed in range(8):  # four share their first page
            chain = keys.chains(shelf.root, ids_of(seed))
            found = [[(e.kind, e.start, e.end) for e in shelf.find(at)] for at in chain]
            assert found[0] == [("rows", 0, 256)] * 2
            assert sorted(found[1]) == [("rows", 256, 300)] * 4 + [("rows", 300, 512)] * 4
            assert found[2] == [("state", 600, 600), ("rows", 512, 700)]
            assert found[3:] == [[], []]
        assert all(is_right(e, shelf.read(e)) for e in everything(shelf))
        assert again.shelf("another model").find(shelf.root) == ()
        again.close(10)

    def test_what_another_one_writes_and_removes_is_seen(self, place, shelf):
        other = Store(place, budget=BIG)
        theirs = other.shelf("model")
        assert shelf.find(shelf.root) == ()
        for n in range(20):  # at once one after the other: no directory's time may hide one
            entry = stored(theirs, 4 * n, end=7)
            assert len(shelf.find(shelf.root)) == n + 1
            assert shelf.find(shelf.root) == theirs.find(theirs.root)
        theirs.forget([entry.key])
        assert len(shelf.find(shelf.root)) == 19
        other.close(10)

    def test_a_change_within_one_tick_of_the_clock_is_seen(self, place, shelf):
        directory = stored(shelf).directory
        tick = time.time_ns() + 10**10
        os.utime(directory, ns=(tick, tick))
        assert len(shelf.find(shelf.root)) == 1
        other = Store(place, budget=BIG)
        stored(other.shelf("model"), 4)
        os.utime(directory, ns=(tick, tick))
        assert len(shelf.find(shelf.root)) == 2
        other.close(10)

    def test_a_quiet_directory_is_not_listed_again(self, shelf, monkeypatch):
        entry = stored(shelf)
        past = time.time() - 100
        os.utime(entry.directory, (past, past + 0.5))
        assert shelf.find(shelf.root) == (entry,)
        monkeypatch.setattr(store_listing, "_listed", lambda *_: pytest.fail("listed again"))
        assert shelf.find(shelf.root) == (entry,)

    def test_what_is_not_ours_is_neither_found_nor_removed(self, place, store, shelf):
        entry = stored(shelf)
        directory = Path(entry.directory)
        strange = [
            place / "mine.txt",
            place / "ab" / "mine.txt",
            directory / "mine.safetensors",
            directory / entry.name.replace("rows-0", "rows-900"),
            directory / entry.name.replace("-rows-", "-cols-"),
            directory / ("00" * 16 + entry.name[32:]),
            directory.parent / "zz" / entry.name,
            directory.parent / "notes",
        ]
        for path in strange:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"?")
        (directory / (entry.name[:-13] + "0.safetensors")).symlink_to(strange[0])
        assert everything(shelf) == [entry]
        assert store.usage() == Usage(1, entry.nbytes)
        assert store.clear() == Usage(1, entry.nbytes)
        assert all(path.exists() for path in strange)

    def test_usage_tells_models_apart(self, store):
        for fingerprint, name in [("a", "Same"), ("b", "Same"), ("c", ""), ("d", "Ö" * 300)]:
            stored(store.shelf(fingerprint, name))
        found = store.models()
        assert len(found) == 4
        assert sorted(name.split(" ")[0] for name in found)[2:] == ["Same", "Ö" * 200]
        assert len({u.nbytes for u in found.values()}) == 1
        assert store.usage() == Usage(4, sum(u.nbytes for u in found.values()))
        assert store.shelf("a").usage().files == 1

    @pytest.mark.parametrize("text", ["", "[", "[1]", '{"name": 3}', "[" * 5000, '{"name": "'])
    def test_a_damaged_label_costs_the_name_only(self, store, shelf, text):
        stored(shelf)
        (store.directory / shelf.root.hex() / "model.json").write_text(text)
        assert store.models() == {shelf.root.hex()[:8]: shelf.usage()}


# --- damage -------------------------------------------------------------------------------------


def forged(entry: Entry, header: object, data: bytes = b"", *, sum_: bytes | None = None) -> None:
    """Write a file with a right checksum over whatever header this is."""
    text = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    )
    at = len(b'{"__metadata__":{"checksum":"')
    zeroed = text[:at] + b"0" * 16 + text[at + 16 :]
    digits = sum_ or xxhash.xxh3_64(zeroed + data).hexdigest().encode()
    entry.path.write_bytes(
        struct.pack("<Q", len(text)) + text[:at] + digits + text[at + 16 :] + data
    )


def parts_of(entry: Entry) -> tuple[dict, bytes]:
    whole = entry.path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


class TestDamage:
    def is_ignored(self, shelf, entry, caplog):
        """Neither way of reading gives anything; it is removed; told once at most."""
        data = entry.path.read_bytes() if entry.path.is_file() else None
        faults = shelf._store.faults
        before = faults.count
        tokens = shelf.tokens(entry)
        if tokens is None and data is not None:
            entry.path.write_bytes(data)
        else:
            assert tokens is None or tokens.tolist() == self.right
        assert shelf.read(entry) is None
        assert faults.count > before
        assert not entry.path.exists()
        assert shelf.find(entry.parent) == ()
        assert shelf.read(entry) is None, "gone now"
        told = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(told) == 1
        assert faults.last

    @pytest.fixture
    def entry(self, shelf):
        self.right = ids_of(0)[:PAGE].tolist()
        return stored(shelf, size=1000)

    def test_flipped_bits(self, shelf, entry):
        good = entry.path.read_bytes()
        dice = random.Random(5)
        for position in [*range(64), *dice.sample(range(len(good)), 500), len(good) - 1]:
            bad = bytearray(good)
            bad[position] ^= 1 << dice.randrange(8)
            entry.path.write_bytes(bad)
            assert shelf.read(entry) is None, position
            assert not entry.path.exists()
            entry.path.write_bytes(bad)
            tokens = shelf.tokens(entry)
            assert tokens is None or tokens.tolist() == self.right
        entry.path.write_bytes(good)
        assert is_right(entry, shelf.read(entry))

    def test_cut_short_or_longer(self, shelf, entry, warned):
        good = entry.path.read_bytes()
        for size in [*range(0, len(good), 61), *range(20), len(good) - 1]:
            entry.path.write_bytes(good[:size])
            assert shelf.read(entry) is None
            assert not entry.path.exists()
        entry.path.write_bytes(good + b"\0")
        assert shelf.read(entry) is None
        assert warned == {"damaged"}

    def test_empty(self, shelf, entry, caplog):
        entry.path.write_bytes(b"")
        self.is_ignored(shelf, entry, caplog)

    @pytest.mark.parametrize("change", ["seed", "start", "kind", "model"])
    def test_under_another_ones_name(self, store, shelf, entry, caplog, change):
        if change == "seed":
            other = stored(shelf, 4, size=1000)
        elif change == "start":
            other = stored(shelf, start=5, size=1000)
        elif change == "kind":
            other = stored(shelf, kind="window", size=1000)
        else:
            shelf = store.shelf("another model")
            other = stored(shelf, size=1000)
        entry.path.replace(other.path)
        if change != "model":
            self.right = shelf.tokens(other)
            assert self.right is None
            assert not other.path.exists()
        else:
            self.is_ignored(shelf, other, caplog)

    def test_a_name_that_leads_elsewhere(self, shelf, entry):
        # The chain key at its end is in its name only.
        wrong = Path(entry.directory, entry.name.replace(entry.child.hex(), "ab" * 16))
        entry.path.replace(wrong)
        (found,) = shelf.find(shelf.root)
        assert found.child == b"\xab" * 16
        assert shelf.read(found) is None
        assert not wrong.exists()

    @pytest.mark.parametrize("thing", ["directory", "full directory", "pipe", "link", "loop"])
    def test_no_file_at_all(self, shelf, entry, tmp_path, thing):
        entry.path.unlink()
        if thing == "pipe":
            os.mkfifo(entry.path)
        elif thing == "link":
            (tmp_path / "real").write_bytes(b"mine")
            entry.path.symlink_to(tmp_path / "real")
        elif thing == "loop":
            entry.path.symlink_to(entry.path)
        else:
            entry.path.mkdir()
            if thing == "full directory":
                (entry.path / "mine").write_bytes(b"mine")
        assert shelf.find(entry.parent) == ()
        assert shelf.read(entry) is None
        assert shelf.tokens(entry) is None
        assert thing != "full directory" or (entry.path / "mine").exists()
        assert thing != "link" or (tmp_path / "real").read_bytes() == b"mine"
        assert shelf._store.faults.count

    def test_gone_is_no_fault(self, shelf, entry):
        entry.path.unlink()
        assert shelf.read(entry) is None
        assert shelf.tokens(entry) is None
        assert shelf._store.faults.count == 0

    def test_a_disk_that_cannot_be_read_or_no_memory(self, shelf, entry, monkeypatch):
        for error in (OSError(errno.EIO, "broken"), OSError(errno.EMFILE, "many"), MemoryError()):
            with monkeypatch.context() as patch:
                patch.setattr(store_file, "_fill", Mock(side_effect=error))
                assert shelf.read(entry) is None
        assert shelf._store.faults.count == 3
        assert is_right(entry, shelf.read(entry)), "the file is as it was"

    @pytest.mark.parametrize(
        "change",
        [
            lambda h: h["x"].update(data_offsets=[0, 1 << 60]),
            lambda h: h["x"].update(data_offsets=[1024, 24]),
            lambda h: h["x"].update(data_offsets=[0, 1000]),
            lambda h: h["x"].update(shape=[999], data_offsets=[1024, 2023]),
            lambda h: h["x"].update(shape=[1 << 70]),
            lambda h: h["x"].update(shape=[10**4000] * 100),
            lambda h: h["x"].update(shape=[-1000]),
            lambda h: h["x"].update(shape=[True] * 3 + [1000]),
            lambda h: h["x"].update(shape=[1000.0]),
            lambda h: h["x"].update(shape="1000"),
            lambda h: h["x"].update(shape=1000),
            lambda h: h["x"].update(shape=[1000] + [1] * 50),
            lambda h: h["x"].update(shape={}),
            lambda h: h["x"].update(dtype="F31"),
            lambda h: h["x"].update(dtype=["U8"]),
            lambda h: h.update(x=[]),
            lambda h: h.update(x=None),
            lambda h: h.update(y={"dtype": "U8", "shape": [0, 1 << 60], "data_offsets": [0, 0]}),
            lambda h: h.update(y={"dtype": "U8", "shape": [1], "data_offsets": [5, 6]}),
            lambda h: h.pop("x"),
            lambda h: h.pop("tokens"),
            lambda h: h["tokens"].update(dtype="F32"),
            lambda h: h["tokens"].update(shape=[16, 16]),
            lambda h: h["tokens"].update(dtype="I64", shape=[128]),
            lambda h: h["__metadata__"].update(version="2"),
            lambda h: h["__metadata__"].update(extra=[["deep"]]),
            lambda h: h["__metadata__"].update(kind="window"),
            lambda h: h["__metadata__"].update(start="1"),
            lambda h: h["__metadata__"].pop("key"),
        ],
    )
    def test_hostile_headers(self, shelf, entry, caplog, change):
        header, data = parts_of(entry)
        forged(entry, header, data)
        assert is_right(entry, shelf.read(entry)), "the forger knows the format"
        change(header)
        forged(entry, header, data)
        self.is_ignored(shelf, entry, caplog)

    @pytest.mark.parametrize(
        "text",
        [
            b"[" * 100_000,
            b'{"__metadata__":' * 50_000,
            b'{"__metadata__":{"checksum":"0000000000000000"},"x":' + b"[" * 900_000,
            b'{"__metadata__":{"checksum":"0000000000000000"},"x":NaN}',
            b'{"__metadata__":{"checksum":"0000000000000000"},"x":1e999}',
            b'{"__metadata__":{"checksum":"0000000000000000"},"x":' + b"9" * 900_000 + b"}",
            b'{"__metadata__":{"checksum":"0000000000000000"},"__metadata__":{}}',
            b'{"__metadata__":{"checksum":"0000000000000000"}}',
            b'{"__metadata__":{"checksum":"0000000000000000","version":"1"}',
            b'{"__metadata__":{"checksum":"\xff\xfe000000000000"}}',
            b'{"__metadata__":{"checksum":"00',
            b" " * (1 << 21),
            b"",
        ],
    )
    def test_hostile_texts(self, shelf, entry, caplog, text):
        forged(entry, text)
        self.is_ignored(shelf, entry, caplog)

    def test_a_huge_file_is_not_even_read(self, shelf, entry, caplog):
        with entry.path.open("r+b") as file:
            file.truncate(1 << 40)  # sparse
        assert shelf.read(entry) is None
        assert not entry.path.exists()


# --- the disk refuses ---------------------------------------------------------------------------


class TestRefusals:
    def failing(self, monkeypatch, code, times=1 << 30, *, after=0):
        """Let writes fail with this error, ``times`` times after ``after`` good ones."""
        write, calls = store_format.write, []

        def fail(file, sheet):
            calls.append(sheet)
            if after < len(calls) <= after + times:
                file.write(b"half")
                raise OSError(code, os.strerror(code))
            write(file, sheet)

        monkeypatch.setattr(store_format, "write", fail)
        return calls

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
    def test_a_page_is_given_up_and_writing_pauses(self, place, monkeypatch, caplog, code):
        clock = [1000.0]
        store = Store(place, budget=BIG, now=lambda: clock[0])
        shelf = store.shelf("model")
        with monkeypatch.context() as patch:
            calls = self.failing(patch, code)
            assert put(shelf, ids_of(0), 0, PAGE)
            store.flush(10)
            assert len(calls) == 1, "nothing could be evicted"
            assert everything(shelf) == []
            assert not put(shelf, ids_of(0), 0, PAGE), "it pauses"
        assert not put(shelf, ids_of(0), 0, PAGE)
        clock[0] += 61
        entry = stored(shelf)
        assert is_right(entry, shelf.read(entry))
        assert not list(place.rglob("*.part"))
        assert store.faults.count == 1
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
        store.close(10)

    def test_a_clock_that_is_set_back_ends_the_pause(self, place, monkeypatch):
        clock = [1e6]
        store = Store(place, budget=BIG, now=lambda: clock[0])
        shelf = store.shelf("model")
        self.failing(monkeypatch, errno.ENOSPC, 1)
        put(shelf, ids_of(0), 0, PAGE)
        store.flush(10)
        clock[0] = 5.0
        assert stored(shelf)
        store.close(10)

    def test_a_full_disk_is_evicted_from_once(self, place, monkeypatch):
        clock = [1e6]
        store = Store(place, budget=BIG, now=lambda: clock[0])
        shelf = store.shelf("model")
        for seed in range(4):
            clock[0] += 3600
            stored(shelf, 4 * seed)
        calls = self.failing(monkeypatch, errno.ENOSPC, 1)
        entry = stored(shelf, 40)
        assert len(calls) == 2
        assert is_right(entry, shelf.read(entry))
        left = {e.key for e in everything(shelf)}
        assert len(left) == 4
        assert store.faults.count == 0
        calls = self.failing(monkeypatch, errno.ENOSPC, 2)
        put(shelf, ids_of(44), 0, PAGE)
        store.flush(10)
        assert len(calls) == 2
        assert store.faults.count == 1
        assert {e.key for e in everything(shelf)} < left
        store.close(10)

    def test_a_limit_on_files(self, nursery, place):
        assert nursery.reap(nursery.start(task="limited", directory=str(place))) == 0
        store = Store(place, budget=BIG)
        found = everything(shelf := store.shelf("model"))
        assert [e.start for e in sorted(found, key=lambda e: e.start)] == [0, 2 * PAGE]
        assert all(is_right(e, shelf.read(e)) for e in found)
        assert not list(place.rglob("*.part"))

    @pytest.mark.parametrize("where", ["store", "model", "shard"])
    def test_a_file_where_a_directory_should_be(self, place, where):
        store = Store(place, budget=BIG)
        shelf = store.shelf("model")
        model = place / shelf.root.hex()
        path = {"store": place, "model": model, "shard": model / shelf.root.hex()[:2]}[where]
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text("mine")
        put(shelf, ids_of(0), 0, PAGE)
        assert store.flush(10)
        assert shelf.find(shelf.root) == ()
        assert store.usage() == Usage()
        assert store.faults.count == 1
        assert path.read_text() == "mine"
        assert store.close(10)

    def test_a_directory_that_goes_away_is_made_again(self, place, shelf):
        import shutil

        stored(shelf)
        shutil.rmtree(place)
        assert shelf.find(shelf.root) == ()
        entry = stored(shelf)
        assert is_right(entry, shelf.read(entry))

    def test_a_bug_ends_one_job_and_not_the_thread(self, shelf, monkeypatch, caplog):
        with monkeypatch.context() as patch:
            patch.setattr(store_format.Sheet, "seal", lambda self: 1 / 0)
            put(shelf, ids_of(0), 0, PAGE)
            shelf._store.flush(10)
        assert "ZeroDivisionError" in shelf._store.faults.last
        assert stored(shelf)
        assert not list(shelf._store.directory.rglob("*.part"))


class TestPrivacy:
    def test_only_their_user_can_read_files(self, place, shelf):
        mask = os.umask(0)
        try:
            entry = stored(shelf)
        finally:
            os.umask(mask)
        assert stat.S_IMODE(entry.path.stat().st_mode) == 0o600
        for path in [place, *(p for p in place.rglob("*") if p.is_dir())]:
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
        for path in (p for p in place.rglob("*") if p.is_file()):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path

    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
    def test_a_directory_that_others_may_write_to(self, place, caplog, mode):
        place.mkdir()
        place.chmod(mode)
        for _ in range(2):
            store = Store(place, budget=BIG)
            shelf = store.shelf("model")
            assert not store.on
            assert not put(shelf, ids_of(0), 0, PAGE)
            assert shelf.find(shelf.root) == ()
            assert (store.usage(), store.models(), store.clear()) == (Usage(), {}, Usage())
            assert shelf.forget([b"k" * 16]) == 0
            assert store.flush(1)
            assert store.close(1)
            assert "others may write" in store.faults.last
        assert list(place.iterdir()) == []
        assert len(caplog.records) == 1

    def test_a_directory_of_somebody_else(self, place, monkeypatch):
        place.mkdir(mode=0o700)
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        store = Store(place, budget=BIG)
        assert not store.on
        assert "another user" in store.faults.last

    def test_one_that_becomes_theirs_before_it_is_used(self, place):
        store = Store(place, budget=BIG)
        place.mkdir()
        place.chmod(0o777)
        put(store.shelf("model"), ids_of(0), 0, PAGE)
        store.flush(10)
        assert "others may write" in store.faults.last
        assert not list(place.rglob("*.safetensors"))
        store.close(10)

    def test_nothing_is_made_before_something_is_written(self, place):
        store = Store(place, budget=BIG)
        shelf = store.shelf("model")
        shelf.find(shelf.root)
        store.usage()
        store.clear()
        store.close(10)
        assert not place.exists()


# --- the budget ---------------------------------------------------------------------------------


class TestBudget:
    def test_the_least_recently_used_goes_and_prefixes_stay(self, place):
        clock = [1e9]
        store = Store(place, budget=20 * 41_500, now=lambda: clock[0])
        shelf = store.shelf("model")
        chain = {}
        for n in range(12):
            clock[0] += 600
            for at in range(0, 4 * PAGE, PAGE):
                put(shelf, ids_of(4 * n), at, at + PAGE)
            store.flush(10)
            assert store.usage().nbytes <= store.budget
            chain[n] = keys.chains(shelf.root, ids_of(4 * n))
            clock[0] += 300
            shelf.touch(e for e in everything(shelf) if e.child in chain[0])
        left = everything(shelf)
        held = {n: [e for key in chain[n] for e in left if e.child == key] for n in chain}
        assert len(held[0]) == 4, "it was used all the time"
        assert len(held[11]) == 4
        assert sum(len(h) == 0 for h in held.values()) >= 5
        assert all([e.start for e in h] == [PAGE * i for i in range(len(h))] for h in held.values())
        assert all(is_right(e, shelf.read(e)) for e in left)
        store.close(10)

    def test_it_is_kept_with_files_of_other_models_and_kernels(self, place):
        clock = [1e9]
        other = Store(place, budget=BIG, now=lambda: clock[0])
        for model in ("a", "b", "c"):
            for seed in range(5):
                stored(other.shelf(model), 4 * seed)
        clock[0] += 3600
        store = Store(place, budget=10 * 41_500, now=lambda: clock[0])
        entry = stored(store.shelf("model"))
        assert store.usage().nbytes <= store.budget
        assert entry.path.exists()
        other.close(10)
        store.close(10)

    def test_a_smaller_budget_holds_from_the_start(self, place, store, shelf):
        for seed in range(5):
            stored(shelf, 4 * seed)
        size = store.usage().nbytes
        later = Store(place, budget=size // 2)
        later.shelf("model")
        assert later.flush(10)
        assert 0 < later.usage().nbytes <= size // 2
        later.close(10)

    def test_what_is_larger_than_it_all_is_refused(self, place):
        store = Store(place, budget=30_000)
        assert not put(store.shelf("model"), ids_of(0), 0, PAGE)
        store.close(10)
        off = Store(place, budget=0)
        assert not put(off.shelf("model"), ids_of(0), 0, PAGE, size=0)

    def test_an_open_reader_keeps_its_bytes(self, place, monkeypatch):
        store = Store(place, budget=2 * 41_500)
        shelf = store.shelf("model")
        entry = stored(shelf)
        fill, evicted = store_file._fill, []

        def late(file, into, *more):
            if sum(part.nbytes for part in into) > 10_000 and not evicted:
                evicted.append(True)
                for seed in (40, 44, 48):
                    stored(shelf, seed)
                assert not entry.path.exists()
            fill(file, into, *more)

        monkeypatch.setattr(store_file, "_fill", late)
        assert is_right(entry, shelf.read(entry))
        assert shelf.read(entry) is None
        assert store.faults.count == 0
        store.close(10)

    def test_while_another_process_evicts_nothing_goes_over(self, place, monkeypatch):
        import fcntl

        monkeypatch.setattr(store_budget, "PATIENCE", 0.1)
        store = Store(place, budget=2 * 41_500)
        shelf = store.shelf("model")
        entries = [stored(shelf, seed) for seed in (0, 4)]
        with (place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            put(shelf, ids_of(40), 0, PAGE)
            assert store.flush(10)
            assert everything(shelf) == sorted(entries, key=lambda e: e.key)
        assert stored(shelf, 40)
        assert store.usage().nbytes <= store.budget
        assert store.faults.count == 0
        store.close(10)

    def test_stale_parts_go_and_those_being_written_stay(self, place, shelf, monkeypatch):
        entry = stored(shelf)
        stale = Path(entry.directory, f".{'ab' * 8}.part")
        stale.write_bytes(b"half")
        gate, began, write = threading.Event(), threading.Event(), store_format.write

        def slow(file, sheet):
            began.set()
            assert gate.wait(10)
            write(file, sheet)

        monkeypatch.setattr(store_format, "write", slow)
        put(shelf, ids_of(40), 0, PAGE)
        assert began.wait(10)
        other = Store(place, budget=BIG)
        other.shelf("another")
        assert other.flush(10)
        assert not stale.exists()
        assert len(list(place.rglob("*.part"))) == 1
        gate.set()
        shelf._store.flush(10)
        assert len(everything(shelf)) == 2
        assert not list(place.rglob("*.part"))
        other.close(10)

    def test_where_locks_do_not_work_age_tells(self, place, shelf, monkeypatch):
        entry = stored(shelf)
        old, young = (Path(entry.directory, f".{c * 16}.part") for c in "ab")
        for path in (old, young):
            path.write_bytes(b"half")
        os.utime(old, (0, 0))

        def fail(*_):
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr(store_budget.fcntl, "flock", fail)
        other = Store(place, budget=2 * 41_500)
        for seed in (40, 44, 48):
            stored(other.shelf("model"), seed)
        assert other.usage().nbytes <= other.budget
        assert (old.exists(), young.exists()) == (False, True)
        other.close(10)


class TestTheLedger:
    """What tells a process of another one's writes without listing everything."""

    @pytest.fixture
    def both(self, tmp_path):
        path = tmp_path / "ledger"
        return path, Ledger(path), Ledger(path)

    def test_each_hears_of_both(self, both):
        _, one, other = both
        assert one.news() is None
        assert one.mark()
        assert other.mark()
        assert one.news() == other.news() == 0
        one.note(5)
        other.note(1 << 33)
        assert one.news() == other.news() == 5 + (1 << 33)
        assert one.mark()
        assert (one.news(), other.news()) == (0, 5 + (1 << 33))

    def test_what_cannot_be_told_is_not_guessed(self, both):
        path, one, other = both
        one.note(5)
        assert not path.exists(), "only a mark makes it"
        for spoil in (
            path.unlink,
            lambda: path.write_bytes(b"shorter"),
            lambda: path.write_bytes(b"another number, and longer"),
            lambda: path.write_bytes(b"0" * (2 * LONG)),
            lambda: [other.note(1) for _ in range(LONG // 8)],
        ):
            assert one.mark()
            one.note(5)
            spoil()
            assert one.news() is None
        assert one.mark()
        other.note(7)
        with path.open("ab") as file:
            file.write(b"half")
        assert one.news() == 7

    @pytest.mark.parametrize("thing", ["directory", "link", "nothing"])
    def test_no_file(self, both, tmp_path, thing):
        path, one, _ = both
        if thing == "directory":
            path.mkdir()
        elif thing == "link":
            (tmp_path / "mine").write_bytes(b"mine" * 10)
            path.symlink_to(tmp_path / "mine")
        else:
            one = Ledger(tmp_path / "missing" / "ledger")
        assert one.mark() == (thing == "link"), "a link is replaced"
        one.note(5)
        assert one.news() == (5 if thing == "link" else None)
        assert thing != "link" or (tmp_path / "mine").read_bytes() == b"mine" * 10

    def test_a_store_with_room_is_not_listed_at_each_write(self, place, monkeypatch):
        stores = [Store(place, budget=40 * 41_500) for _ in range(2)]
        shelves = [store.shelf("model") for store in stores]
        stored(shelves[0])
        listed, total = [], store_budget.Room.total
        monkeypatch.setattr(
            store_budget.Room, "total", lambda self: listed.append(self) or total(self)
        )
        for n in range(1, 35):
            stored(shelves[n % 2], 4 * n)
        assert len(listed) <= 2
        for n in range(35, 80):
            stored(shelves[n % 2], 4 * n)
            assert stores[0].usage().nbytes <= stores[0].budget
        for store in stores:
            assert store.close(10)


def described(entries, now=1e9):
    made = items([entries], now)
    assert [i.key for i in made] == list(range(len(entries)))
    return made


class TestTheDescription:
    """What retention is told, from names alone."""

    def entries(self, *places, ids=None, used=1e9):
        ids = ids_of(0) if ids is None else ids
        chain = keys.chains(b"r" * 16, ids)
        made = []
        for kind, start, end in places:
            base = keys.base(end)
            parent, tokens = chain[base // PAGE], ids[base:end]
            key = keys.entry(parent, tokens, kind, start)
            child = keys.chain(parent, tokens) if end % PAGE == 0 else None
            made.append(Entry(kind, parent, key, start, end, child, 1000, used))
        return made

    def test_pages_hang_on_the_one_before(self):
        found = described(
            self.entries(
                ("rows", 512, 600), ("rows", 0, 256), ("rows", 256, 300), ("rows", 300, 512)
            )
        )
        assert [i.before for i in found] == [3, None, 1, 2]
        assert [i.replay for i in found] == [88, 256, 44, 212]
        assert all(i.reachable and not i.useless and i.alone for i in found)

    def test_branches_that_part_within_a_page(self):
        other = ids_of(0)
        other[300:] = 7
        found = described(
            self.entries(("rows", 0, 256), ("rows", 256, 512), ("rows", 512, 768))
            + self.entries(("rows", 300, 512), ("rows", 512, 600), ids=other)
        )
        assert [i.before for i in found] == [None, 0, 1, 1, 3]

    def test_what_hangs_on_a_missing_page(self):
        lonely = [("rows", 256, 512), ("rows", 512, 768), ("state", 700, 700), ("window", 600, 700)]
        fresh = described(self.entries(("rows", 0, 100), *lonely))
        assert [i.reachable for i in fresh] == [True, False, False, False, False]
        assert not any(i.useless for i in fresh), "a kernel may have that page in its memory"
        old = described(self.entries(("rows", 0, 100), *lonely), now=1e9 + 3700)
        assert [i.useless for i in old] == [False, True, True, True, True]

    def test_snapshots_know_the_one_before(self):
        found = described(
            self.entries(
                ("state", 900, 900),
                ("state", 300, 300),
                ("state", 512, 512),
                *(("rows", at, at + 256) for at in range(0, 1024, 256)),
            )
        )
        assert [i.prior for i in found[:3]] == [2, None, 1]
        assert [i.replay for i in found[:3]] == [388, 300, 212]
        assert [i.before for i in found[:3]] == [6, 4, 4]

    def test_a_model_without_rows(self):
        found = described(self.entries(("state", 300, 300), ("state", 900, 900)), now=1e9 + 1e6)
        assert all(i.reachable and not i.useless and i.before is None for i in found)

    def test_rows_that_need_snapshots(self):
        entries = self.entries(("rows", 0, 256), ("rows", 256, 512), ("state", 256, 256))
        assert [i.alone for i in described(entries)] == [True] * 3
        assert [i.alone for i in described(entries, now=1e9 + 3700)] == [False] * 3

    def test_names_that_contradict_each_other_make_no_circle(self):
        (one,) = self.entries(("rows", 0, 256))
        rings = [
            Entry("rows", one.parent, b"a" * 16, 0, 256, one.parent, 10, 1e9),
            Entry("rows", one.parent, b"b" * 16, 256, 512, one.parent, 10, 1e9),
            Entry("state", one.parent, b"c" * 16, 512, 512, one.parent, 10, 1e9),
        ]
        for item in described(rings, now=1e9 + 1e6):
            assert item.before != item.key
        assert len(store_budget.choose(described(rings), 1 << 40, 1 << 30)) == 3

    def test_it_is_quick(self):
        ids = np.arange(256 * 1000, dtype=np.int32)
        each = [
            (k, a if k == "rows" else a + 256, a + 256)
            for a in range(0, len(ids), 256)
            for k in ("rows", "state")
        ]
        entries = self.entries(*each, ids=ids)
        random.Random(0).shuffle(entries)
        assert len(store_budget.choose(described(entries), 1 << 40, 1 << 30)) == 2000


# --- the queue ----------------------------------------------------------------------------------


class TestTheQueue:
    @pytest.fixture
    def stuck(self, monkeypatch):
        """A disk that doesn't answer until it is told to; whether one waits for it."""
        gate, began, write = threading.Event(), threading.Event(), store_format.write

        def slow(file, sheet):
            began.set()
            assert gate.wait(30)
            write(file, sheet)

        monkeypatch.setattr(store_format, "write", slow)
        yield gate, began
        gate.set()

    def test_it_is_bounded_in_bytes(self, place, stuck):
        store = Store(place, budget=BIG, queue_bytes=100_000)
        shelf = store.shelf("model")
        assert put(shelf, ids_of(0), 0, PAGE)
        assert stuck[1].wait(10)
        assert put(shelf, ids_of(0), PAGE, 2 * PAGE)
        assert put(shelf, ids_of(0), 0, PAGE), "it is there already"
        assert not put(shelf, ids_of(0), 2 * PAGE, 3 * PAGE)
        stuck[0].set()
        assert store.flush(10)
        assert put(shelf, ids_of(0), 2 * PAGE, 3 * PAGE)
        assert store.flush(10)
        assert store.writer.waiting == 0
        assert len(everything(shelf)) == 3
        assert put(shelf, ids_of(4), 0, PAGE, size=300_000), "one alone always has room"
        assert store.close(10)
        assert len(everything(shelf)) == 4

    def test_what_is_there_is_touched(self, place):
        clock = [1e9]
        store = Store(place, budget=BIG, now=lambda: clock[0])
        shelf = store.shelf("model")
        entry = stored(shelf)
        node = entry.path.stat().st_ino
        assert entry.used == 1e9
        clock[0] += 1000
        stored(shelf)
        assert entry.path.stat().st_mtime == 1e9 + 1000
        assert entry.path.stat().st_ino == node
        clock[0] += 1000
        shelf.touch([entry, Entry("rows", b"p" * 16, b"k" * 16, 0, 5, directory=entry.directory)])
        assert store.flush(10)
        assert entry.path.stat().st_mtime == 1e9 + 2000
        assert store.faults.count == 0
        store.close(10)

    def test_closing_waits_no_longer_than_told(self, place, stuck):
        store = Store(place, budget=BIG)
        shelf = store.shelf("model")
        data = np.zeros(100, np.uint8)
        alive = weakref.ref(data)
        put(shelf, ids_of(0), 0, PAGE)
        assert stuck[1].wait(10)
        shelf.put("rows", shelf.root, ids_of(4)[:9], 0, {"x": Tensor("U8", (100,), data)})
        del data
        assert not store.flush(0.01)
        began = time.monotonic()
        assert not store.close(0.05)
        assert time.monotonic() - began < 5, "the disk is stuck for longer"
        gc.collect()
        assert alive() is None, "what was dropped holds nothing"
        assert not put(shelf, ids_of(0), 0, PAGE)
        assert not store.flush(0.01)
        store.close(0.01)
        stuck[0].set()
        for thread in threads("mlx-pages"):
            thread.join(10)
        assert not threads("mlx-pages")
        assert len(list(place.rglob("*.safetensors"))) <= 1
        assert not list(place.rglob("*.part"))

    def test_closing_writes_what_is_queued(self, place):
        store = Store(place, budget=BIG)
        shelf = store.shelf("model")
        for seed in range(20):
            put(shelf, ids_of(seed), 256, 512)
        assert store.close(10)
        assert store.close(10)
        assert not threads("mlx-pages")
        assert not store.on
        assert shelf.find(shelf.root) == ()
        assert Store(place, budget=BIG).usage().files == 20

    def test_a_store_that_nobody_closed_ends_its_thread(self, place):
        shelf = Store(place, budget=BIG).shelf("model")
        stored(shelf)
        (thread,) = threads("mlx-pages")
        gc.collect()
        assert stored(shelf, 4), "a shelf keeps its store"
        del shelf
        gc.collect()
        thread.join(10)
        assert not thread.is_alive()

    def test_a_process_may_just_end(self, nursery, place):
        assert nursery.reap(nursery.start(task="threadless", directory=str(place))) == 0
        assert Store(place, budget=BIG).usage().files == 1

    def test_forgotten_things_are_gone_for_good(self, store, shelf, stuck):
        ids = ids_of(0)
        put(shelf, ids, 0, PAGE)
        assert stuck[1].wait(10)
        put(shelf, ids, 300, 400)
        put(shelf, ids, 400, 500)
        chain = keys.chains(shelf.root, ids)
        gone = [
            keys.entry(chain[0], ids[:PAGE], "rows", 0),
            keys.entry(chain[1], ids[PAGE:400], "rows", 300),
        ]
        assert shelf.forget(gone) == 0, "neither was written yet"
        assert not put(shelf, ids, 300, 400), "only once it is off the queue"
        stuck[0].set()
        assert store.flush(10)
        (left,) = everything(shelf)
        assert (left.start, left.end) == (400, 500)
        assert shelf.forget([left.key]) == 1
        assert everything(shelf) == []
        assert not list(store.directory.rglob("*.part"))
        assert stored(shelf)

    def test_clearing_removes_what_is_queued_too(self, place, store, shelf, stuck):
        put(shelf, ids_of(0), 0, PAGE)
        assert stuck[1].wait(10)
        put(shelf, ids_of(0), PAGE, 2 * PAGE)
        assert store.clear() == Usage()
        stuck[0].set()
        assert store.flush(10)
        assert store.usage() == Usage()
        entry = stored(shelf)
        assert store.clear() == Usage(1, entry.nbytes)
        assert {p.name for p in place.rglob("*")} <= {"lock", "ledger"}
        assert store.models() == {}
        assert stored(shelf)
        assert list(store.models()) == ["A model"]

    def test_in_a_forked_child_it_is_off(self, store, shelf, stuck):
        put(shelf, ids_of(0), 0, PAGE)
        assert stuck[1].wait(10)
        pid = os.fork()
        if not pid:
            off = (
                store.on
                or put(shelf, ids_of(4), 0, PAGE)
                or shelf.find(shelf.root)
                or store.flush(1)
                or not store.close(1)
                or store.usage() != Usage()
            )
            os._exit(1 if off else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        stuck[0].set()
        assert store.flush(10)
        assert len(everything(shelf)) == 1


# --- reading ahead ------------------------------------------------------------------------------


class TestReading:
    @pytest.fixture
    def entries(self, shelf):
        for seed in range(6):
            put(shelf, ids_of(4 * seed), 0, PAGE)
        shelf._store.flush(10)
        return everything(shelf)

    def test_in_order_with_gaps_for_what_is_gone(self, shelf, entries):
        order = [*entries, entries[0], *reversed(entries)]
        entries[2].path.unlink()
        with shelf.reader(order) as reading:
            found = list(reading)
            assert list(reading) == []
        assert [e for e, _ in found] == order
        assert all((c is None) == (e == entries[2]) for e, c in found)
        assert all(c is None or is_right(e, c) for e, c in found)
        assert not threads("mlx-read-ahead")
        with shelf.reader([]) as reading:
            assert list(reading) == []

    def test_it_reads_ahead_and_not_too_far(self, shelf, entries, monkeypatch):
        began = [threading.Event() for _ in entries]
        read = shelf._read
        ahead = 2 * entries[0].nbytes

        def noted(entry, stopped, into):
            began[entries.index(entry)].set()
            return read(entry, stopped, into)

        monkeypatch.setattr(shelf, "_read", noted)
        with shelf.reader(entries, ahead) as reading:
            assert began[0].wait(10)
            assert began[1].wait(10), "nobody asked for it yet"
            for n in range(6):
                assert not any(e.is_set() for e in began[n + 2 :])
                next(reading)
                assert n + 2 >= 6 or began[n + 2].wait(10)
            assert next(reading, None) is None

    def test_one_is_always_read(self, shelf, entries):
        with shelf.reader(entries, 1) as reading:
            assert len(list(reading)) == 6

    def test_cancelled_from_another_thread(self, shelf, entries, monkeypatch):
        began = threading.Event()

        def stuck(entry, stopped, into):
            began.set()
            while not stopped():
                time.sleep(0.001)

        monkeypatch.setattr(shelf, "_read", stuck)
        with shelf.reader(entries) as reading:
            canceller = threading.Thread(target=lambda: (began.wait(10), reading.cancel()))
            canceller.start()
            assert list(reading) == []
            assert reading.cancelled
            canceller.join(10)
        assert not threads("mlx-read-ahead")

    def test_a_cancelled_read_ends_between_pieces_without_a_fault(self, shelf, entries):
        assert shelf._read(entries[0], lambda: True) is None
        assert shelf._store.faults.count == 0
        assert entries[0].path.exists()

    def test_left_early_or_by_an_exception(self, shelf, entries, monkeypatch):
        read, made = shelf._read, []

        def noted(entry, stopped, into):
            content = read(entry, stopped, into)
            if content is not None:
                made.append(weakref.ref(content.tokens))
            return content

        monkeypatch.setattr(shelf, "_read", noted)
        with shelf.reader(entries, 1) as reading:
            next(reading)
        gc.collect()
        assert made
        assert not any(ref() is not None for ref in made), "nothing that nobody took is kept"
        with pytest.raises(ZeroDivisionError), shelf.reader(entries, 1) as reading:
            1 / 0  # noqa: B018
        assert not threads("mlx-read-ahead")
        assert list(reading) == []

    def test_an_interrupt_at_any_moment_leaves_no_thread(self, shelf, entries):
        dice = random.Random(1)
        for _ in range(40):
            timer = threading.Timer(
                dice.random() * 0.004, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)
            )
            try:
                timer.start()
                while True:
                    with shelf.reader(entries, 1) as reading:
                        for entry, content in reading:
                            assert is_right(entry, content)
            except KeyboardInterrupt:
                pass
            timer.join()
            reading = None
            until = time.monotonic() + 10
            while threads("mlx-read-ahead"):  # one interrupted before the block ends by itself
                assert time.monotonic() < until
                time.sleep(0.001)


# --- several processes --------------------------------------------------------------------------


def is_sound(place, budget, processes):
    """Every file of a store is right, within the budget but for what each process was writing."""
    store = Store(place, budget=budget)
    sizes = [e.nbytes for listing in store.listings for e in listing.entries()]
    assert sum(sizes) <= budget + processes * max(sizes, default=0)
    shelf = store.shelf("model")
    assert store.flush(20)
    found = everything(shelf)
    for entry in found:
        content = shelf.read(entry)
        assert content is not None
        assert is_right(entry, content)
    assert not list(place.rglob("*.part")), "what a killed process left is gone"
    assert store.faults.count == 0, store.faults
    assert store.usage().nbytes <= budget
    store.close(10)
    return len(found)


class TestProcesses:
    BUDGET = 30 * 41_500

    def test_two_on_one_store(self, nursery, place):
        tasks = {"directory": str(place), "budget": self.BUDGET, "rounds": 60}
        pids = [nursery.start(task="churn", seed=seed, **tasks) for seed in (1, 2)]
        store = Store(place, budget=self.BUDGET)
        shelf = store.shelf("model")
        dice = random.Random(3)
        for _ in range(30):
            known = everything(shelf)
            with shelf.reader(dice.sample(known, min(8, len(known)))) as reading:
                for entry, content in reading:
                    assert content is None or is_right(entry, content)
            if known:
                shelf.forget([dice.choice(known).key])
            put(shelf, ids_of(dice.randrange(40)), 0, PAGE)
        assert [nursery.reap(pid) for pid in pids] == [0, 0]
        assert store.close(20)
        assert store.faults.count == 0, store.faults
        assert is_sound(place, self.BUDGET, 0) > 10

    def test_killed_at_any_moment(self, nursery, place):
        dice = random.Random(4)
        torn = 0
        for n in range(110):
            running = 1 + n % 2
            pids = [
                nursery.start(
                    task="churn", directory=str(place), budget=self.BUDGET, seed=2 * n + i
                )
                for i in range(running)
            ]
            time.sleep(0.005 + dice.random() * 0.07)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert [nursery.reap(pid) for pid in pids] == [-signal.SIGKILL] * running
            torn += len(list(place.rglob("*.part")))
            is_sound(place, self.BUDGET, running)
        assert torn, "some were killed in the middle of a file"

    @pytest.mark.skipif(not FDS.exists(), reason="no /proc")
    def test_no_file_stays_open(self, store, shelf, place):
        def count():
            gc.collect()
            return len(list(FDS.iterdir()))

        stored(shelf)
        before = count()
        for seed in range(30):
            entry = stored(shelf, seed, end=PAGE - 1)
            shelf.tokens(entry)
            shelf.read(entry)
            with shelf.reader([entry] * 3) as reading:
                next(reading)
            entry.path.write_bytes(entry.path.read_bytes()[: 100 * seed])
            shelf.read(entry)
            entry.path.mkdir()
            shelf.read(entry)
        small = Store(place, budget=41_500)
        for seed in range(5):
            stored(small.shelf("model"), seed, start=5)
        small.close(10)
        assert count() <= before


def test_the_room_knows_no_mlx():
    import subprocess
    import sys

    code = "import sys, mlx_jupyter.cache.store; print([m for m in sys.modules if m[:4] == 'mlx.'])"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.strip() == "[]"
