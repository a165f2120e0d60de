"""Things on disk: saved when idle, found by another kernel, read in, lost and computed again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

from driver import Always, ask, new_cache
from fakes import FakeModel, cold
from mlx_jupyter.cache import ghosts, store_file
from mlx_jupyter.cache.plan import Rates
from mlx_jupyter.cache.store import Store
from mlx_jupyter.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mlx_jupyter.cache.prefix_cache import PrefixCache

KINDS = ("rows", "window", "state")


def prompt(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 200), k=n)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "pages", budget=1 << 30)
    yield store
    store.close()


def kernel(model: Any, store: Store, budget: int = 1 << 30) -> PrefixCache:
    """A prefix cache as a fresh kernel has it."""
    return new_cache(model, budget, store.shelf("fake"))


def written(cache: PrefixCache, store: Store) -> None:
    """Have all of it on disk."""
    cache.tiers.save_all(lambda: False)
    assert store.flush(10)


def before(model: Any, store: Store, *prompts: Sequence[int], count: int = 4) -> list[int]:
    """An earlier kernel was asked these, and each is on disk; what it answered last."""
    first = kernel(model, store)
    for ids in prompts:
        run = ask(first, model, ids, count)
        written(first, store)
    return run.tokens


class TestWarmStart:
    @pytest.mark.parametrize("kinds", [("rows",), ("rows", "window"), ("rows", "state"), KINDS])
    @pytest.mark.parametrize("length", [100, 256, 700, 1023])
    def test_another_kernel_goes_on_where_the_first_ended(
        self, store: Store, kinds: tuple[str, ...], length: int
    ) -> None:
        model = FakeModel(kinds)
        ids = prompt(length)
        answer = before(model, store, ids, count=9)
        second = kernel(model, store)
        again = [*ids, *answer, *prompt(7, 2)]
        expected = cold(model, again, 5)
        warm = ask(second, model, again, 5)
        second.check()
        assert warm.tokens == expected
        assert warm.cached >= length + 8  # the last generated token was never fed
        repeated = kernel(model, store)
        run = ask(repeated, model, ids, 5)
        assert run.tokens == cold(model, ids, 5)
        assert run.cached == length - 1

    @pytest.mark.parametrize("kinds", [("state",), ("window",), ("window", "state")])
    def test_models_without_full_layers(self, store: Store, kinds: tuple[str, ...]) -> None:
        model = FakeModel(kinds)
        ids = prompt(600)
        answer = before(model, store, ids, count=9)
        second = kernel(model, store)
        again = [*ids, *answer, 5, 6]
        warm = ask(second, model, again, 5)
        second.check()
        assert warm.tokens == cold(model, again, 5)
        assert warm.cached >= 600

    def test_a_branch_that_parts_within_a_page(self, store: Store) -> None:
        model = FakeModel()
        a = [*prompt(300), *prompt(300, 1)]
        b = [*prompt(300), *prompt(300, 2)]
        before(model, store, a, b)
        second = kernel(model, store)
        for ids in (b, a):
            run = ask(second, model, ids, 3)
            assert run.cached == 599
            assert run.tokens == cold(model, ids, 3)
            second.check()

    def test_a_prompt_that_shares_a_part_of_a_page(self, store: Store) -> None:
        model = FakeModel()
        before(model, store, prompt(700))
        second = kernel(model, store)
        ids = [*prompt(700)[:333], *prompt(40, 5)]
        run = ask(second, model, ids, 3)
        assert run.cached == 333
        assert run.tokens == cold(model, ids, 3)
        second.check()

    def test_what_a_short_prompt_has_is_not_worth_a_file(self, store: Store) -> None:
        model = FakeModel()
        before(model, store, prompt(20))
        assert store.usage().files == 0

    def test_a_growing_tip_leaves_one_file_a_page(self, store: Store) -> None:
        model = FakeModel()
        cache = kernel(model, store)
        ids = prompt(80)
        for _ in range(6):
            ids = [*ids, *ask(cache, model, ids, 20, owner="a").tokens]
            for _ in range(2):  # written, then noted
                written(cache, store)
        written(cache, store)
        assert store.usage().files == 1


class TestUnderABudget:
    @pytest.mark.parametrize("kinds", [("rows",), ("rows", "window"), ("rows", "state"), KINDS])
    def test_conversations_leave_and_come_back(self, store: Store, kinds: tuple[str, ...]) -> None:
        model = FakeModel(kinds)
        one = new_cache(model)
        ask(one, model, prompt(1000), 4)
        cache = kernel(model, store, budget=int(one.nbytes() * 2.2))
        cache.rates = Always()
        conversations = [prompt(1000, seed) for seed in range(6)]
        for ids in conversations:
            ask(cache, model, ids, 4, owner=str(ids[0]))
            cache.check()
        for _ in range(2):
            for ids in conversations:
                run = ask(cache, model, ids, 4, owner=str(ids[0]))
                cache.check()
                assert run.tokens == cold(model, ids, 4)
                assert run.cached == 999
                assert cache.nbytes() <= cache.budget

    def test_where_reading_is_slower_than_computing_it_is_computed(self, store: Store) -> None:
        model = FakeModel()
        before(model, store, prompt(900))
        second = kernel(model, store)
        second.rates = Rates(prefill=1.0, restore=0.1, read=2.0)
        run = ask(second, model, prompt(900), 3)
        assert run.cached == 0
        assert [c.code for c in second.plan(np.array(prompt(900), np.int32)).why] == ["seed"]

    def test_without_a_shelf_nothing_is_kept(self) -> None:
        model = FakeModel()
        cache = new_cache(model, 60_000)
        for seed in range(4):
            ask(cache, model, prompt(900, seed), 3)
            cache.check()
        assert ask(cache, model, prompt(900, 0), 3).cached < 899


class TestLoss:
    @pytest.mark.parametrize("kinds", [("rows",), ("rows", "window"), ("rows", "state"), KINDS])
    @pytest.mark.parametrize("which", range(5))
    def test_a_missing_or_damaged_file_is_computed_again(
        self, store: Store, kinds: tuple[str, ...], which: int
    ) -> None:
        model = FakeModel(kinds)
        ids = prompt(1000)
        before(model, store, ids)
        files = sorted(store.directory.rglob("*.safetensors"))
        victim = files[which * len(files) // 5]
        second = kernel(model, store)
        second.tiers.adopt(np.array(ids, np.int32))
        if which % 2:
            victim.unlink()
        else:
            whole = bytearray(victim.read_bytes())
            whole[-5] ^= 1
            victim.write_bytes(whole)
        run = ask(second, model, ids, 4)
        second.check()
        assert run.tokens == cold(model, ids, 4)
        assert ask(second, model, ids, 4).cached == 999

    @pytest.mark.parametrize(("kinds", "kept"), [(("rows", "rows"), 512), (KINDS, 0)])
    def test_an_interrupt_while_reading_keeps_what_arrived(
        self, store: Store, kinds: tuple[str, ...], kept: int
    ) -> None:
        """Where windows and states would have had to arrive too, that is nothing yet."""
        model = FakeModel(kinds)
        ids = prompt(1500)
        before(model, store, ids)
        second = kernel(model, store)
        asked = iter([False, False, True])
        with pytest.raises(Interrupted):
            second.open(ids, cancelled=lambda: next(asked)).__enter__()
        second.check()
        assert second.live.offset == kept
        run = ask(second, model, ids, 4)
        assert run.cached == 1499
        assert run.tokens == cold(model, ids, 4)


def test_exactness_mode_leaves_the_shelf_alone(store: Store) -> None:
    model = FakeModel()
    before(model, store, prompt(600))
    second = kernel(model, store)
    second.exact = True
    assert ask(second, model, prompt(600), 4).cached == 0
    usage = store.usage()
    ask(second, model, prompt(700, 3), 4)
    written(second, store)
    assert store.usage() == usage


def test_bfloat16_rows_and_odd_dtypes_survive() -> None:
    from mlx_jupyter.cache.packing import pack_rows, unpack_rows

    for dtype in (mx.bfloat16, mx.float16, mx.float32, mx.uint32, mx.int8, mx.bool_):
        stacks = ((mx.random.uniform(0, 9, (2, 3, 5, 4)).astype(dtype),),)
        mx.eval(stacks)
        ((back,),) = unpack_rows(pack_rows(stacks), 1, 4)
        assert back.dtype == dtype
        assert mx.array_equal(back, stacks[0][0][..., 1:4, :])


class TestHostMemory:
    """The host's memory as a tier, as where the device has memory of its own."""

    @pytest.mark.parametrize("kinds", [("rows",), ("rows", "window"), ("rows", "state"), KINDS])
    @pytest.mark.parametrize("conversations", [2, 8])
    def test_conversations_leave_and_come_back(
        self, store: Store, kinds: tuple[str, ...], conversations: int
    ) -> None:
        model = FakeModel(kinds)
        one = new_cache(model)
        ask(one, model, prompt(1000), 4)
        size = one.nbytes()
        room = one.live.row_bytes() * 5500
        cache = new_cache(model, int(size * 1.3), store.shelf("fake"), host_budget=room)
        cache.rates = Always()
        prompts = [[seed, *prompt(999, seed)] for seed in range(conversations + 2)]
        for _ in range(3):
            for ids in prompts:
                planned = cache.plan(np.array(ids, np.int32))
                run = ask(cache, model, ids, 4, owner=str(ids[:3]))
                cache.check()
                assert run.tokens == cold(model, ids, 4)
                assert planned.recomputed in (1, 1000)
                assert cache.tally.host <= room
        residences = {p.residence for n in cache.trie.nodes() for p in n.pages}
        assert ("disk" if conversations > 4 else "host") in residences

    def test_it_works_without_a_shelf(self) -> None:
        model = FakeModel(KINDS)
        one = new_cache(model)
        ask(one, model, prompt(1000), 4)
        size = one.nbytes()
        cache = new_cache(model, int(size * 1.2), host_budget=size * 2)
        for _ in range(2):
            for seed in range(5):
                ids = prompt(1000, seed)
                assert ask(cache, model, ids, 4).tokens == cold(model, ids, 4)
                cache.check()
        assert cache.view().host_bytes == cache.tally.host > 0

    def test_a_branch_within_a_page_on_the_host(self) -> None:
        model = FakeModel()
        cache = new_cache(model, host_budget=1 << 30)
        ask(cache, model, prompt(700), 4)
        cache.evict()
        assert {p.residence for n in cache.trie.nodes() for p in n.pages} == {"host"}
        ids = [*prompt(700)[:333], *prompt(9, 4)]
        run = ask(cache, model, ids, 4)
        assert (run.cached, run.tokens) == (333, cold(model, ids, 4))
        cache.check()
        cache.clear()
        assert cache.tally.host == 0

    def test_what_lies_there_is_written_when_idle(self, store: Store) -> None:
        model = FakeModel()
        cache = new_cache(model, 1 << 30, store.shelf("fake"), host_budget=1 << 30)
        ask(cache, model, prompt(700), 4)
        cache.evict()
        written(cache, store)
        other = kernel(model, store)
        assert ask(other, model, prompt(700), 4).cached == 699


def test_what_may_go_on_is_read_ahead(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    ids = prompt(1500)
    before(model, store, ids)
    asked: list[str] = []
    monkeypatch.setattr(store_file, "will_need", lambda path: asked.append(path.name))
    second = kernel(model, store)
    ask(second, model, ids[:300], 1)
    assert store.flush(10)
    starts = [int(name.split("-")[2]) for name in asked]
    assert starts == [256, 512, 768, 1024, 1280]


def test_what_lies_on_disk_only_is_known_within_bounds(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ghosts, "AWAY_NODES", 3)
    model = FakeModel()
    cache = kernel(model, store)
    for seed in range(8):
        ask(cache, model, [seed, *prompt(300, seed)], 2)
        written(cache, store)
        cache.tiers.note()
        cache.evict()
        cache.check()
    assert sum(1 for _ in cache.trie.nodes()) <= 4
    assert ask(cache, model, [0, *prompt(300, 0)], 2).cached == 300
