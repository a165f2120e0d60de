"""The policy's properties, and what it is worth on the recorded traces."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driver import ask, new_cache
from fakes import LETTERS, FakeModel
from mlx_jupyter.cache.retention import Item, choose

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@st.composite
def forests(draw: st.DrawFn) -> list[Item]:
    """Pages in chains that fork, snapshots on them and what these need, some pinned or useless."""
    count = draw(st.integers(0, 25))
    dice = random.Random(draw(st.integers(0, 1 << 32)))  # a draw for each field would be slow
    made: list[Item] = []
    pages: list[Item] = []
    states: dict[int, int | None] = {}  # page -> the snapshot at or above it
    strips: list[int] = []
    alone = dice.random() < 0.5
    for key in range(count):
        above = dice.choice([None, *pages])
        kind = dice.choice(["rows", "rows", "state", "window"])
        prior = states.get(above.key) if above else None
        item = Item(
            key,
            kind,
            dice.randint(1, 1000),
            (above.end if above else 0) + dice.randint(1, 256),
            dice.randint(1, 256),
            dice.randint(0, 30),
            before=above.key if above and kind != "window" else None,
            useless=dice.random() < 0.2,
            reachable=dice.random() < 0.6,
            pinned=dice.random() < 0.15,
            prior=prior if kind == "state" else None,
            place=dice.choice(["turn", "periodic", "prompt"]) if kind == "state" else "",
            asked=dice.choice([None, dice.random()]),
            under=dice.random() < 0.3,
            alone=alone,
            needs=_some(dice, strips) if kind == "state" else (),
        )
        if kind == "state" and item.needs and dice.random() < 0.3:
            item = replace(item, nbytes=0)  # windows alone: the place itself holds nothing
        made.append(item)
        if kind == "rows":
            pages.append(item)
            states[key] = prior
        elif kind == "state" and above:
            states[above.key] = key
        elif kind == "window":
            strips.append(key)
    return made


def _some(dice: random.Random, keys: list[int]) -> tuple[int, ...]:
    return tuple(dice.sample(keys, dice.randint(0, min(3, len(keys)))))


def may_go(items: list[Item]) -> set[int]:
    """Everything but what is pinned, the pages and strips that it needs, what holds nothing."""
    by_key = {item.key: item for item in items}
    stay = {item.key for item in items if not item.nbytes}
    for item in items:
        if item.pinned and not item.useless:
            stay |= set(item.needs)
    for item in items:
        at: Item | None = item if item.pinned else None
        while at is not None:
            stay.add(at.key)
            at = by_key[at.before] if at.before is not None else None
            if at is not None and at.useless:
                break
    return by_key.keys() - stay


quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class TestTheChoice:
    @quick
    @given(items=forests(), need=st.integers(-5, 12_000))
    def test_it_frees_what_is_needed_or_all_that_may_go(self, items: list[Item], need: int) -> None:
        chosen = choose(items, need, 31)
        assert len(set(chosen)) == len(chosen)
        sizes = {item.key: item.nbytes for item in items}
        freed = sum(sizes[key] for key in chosen)
        if freed < need:
            assert set(chosen) >= may_go(items)
        elif chosen:
            assert freed - sizes[chosen[-1]] < need, "the last one wasn't needed any more"
        else:
            assert need <= 0

    @quick
    @given(items=forests(), need=st.integers(1, 12_000))
    def test_what_is_pinned_stays(self, items: list[Item], need: int) -> None:
        pinned = {item.key for item in items if item.pinned}
        assert pinned.isdisjoint(choose(items, need, 31))

    @quick
    @given(items=forests(), need=st.integers(1, 12_000))
    def test_a_page_goes_after_what_needs_it(self, items: list[Item], need: int) -> None:
        by_key = {item.key: item for item in items}
        gone: set[int] = set()
        for key in choose(items, need, 31):
            if by_key[key].kind == "rows" and not by_key[key].useless:
                assert all(i.key in gone for i in items if i.before == key and i.nbytes)
            gone.add(key)

    @quick
    @given(items=forests(), need=st.integers(1, 12_000))
    def test_a_window_goes_whole(self, items: list[Item], need: int) -> None:
        """A strip goes after all that need it, and what only the last one needed goes next."""
        chosen = choose(items, need, 31)
        everything = choose(items, 1 << 60, 31)
        users = {
            strip: {i.key for i in items if strip in i.needs and not i.useless}
            for item in items
            for strip in item.needs
        }
        sizes = {item.key: item.nbytes for item in items}
        gone: set[int] = set()
        for key in everything:
            if key in users:
                assert all(user in gone or not sizes[user] for user in users[key])
            gone.add(key)
        broken = {user for key in chosen for user in users.get(key, ())}
        held = {i.key for i in items if i.key not in chosen and sizes[i.key] and not i.pinned}
        assert not broken & held, "a window that lacks a strip serves nothing"

    @quick
    @given(items=forests(), need=st.integers(1, 12_000), data=st.data())
    def test_the_order_of_the_description_is_nothing(
        self, items: list[Item], need: int, data: st.DataObject
    ) -> None:
        again = data.draw(st.permutations(items))
        assert choose(items, need, 31) == choose(again, need, 31) == choose(items, need, 31)

    @quick
    @given(items=forests(), need=st.integers(1, 6_000), more=st.integers(0, 6_000))
    def test_more_need_goes_on_where_less_stopped(
        self, items: list[Item], need: int, more: int
    ) -> None:
        less = choose(items, need, 31)
        assert choose(items, need + more, 31)[: len(less)] == less


def rows(key: int, end: int, before: int | None = None, **more: object) -> Item:
    return Item(key, "rows", 100, end, 256, 1, before, **more)  # type: ignore[arg-type]


def state(key: int, end: int, replay: int, **more: object) -> Item:
    return Item(key, "state", 1000, end, replay, 1, **more)  # type: ignore[arg-type]


class TestTheValue:
    def test_useless_then_unreachable_then_old_then_deep(self) -> None:
        items = [
            rows(0, 256),
            rows(1, 512, 0),
            Item(2, "rows", 100, 256, 256, 1, asked=0.5),
            rows(3, 256, reachable=False),
            rows(4, 256, useless=True),
        ]
        assert choose(items, 1000, 8) == [4, 3, 1, 0, 2]

    def test_a_snapshot_that_saves_little_goes_before_one_that_saves_much(self) -> None:
        items = [state(0, 1000, 1000), state(1, 1016, 16, prior=0), state(2, 2000, 984, prior=1)]
        assert choose(items, 1000, 2) == [1]

    def test_with_the_one_before_gone_a_snapshot_saves_more(self) -> None:
        # Of two neighbours the second to go would leave a hole: it is worth more by then.
        pair = [state(0, 1000, 10), state(1, 1010, 10, prior=0), state(2, 400, 100)]
        assert choose(pair, 2000, 2) == [0, 1] or choose(pair, 2000, 2) == [1, 0]
        far = [state(0, 1000, 1000, useless=True), state(1, 1010, 10, prior=0), state(2, 400, 100)]
        assert choose(far, 2000, 2) == [0, 2]

    def test_rows_that_only_a_snapshot_made_useful_go_with_it(self) -> None:
        items = [
            rows(0, 256, alone=False),
            rows(1, 512, 0, alone=False),
            state(2, 512, 512, before=1),
            state(3, 256, 5000),
        ]
        assert choose(items, 1200, 2) == [2, 1, 0]

    def test_the_tip_is_kept_before_the_places_behind_it(self) -> None:
        items = [
            state(0, 500, 500, asked=0.25),
            state(1, 1000, 500, asked=0.5),
            state(2, 1500, 500, asked=1.0),
        ]
        assert choose(items, 2000, 2) == [0, 1]

    def test_what_lies_under_a_tip_goes_after_what_a_rerun_replaced(self) -> None:
        items = [
            rows(0, 256, reachable=False, under=True),
            rows(1, 256, reachable=False),
            rows(2, 256),
        ]
        assert choose(items, 300, 8) == [1, 0, 2]

    def test_it_is_fast(self) -> None:
        """No square of anything: 2,000 items, all to be given up, in some milliseconds."""
        dice = random.Random(3)
        items: list[Item] = []
        for chain in range(10):
            page = prior = None
            for i in range(150):
                key = len(items)
                items.append(Item(key, "rows", 16_000_000, 256 * i, 256, chain, page, alone=False))
                page = key
                if i % 3 == 0:
                    key = len(items)
                    items.append(
                        Item(
                            key,
                            "state",
                            150_000_000,
                            256 * i,
                            768,
                            dice.randrange(99),
                            page,
                            prior=prior,
                            asked=0.5 ** (50 - i // 3),
                        )
                    )
                    prior = key
        assert len(items) == 2000
        best = 1.0
        for _ in range(5):
            began = time.perf_counter()
            assert len(choose(items, 1 << 60, 100)) == 2000
            best = min(best, time.perf_counter() - began)
        assert best < 0.1  # about 15 ms for all of them; a few are the rule


def strip(key: int, end: int, **more: object) -> Item:
    return Item(key, "window", 100, end, 32, 1, **more)  # type: ignore[arg-type]


def place(key: int, end: int, needs: tuple[int, ...], **more: object) -> Item:
    """A mark of a model of windows: it holds nothing but its strips."""
    return Item(key, "state", 0, end, 64, 1, needs=needs, **more)  # type: ignore[arg-type]


def story(seed: int) -> tuple[int, int]:
    """Prompt tokens that a cache with a budget computes, and one without."""
    kinds = ("rows", "window", "window", "window")
    model = FakeModel(kinds, window=256)
    caches = new_cache(model, budget=140_000), new_cache(model)
    dice = random.Random(seed)
    history: list[list[int]] = [[]]
    computed = [0, 0]
    for turn in range(40):
        back = 1 if turn % 5 == 4 else 2 if turn % 7 == 6 else 0
        owner = f"fork {turn}" if back == 2 else "story"
        question = dice.choices(LETTERS, k=dice.randint(40, 120))
        ids = [*history[max(0, len(history) - 1 - back)], *question]
        runs = [ask(cache, model, ids, 32, chunk=128, owner=owner) for cache in caches]
        computed = [n + run.computed for n, run in zip(computed, runs, strict=True)]
        caches[0].check()
        history = [*history[: len(history) - back], [*ids, *runs[0].tokens]]
    return computed[0], computed[1]


class TestWindows:
    """Two whole windows of two strips each, an old one and the tip's."""

    old = (strip(0, 32), strip(1, 64), place(2, 64, (0, 1), asked=0.1))
    tip = (strip(3, 512), strip(4, 544), place(5, 544, (3, 4), asked=1.0, prior=2))

    def test_the_less_wanted_window_goes_whole_before_a_strip_of_the_other(self) -> None:
        items = [*self.old, *self.tip]
        assert set(choose(items, 101, 2)) == {0, 1}
        assert set(choose(items, 201, 2)[:2]) == {0, 1}
        assert set(choose(items, 400, 2)) == {0, 1, 3, 4}

    def test_begun_it_is_finished(self) -> None:
        items = [replace(item, useless=False) for item in (*self.old, *self.tip)]
        for need in (1, 101, 201, 301):
            gone = choose(items, need, 2)
            windows = [{0, 1} & set(gone), {3, 4} & set(gone)]
            assert sum(0 < len(window) < 2 for window in windows) <= 1

    def test_a_strip_that_another_mark_needs_too_stays_with_it(self) -> None:
        shared = [strip(0, 32), strip(1, 64), strip(2, 96)]
        marks = [place(3, 64, (0, 1), asked=0.1), place(4, 96, (1, 2), asked=1.0, prior=3)]
        assert choose([*shared, *marks], 100, 2) == [0]

    def test_a_strip_that_nothing_needs_goes_first(self) -> None:
        assert choose([*self.old, *self.tip, strip(6, 900, useless=True)], 100, 2) == [6]

    def test_windows_that_overlap_are_judged_together(self) -> None:
        """Alone none of the old ones frees anything; the tip's would be the only one that does."""
        strips = [strip(key, 32 * (key + 1)) for key in range(6)]
        old = [
            place(10 + i, 64 + 8 * i, (0, 1, 2), asked=0.05, prior=9 + i if i else None)
            for i in range(3)
        ]
        tip = place(20, 192, (3, 4, 5), asked=1.0, prior=12)
        assert set(choose([*strips, *old, tip], 300, 2)) == {0, 1, 2}

    def test_a_notebook_on_windows_recomputes_little(self) -> None:
        """Turns, reruns and forks: at half of what all would take, near what no budget costs."""
        computed = [0, 0]
        for seed in range(3):
            for i, used in enumerate(story(seed)):
                computed[i] += used
        assert computed[0] <= 1.4 * computed[1]

    def test_pinned_windows_stay(self) -> None:
        pinned = [replace(item, pinned=True) for item in self.old]
        assert set(choose([*pinned, *self.tip], 1000, 2)) == {3, 4}


@pytest.fixture(scope="module")
def results():
    """Every policy on the recorded traces at every budget."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import retention

        traces = retention.recorded()
        made = [r for trace in traces for r in retention.compare(trace)]
        yield made, retention.means(made)
    finally:
        sys.path.remove(str(BENCHMARKS))


class TestOnRecordedTraces:
    def test_all_are_there(self, results) -> None:
        assert {r.trace for r in results[0]} == {"teacher", "prompts", "forks"}
        assert len(results[1]) == 6  # two models, three budgets

    def test_near_the_clairvoyant_at_each_budget(self, results) -> None:
        for mean in results[1]:
            assert mean.near(), mean

    def test_better_than_every_other_policy_at_each_budget(self, results) -> None:
        for mean in results[1]:
            assert mean.best(), mean

    def test_an_infinite_cache_is_not_beaten(self, results) -> None:
        for result in results[0]:
            assert min(result.prefilled.values()) >= result.infinite * 0.99
