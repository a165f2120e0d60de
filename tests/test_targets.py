"""Files read straight into the live cache: rows, damage, a disk that doesn't answer."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from driver import Always, ask, new_cache
from fakes import FakeModel, cold
from mlx_jupyter.cache import store_file, store_reading, targets
from mlx_jupyter.cache.blank import blank
from mlx_jupyter.cache.layers import QuantizedRows, RowsLayer
from mlx_jupyter.cache.packing import pack_rows
from mlx_jupyter.cache.pages import stack
from mlx_jupyter.cache.plan import Rates
from mlx_jupyter.cache.store import Store
from mlx_jupyter.cache.store_format import TOKENS
from mlx_jupyter.cache.targets import Targets
from mlx_jupyter.errors import Interrupted
from mlx_jupyter.models.tensors import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlx_jupyter.cache.prefix_cache import PrefixCache

READ = Always()
KINDS = ("rows", "window", "state")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "pages", budget=1 << 30)
    yield store
    store.close()


def prompt(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 200), k=n)


def kernel(model: FakeModel, store: Store) -> PrefixCache:
    cache = new_cache(model, 1 << 30, store.shelf("fake"))
    cache.rates = READ
    return cache


def saved(model: FakeModel, store: Store, ids: list[int]) -> list[Path]:
    """An earlier kernel was asked this; the files of its pages, by their beginnings."""
    first = kernel(model, store)
    ask(first, model, ids, 2)
    first.tiers.save_all(lambda: False)
    assert store.flush(10)
    files = store.directory.rglob("*-rows-*.safetensors")
    return sorted(files, key=lambda path: int(path.name.split("-")[2]))


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What was read straight into place."""
    into, seen = Targets.into, []

    def noted(self: Targets, start: int, end: int) -> store_file.Into:
        really = into(self, start, end)

        def places(tensors: dict[str, Entry]) -> dict[str, list[memoryview]]:
            found = really(tensors)
            if found:
                seen.append((start, end))
            return found

        return places

    monkeypatch.setattr(Targets, "into", noted)
    return seen


@pytest.mark.parametrize("kinds", [("rows",), KINDS])
def test_a_restart_reads_every_page_into_place(
    store: Store, kinds: tuple[str, ...], placed: list[tuple[int, int]]
) -> None:
    model = FakeModel(kinds)
    ids = prompt(1300)
    saved(model, store, ids)
    cache = kernel(model, store)
    run = ask(cache, model, [*ids, 5, 6], 6)
    cache.check()
    assert run.tokens == cold(model, [*ids, 5, 6], 6)
    assert sorted(placed)[:5] == [(at, at + 256) for at in range(0, 1280, 256)]


def test_a_switch_reads_behind_what_stays(store: Store, placed: list[tuple[int, int]]) -> None:
    model = FakeModel(("rows",))
    shared, one, other = prompt(512), prompt(700, 1), prompt(900, 2)
    for tail in (one, other):
        saved(model, store, shared + tail)
    cache = kernel(model, store)
    for tail in (one, other, one):
        run = ask(cache, model, [*shared, *tail, 9], 4)
        cache.check()
        assert run.tokens == cold(model, [*shared, *tail, 9], 4)
    assert (512, 768) in placed


@pytest.mark.parametrize("which", [0, 2, 4])
def test_damage_is_computed_again_and_never_seen(
    store: Store, which: int, placed: list[tuple[int, int]]
) -> None:
    model = FakeModel(("rows",))
    ids = prompt(1300)
    path = saved(model, store, ids)[which]
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10
    path.write_bytes(data)
    cache = kernel(model, store)
    run = ask(cache, model, [*ids, 5], 6)
    cache.check()
    assert run.tokens == cold(model, [*ids, 5], 6)
    assert run.cached == which * 256
    assert not path.exists()
    assert placed


@pytest.mark.parametrize("at", [9, 30, 2000, -1])
def test_damage_is_found_without_keeping_anything(store: Store, at: int) -> None:
    model = FakeModel(("rows",))
    path = saved(model, store, prompt(300))[0]
    shelf = store.shelf("fake")
    (entry,) = shelf.find(shelf.root)
    assert entry.path == path
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with shelf.reader([entry], keep=False) as reading:
        assert [content for _, content in reading] == [None]
    assert not path.exists()


def test_a_disk_that_doesnt_answer_can_be_interrupted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_reading, "PATIENCE", 0.05)
    model = FakeModel(("rows",))
    ids = prompt(1300)
    stuck = saved(model, store, ids)[2]
    gate, waits, really = threading.Event(), threading.Event(), store_file._readv

    def readv(file: object, parts: list[memoryview]) -> int:
        if str(file.name) == str(stuck) and sum(p.nbytes for p in parts) > 4096:  # type: ignore
            waits.set()
            assert gate.wait(60)
        return really(file, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(store_file, "_readv", readv)
    cache = kernel(model, store)
    with (
        pytest.raises(Interrupted),
        cache.open([*ids, 5], cancelled=lambda: waits.wait(0)) as _,
    ):
        pytest.fail("it can't have been read")
    cache.check()
    assert cache.live.offset == 0
    readers = [t for t in threading.enumerate() if t.name == "mlx-read-ahead"]
    assert readers
    gate.set()
    for reader in readers:
        reader.join(60)
    run = ask(cache, model, [*ids, 5], 6)
    cache.check()
    assert run.tokens == cold(model, [*ids, 5], 6)
    assert run.cached == 1300


def test_reading_that_turns_out_slower_than_computing_ends_early(store: Store) -> None:
    model = FakeModel(("rows",))
    ids = prompt(3000)
    saved(model, store, ids)
    cache = kernel(model, store)
    cache.rates = Rates(prefill=1e-4)
    cache.now = iter(range(10**9)).__next__  # every look at the clock is a second later
    run = ask(cache, model, [*ids, 5], 6)
    cache.check()
    assert run.cached == 1024
    assert run.tokens == cold(model, [*ids, 5], 6)
    assert cache.rates.read > cache.rates.prefill
    cache.evict()
    again = ask(cache, model, [*ids, 5], 2)
    assert again.cached == 0, "known to be slower"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("quantized", [False, True])
def test_bytes_land_where_the_rows_belong(dtype: mx.Dtype, quantized: bool) -> None:
    """Two groups of layers, of other widths; what isn't read stays as it was."""

    def layers(tokens: int, fill: float | None) -> list[RowsLayer]:
        made = []
        for width in (64, 64, 32):
            leaf = KVCache()
            shape = (1, 2, tokens, width)
            noise = mx.random.normal(shape).astype(dtype)
            content = noise if fill is None else mx.full(shape, fill, dtype)
            leaf.update_and_fetch(content, content + 1)
            leaf = leaf.to_quantized(group_size=32, bits=8) if quantized else leaf
            mx.eval(leaf.keys, leaf.values)
            made.append(
                QuantizedRows(leaf) if isinstance(leaf, QuantizedKVCache) else RowsLayer(leaf)
            )
        return made

    source, live = layers(40, None), layers(100, 3.0)
    tensors = pack_rows(stack(source, 0, 40))
    entries = {name: Entry(name, t.dtype, t.shape) for name, t in tensors.items()}
    made = Targets.of(live, 100)
    assert made is not None
    assert made.into(30, 71)(entries) == {}, "another number of rows"
    assert made.into(30, 70)({**entries, "9.0": entries["0.0"]}) == {}, "another layer"
    assert made.into(30, 70)({n: e for n, e in entries.items() if n != "1.1"}) == {}
    ids = Entry(TOKENS, "I32", (40,))
    for name, parts in made.into(30, 70)({**entries, TOKENS: ids}).items():
        data = memoryview(tensors[name].data).cast("B")
        for part in parts:
            part[:], data = data[: part.nbytes], data[part.nbytes :]
        assert not data
    assert made.valid
    untouched = layers(100, 3.0)
    for layer, original, before in zip(live, source, untouched, strict=True):
        for a, b, c in zip(
            layer.rows(0, 100), original.rows(0, 40), before.rows(0, 100), strict=True
        ):
            assert mx.array_equal(a[..., 30:70, :], b)
            assert mx.array_equal(a[..., :30, :], c[..., :30, :])
            assert mx.array_equal(a[..., 70:, :], c[..., 70:, :])
    live[0].resize(300)
    assert not made.valid


def test_layers_that_cant_be_written_to_have_none() -> None:
    leaf = KVCache()
    content = mx.zeros((1, 2, 5, 8))
    leaf.update_and_fetch(content, content)
    layer = RowsLayer(leaf)
    assert Targets.of([layer], layer.capacity + 1) is None
    assert Targets.of([], 5) is None
    empty = RowsLayer(KVCache())
    wrong = {"0.0": Entry("0.0", "F32", (1, 2, 5, 8))}
    assert not Targets.prepare([empty], wrong, 64)
    assert not empty.arrays
    right = {**wrong, "0.1": Entry("0.1", "F16", (1, 2, 5, 16))}
    assert Targets.prepare([empty], right, 64)
    assert [a.shape for a in empty.arrays] == [(1, 2, 64, 8), (1, 2, 64, 16)]


def test_blank_arrays_have_shape_and_type() -> None:
    wanted = [((1, 2, 64, 8), mx.bfloat16), ((3,), mx.uint32), ((2, 2), mx.float32)]
    made = blank(wanted)
    assert [(a.shape, a.dtype) for a in made] == wanted
    made[2][0, :] = mx.array([1.0, 2.0])
    assert made[2][0].tolist() == [1.0, 2.0]
    assert targets.ly.signature((made[0],)) == ((1, 2, 8, "mlx.core.bfloat16"),)
