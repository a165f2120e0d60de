"""Pages move at random through memory, disk and nowhere: never a wrong token, nothing is lost.

A world of kernels on one store (``paging_child.py``) does random steps, with a disk that fails,
files that are damaged, processes that are killed. After each step all that must hold is checked,
and every answer is compared with a cold run. ``PAGING=100`` in the environment makes a hundred
times as many programs, and as many processes are killed.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driver import ask, new_cache, uncompiled  # noqa: F401 - a fixture
from fakes import FakeModel, cold
from mlx_jupyter.cache import adoption, forgetting, store_faults, tiers
from mlx_jupyter.cache.packing import HostRows, pack_rows, unpack_rows
from mlx_jupyter.cache.store import Store
from paging_child import (
    LOSSES,
    QUIET,
    ROOMY,
    Program,
    Setting,
    Wanderers,
    World,
    run_program,
    weighted,
)
from tiny_models import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlx_jupyter.cache.prefix_cache import PrefixCache

MANY = int(os.environ.get("PAGING", "1"))
"""How many times the usual number of programs."""

KINDS = [
    ("rows",),
    ("rows", "rows", "window"),
    ("rows", "state"),
    ("window", "state", "rows"),
    ("window",),
    ("state",),
]

SOME = ["llama_quantized", "gemma3_text", "qwen3_next", "mamba"]

ALL = dict.fromkeys(store_faults.Kind.__args__)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for long for a disk that stands still; what is wrong is told quietly."""
    monkeypatch.setattr(tiers, "PATIENCE", 0.3)
    monkeypatch.setattr(tiers, "PAUSE", 0.02)
    monkeypatch.setattr(forgetting, "PATIENCE", 0.3)
    monkeypatch.setattr(store_faults, "_told", set(ALL))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "pages"


def programs(acts: list[str], steps: int) -> st.SearchStrategy[Program]:
    return st.lists(
        st.tuples(st.sampled_from(acts), st.integers(0, 1 << 16)), min_size=1, max_size=steps
    )


def in_world(place: Path, setting: Setting, program: Program) -> None:
    """Do a program in a world of its own."""
    shutil.rmtree(place, ignore_errors=True)
    run_program(World(place, setting), program)


HYPOTHESIS: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}
seeds = st.integers(0, 1 << 16)


class TestPrograms:
    @settings(max_examples=40 * MANY, **HYPOTHESIS)
    @given(
        kinds=st.sampled_from(KINDS),
        seed=seeds,
        program=programs(weighted(QUIET, LOSSES), 14),
    )
    def test_with_a_disk_that_fails(
        self, place: Path, kinds: tuple[str, ...], seed: int, program: Program
    ) -> None:
        in_world(place, Setting.by(random.Random(seed), kinds), program)

    @settings(max_examples=25 * MANY, **HYPOTHESIS)
    @given(kinds=st.sampled_from(KINDS), seed=seeds, program=programs(weighted(QUIET), 14))
    def test_what_was_kept_stays(
        self,
        place: Path,
        kinds: tuple[str, ...],
        seed: int,
        program: Program,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(tiers, "PATIENCE", 60.0)
        dice = random.Random(seed)
        calm = Setting.by(dice, kinds, store_budget=ROOMY, always=True, calm=True)
        in_world(place, calm, program)

    @pytest.mark.parametrize("seed", range(MANY))
    @pytest.mark.parametrize("name", SOME if MANY == 1 else list(FAMILIES))
    def test_on_families(self, place: Path, name: str, seed: int) -> None:
        dice = random.Random(f"{name} {seed}")
        acts = weighted(QUIET, LOSSES)
        in_world(
            place,
            Setting.by(dice, (name,), kernels=2, chunk=16),
            [(dice.choice(acts), dice.randrange(1 << 16)) for _ in range(14)],
        )


class TestProcesses:
    def test_killed_at_any_moment(self, place: Path, tmp_path: Path) -> None:
        """Each kill is followed by a fresh kernel; three live at once on one store."""
        dice = random.Random(time.time_ns())
        model = FakeModel(("rows", "window", "state"))
        prompts = [prompt(n, seed) for n in (300, 511, 700) for seed in range(8)]
        right: dict[tuple[int, ...], list[int]] = {}
        setting = {"kinds": model.kinds, "store_budget": 500_000, "processes": 4, "window": 32}
        with Wanderers(tmp_path / "errors") as nursery:
            alive: list[int] = []
            killed = reused = 0
            while killed < 100 * MANY:
                while len(alive) < 3:
                    alive.append(
                        nursery.start_in(place, dice.getrandbits(40), steps=1 << 12, **setting)
                    )
                time.sleep(dice.random() * 0.2)
                nursery.kill(alive.pop(dice.randrange(3)))
                killed += 1
                store = Store(place, budget=500_000)
                cache = new_cache(model, dice.choice([ROOMY, 60_000]), store.shelf("a model"))
                ids = dice.choice(prompts)
                run = ask(cache, model, ids, 5, chunk=256)
                cache.check()
                key = tuple(ids)
                right[key] = right.get(key) or cold(model, ids, 5)
                assert run.tokens == right[key]
                assert run.cached + run.computed == len(ids)
                reused += run.cached
                assert store.close(60)
                assert not store.faults.count, store.faults  # nobody finds half a file
            for pid in alive:
                nursery.kill(pid)
        assert reused
        store = Store(place, budget=500_000)
        store.shelf("a model")
        assert store.flush(60)
        assert not list(place.rglob("*.part"))
        assert store.usage().nbytes <= 500_000
        assert store.close(60)

    @pytest.mark.parametrize("kinds", KINDS[:4])
    def test_two_on_one_store(self, place: Path, tmp_path: Path, kinds: tuple[str, ...]) -> None:
        with Wanderers(tmp_path / "errors") as nursery:
            for _ in range(MANY):
                setting = {"kinds": kinds, "processes": 2, "window": 32}
                setting["store_budget"] = random.choice([ROOMY, 200_000, 60_000])
                pids = [
                    nursery.start_in(
                        place, random.getrandbits(40), steps=40, damage=True, **setting
                    )
                    for _ in range(2)
                ]
                ended = [nursery.reap(pid) for pid in pids]
                assert ended == [0, 0], nursery.errors.read_text()[-20_000:]


def prompt(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


# --- whether it would notice --------------------------------------------------------------------


def caught(place: Path, kinds: tuple[str, ...] = ("rows",)) -> bool:
    """Whether programs in worlds without failures find something wrong."""
    for seed in range(30):
        dice = random.Random(seed)
        program = [(dice.choice(weighted(QUIET)), dice.randrange(1 << 16)) for _ in range(20)]
        setting = Setting(kinds, share=1.3, kernels=2, calm=True)
        try:
            in_world(place, setting, program)
        except AssertionError:
            return True
    return False


class TestMutations:
    """What these tests are for: each of these mistakes is found."""

    def test_rows_that_are_rolled_by_one(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cut = HostRows._cut

        def rolled(self: Any, *args: Any) -> Any:
            dtype, rows = cut(self, *args)
            return dtype, np.roll(rows, 1, -2)

        monkeypatch.setattr(HostRows, "_cut", rolled)
        assert caught(place)

    def test_a_token_more_than_is_shared(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        common = adoption.common_prefix
        monkeypatch.setattr(
            adoption,
            "common_prefix",
            lambda a, b: min(common(a, b) + 1, len(a), len(b)),
        )
        assert caught(place)

    def test_noted_before_it_is_written(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put = tiers.Tiers._put

        def at_once(self: Any, shelf: Any, thing: Any, where: Any) -> bool:
            from mlx_jupyter.cache.store_listing import Entry

            end = thing.at if where.kind == "state" else thing.end
            key = b"0" * 16
            thing.entry = Entry(where.kind, where.parent, key, where.start, end, directory="x")
            return put(self, shelf, thing, where)

        monkeypatch.setattr(tiers.Tiers, "_put", at_once)
        assert caught(place)

    def test_rows_of_another_branch_taken_for_ones_own(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from mlx_jupyter.cache import pages

        monkeypatch.setattr(pages, "_entry_of_both", lambda first, _: first.entry)
        assert caught(place)


# --- what it found ------------------------------------------------------------------------------


@pytest.fixture
def store(place: Path) -> Iterator[Store]:
    store = Store(place, budget=ROOMY)
    yield store
    store.close()


def kernel(store: Store, model: FakeModel, budget: int = ROOMY) -> PrefixCache:
    return new_cache(model, budget, store.shelf("a model"))


def save(cache: PrefixCache, store: Store) -> None:
    cache.tiers.save_all(lambda: False)
    assert store.flush(60)
    cache.tiers.note()


class TestFound:
    def test_a_page_that_grows_leaves_the_file_of_another_branch(
        self, store: Store, model: FakeModel
    ) -> None:
        a, b = ([*prompt(300), *prompt(300, seed)] for seed in (1, 2))
        first = kernel(store, model)
        ask(first, model, a, 3)
        save(first, store)
        second = kernel(store, model)
        assert ask(second, model, b, 3).cached == 300
        ask(second, model, prompt(50, 9), 3)
        second.evict()
        assert ask(second, model, b, 3).tokens == cold(model, b, 3)

    def test_a_short_beginning_that_several_share_is_kept(
        self, store: Store, model: FakeModel
    ) -> None:
        a, b = ([*prompt(30), *prompt(300, seed)] for seed in (1, 2))
        first = kernel(store, model)
        for ids in (a, b):
            ask(first, model, ids, 3)
        save(first, store)
        for ids in (a, b):
            assert ask(kernel(store, model), model, ids, 3).cached == 329

    def test_where_branches_part_within_a_page_both_files_are_looked_into(
        self, store: Store, model: FakeModel
    ) -> None:
        a, b = ([*prompt(300), *prompt(300, seed)] for seed in (1, 2))
        first = kernel(store, model)
        for ids in (a, b):
            ask(first, model, ids, 3)
            save(first, store)
        for ids in (a, b):
            assert ask(kernel(store, model), model, ids, 3).cached == 599

    def test_a_tip_that_another_kernel_let_grow_is_found_in_its_new_file(
        self, store: Store, model: FakeModel
    ) -> None:
        ids = prompt(600)
        first, second = kernel(store, model), kernel(store, model)
        ask(first, model, ids, 1)
        save(first, store)
        second.tiers.adopt(np.array(ids, np.int32))
        ask(first, model, [*ids, *prompt(50, 1)], 1)
        save(first, store)  # and the shorter file is forgotten
        assert ask(second, model, ids, 3).cached == 599

    def test_many_strips_of_others_dont_hide_rows(self, store: Store) -> None:
        model = FakeModel(("rows", "window"))
        ids = prompt(99)
        first = kernel(store, model)
        ask(first, model, ids, 12)
        for seed in range(1, 6):
            ask(first, model, prompt(250, seed), 3)
        save(first, store)
        assert ask(kernel(store, model), model, ids, 3).cached == 98

    def test_window_rows_before_a_parting_are_found_in_the_file_of_another_branch(
        self, store: Store
    ) -> None:
        model = FakeModel(("rows", "window"), window=300)
        a, b = (prompt(500), [*prompt(106), *prompt(190, 1)])
        first = kernel(store, model)
        for ids in (a, b):
            ask(first, model, ids, 3, chunk=64)
            save(first, store)
        assert ask(kernel(store, model), model, b, 3).cached == 295

    def test_window_rows_that_one_request_had_no_use_for_are_found_by_the_next(
        self, store: Store
    ) -> None:
        model = FakeModel(("rows", "window"))
        ids = prompt(400)
        first = kernel(store, model)
        run = ask(first, model, ids, 3)
        more = [*ids, *run.tokens, *prompt(100, 1)]
        ask(first, model, more, 3)
        save(first, store)
        second = kernel(store, model)
        assert ask(second, model, [*more, *prompt(200, 2)], 3).cached == 503
        assert ask(second, model, ids, 3).cached == 399

    def test_arrays_that_lie_transposed_are_packed_in_order(self) -> None:
        array = mx.arange(24).reshape(1, 2, 3, 4).swapaxes(1, 2)
        mx.eval(array)
        ((back,),) = unpack_rows(pack_rows(((array,),)), 0, 2)
        assert mx.array_equal(back, array)

    def test_the_hosts_memory_keeps_what_a_request_is_about_to_read(self) -> None:
        model = FakeModel(("rows",))
        whole = new_cache(model)
        ask(whole, model, prompt(700), 1)
        room = whole.live.nbytes()
        cache = new_cache(model, room, host_budget=room)
        for seed in (1, 2, 3, 1, 2, 3, 3, 2, 1):
            run = ask(cache, model, prompt(700, seed), 3)
            cache.check()
            assert run.tokens == cold(model, prompt(700, seed), 3)

    def test_what_waits_to_be_written_stays_as_it_was_put(self, place: Path) -> None:
        """While the disk stands still, the model goes on in the same buffers and makes room."""
        world = World(place, Setting(("rows", "state", "window"), share=2.5, kernels=1))
        restore = world.disk.under()
        try:
            dice = random.Random(0)
            world.step("append", dice)
            world.disk.open.clear()
            for act in ("save next", "append", "rerun", "append", "evict", "append"):
                world.step(act, dice)
            assert world.here.store.writer.waiting
            assert not list(place.rglob("*.safetensors"))
            world.step("flush", dice)
            found = list(place.rglob("*.safetensors"))
            assert found
            assert set(found) <= set(world.written)
            world.verify()  # compares them with what was put
        finally:
            restore()
            world.leave()

    def test_a_disk_that_stands_still_is_waited_for_once(
        self, store: Store, model: FakeModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = kernel(store, model)
        waited: list[float | None] = []
        monkeypatch.setattr(tiers, "PATIENCE", 10.0)
        monkeypatch.setattr(Store, "flush", lambda _, timeout=None: waited.append(timeout))
        for seed in range(4):
            ask(cache, model, prompt(300, seed), 3)
            cache.evict()
        assert waited == [10.0, *[tiers.PAUSE] * (len(waited) - 1)]
        assert len(waited) > 2

    def test_exactness_switched_on_takes_nothing_from_files(
        self, store: Store, model: FakeModel
    ) -> None:
        ids = np.array(prompt(600), np.int32)
        cache = kernel(store, model)
        ask(cache, model, ids, 3)
        save(cache, store)
        cache.exact = True
        ask(cache, model, ids, 3)
        cache.evict()
        assert ask(cache, model, ids, 3).cached == 0
