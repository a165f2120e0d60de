"""The prefix cache on a fake model whose tokens hash every cached row: warm must equal cold."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driver import ask, new_cache
from fakes import FakeModel, cold
from mlx_jupyter.cache import layers as ly
from mlx_jupyter.cache import making_room, pages
from mlx_jupyter.cache.arrays import arrays_in
from mlx_jupyter.cache.live import Live
from mlx_jupyter.cache.making_room import prune
from mlx_jupyter.cache.trie import Trie
from mlx_jupyter.engine.request import Request, Ticket

FAMILIES = [
    ("rows", "rows"),
    ("state",),
    ("rows", "state"),
    ("window", "rows"),
    ("window", "state", "rows"),
]


def prompt(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


@pytest.fixture(params=FAMILIES, ids="+".join)
def model(request: pytest.FixtureRequest) -> FakeModel:
    return FakeModel(request.param)


class TestReuse:
    def test_the_same_prompt_twice_computes_one_token(self, model: FakeModel) -> None:
        cache = new_cache(model)
        first = ask(cache, model, prompt(100))
        again = ask(cache, model, prompt(100))
        assert again.tokens == first.tokens == cold(model, prompt(100), 4)
        assert (again.cached, again.computed) == (99, 1)

    def test_a_continued_prompt_reuses_prompt_and_answer(self, model: FakeModel) -> None:
        cache = new_cache(model)
        first = ask(cache, model, prompt(40), 6)
        longer = [*prompt(40), *first.tokens, *prompt(5, seed=1)]
        more = ask(cache, model, longer)
        assert more.cached == 45  # the last generated token was never fed
        assert more.tokens == cold(model, longer, 4)

    @pytest.mark.parametrize("n", [2, 3, 17, 255, 256, 257, 300, 513])
    def test_prompts_of_any_length_hit(self, n: int) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ask(cache, model, prompt(n), 1)
        other = prompt(600, seed=5)
        ask(cache, model, other, 1)
        back = ask(cache, model, prompt(n), 3)
        assert (back.cached, back.computed) == (n - 1, 1)
        assert back.tokens == cold(model, prompt(n), 3)

    def test_a_branch_inside_an_edge_recomputes_exactly_what_differs(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ask(cache, model, prompt(400))
        for at in (399, 300, 256, 255, 10, 1):
            edited = [*prompt(400)[:at], 299 % 256, *prompt(20, seed=at)]
            common = at + (edited[at] == prompt(400)[at])
            run = ask(cache, model, edited)
            assert run.cached >= common
            assert run.tokens == cold(model, edited, 4)
            cache.check()
        back = ask(cache, model, prompt(400))
        assert back.computed == 1

    def test_the_ways_of_a_gpu_give_the_same(self, model: FakeModel) -> None:
        cache = new_cache(model)
        cache.live.gpu = True
        for seed in (0, 1, 0, 2, 1, 0):
            ids = [*prompt(300), *prompt(900, seed=seed)]
            run = ask(cache, model, ids, 3)
            assert run.tokens == cold(model, ids, 3)
            cache.check()
        assert run.computed == 1

    def test_a_single_token_prompt(self, model: FakeModel) -> None:
        cache = new_cache(model)
        for _ in range(2):
            run = ask(cache, model, [65])
            assert (run.cached, run.computed) == (0, 1)
            assert run.tokens == cold(model, [65], 4)

    def test_marks_let_states_come_back_inside_an_edge(self) -> None:
        model = FakeModel(("state", "rows"))
        cache = new_cache(model)
        ask(cache, model, prompt(200), marks=[(64, "system"), (150, "turn")])
        other = [*prompt(150), *prompt(30, seed=3)]
        run = ask(cache, model, other)
        assert run.cached == 150
        other = [*prompt(100), *prompt(30, seed=4)]
        run = ask(cache, model, other)
        assert run.cached == 64
        assert run.tokens == cold(model, other, 4)
        # A snapshot was placed where the sequences diverged, for the next one.
        run = ask(cache, model, [*prompt(100), *prompt(30, seed=6)])
        assert run.cached == 100


class TestTheFakeModelNotices:
    @pytest.mark.parametrize("harm", ["swap", "stale", "missing", "other layer"])
    def test_one_harmed_row_in_a_page(self, harm: str) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ask(cache, model, prompt(100))
        ask(cache, model, prompt(90, seed=8))  # moves the first prompt's rows into pages
        page = next(p for n in cache.trie.nodes() for p in n.pages if p.residence == "device")
        keys, values = page.stacks[0]
        if harm == "swap":
            order = mx.array([0, 2, 1, *range(3, page.tokens)])
            keys = keys[:, :, order]
        elif harm == "stale":
            values[0, :, 5] = values[0, :, 4]
        elif harm == "missing":
            keys[1, :, 7] = 0
        else:
            values = values[::-1]
        page.stacks = ((keys, values),)
        mx.eval(page.stacks)
        assert ask(cache, model, prompt(100)).tokens != cold(model, prompt(100), 4)

    def test_a_stale_state(self) -> None:
        model = FakeModel(("state",))
        cache = new_cache(model)
        ask(cache, model, prompt(50), marks=[(20, "turn")])
        (node,) = cache.trie.nodes()
        node.marks[20].states = node.marks[49].states
        edited = [*prompt(20), *prompt(9, seed=1)]
        assert ask(cache, model, edited).tokens != cold(model, edited, 4)


class TestStorage:
    def test_shared_prefixes_are_stored_once_and_compact(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        for seed in range(8):
            ask(cache, model, [*prompt(1000), *prompt(24, seed=seed + 1)], 1)
        row = cache.live.row_bytes()
        unique = 7 * 24 * row  # the shared prefix is live
        assert cache.stored_bytes() <= unique * 1.05

    def test_nothing_aliases_the_live_buffers(self, model: FakeModel) -> None:
        cache = new_cache(model)
        ask(cache, model, prompt(300))
        ask(cache, model, [*prompt(150), *prompt(60, seed=2)])
        before = {
            id(p): [np.array(a) for stack in p.stacks for a in stack]
            for n in cache.trie.nodes()
            for p in n.pages
            if p.residence == "device"
        }
        ask(cache, model, [*prompt(150), *prompt(90, seed=3)], 40)
        for node in cache.trie.nodes():
            for page in node.pages:
                if page.residence == "device" and id(page) in before:
                    now = [np.array(a) for stack in page.stacks for a in stack]
                    assert all(map(np.array_equal, now, before[id(page)]))

    def test_a_recurrent_snapshot_is_as_large_as_the_state(self) -> None:
        model = FakeModel(("state",))
        cache = new_cache(model)
        ask(cache, model, prompt(200), marks=[(100, "turn")])
        for node in cache.trie.nodes():
            for mark in node.marks.values():
                if mark.nbytes:
                    assert mark.nbytes == sum(a.nbytes for a in arrays_in(mark.states))

    def test_twenty_turns_stay_within_the_budget(self, model: FakeModel) -> None:
        probe = new_cache(model)
        ask(probe, model, prompt(600), 8)
        cache = new_cache(model, budget=int(probe.live.nbytes() * 1.5) + 40_000)
        history = prompt(50)
        for turn in range(20):
            run = ask(cache, model, history, 8, owner="@a")
            assert run.tokens == cold(model, history, 8)
            cache.check()
            assert cache.live.nbytes() + cache.stored_bytes() <= cache.budget
            history = [*history, *run.tokens, *prompt(15, seed=turn)]
        tip = ask(cache, model, history, 1)
        assert tip.cached >= len(history) - 16 - 8 - 15

    def test_a_budget_of_nothing_still_answers(self, model: FakeModel) -> None:
        cache = new_cache(model, budget=0)
        for n in (30, 30, 45):
            assert ask(cache, model, prompt(n)).tokens == cold(model, prompt(n), 4)
            cache.check()
        assert cache.live.nbytes() + cache.stored_bytes() == 0

    def test_evict_frees_what_is_asked_and_all(self, model: FakeModel) -> None:
        cache = new_cache(model)
        for seed in range(4):
            ask(cache, model, prompt(300, seed=seed))
        total = cache.live.nbytes() + cache.stored_bytes()
        assert cache.evict(1000) >= min(1000, total)
        cache.check()
        cache.evict()
        cache.check()
        assert cache.live.nbytes() + cache.stored_bytes() == 0
        run = ask(cache, model, prompt(300, seed=1))
        assert run.cached == 0
        assert run.tokens == cold(model, prompt(300, seed=1), 4)

    def test_what_was_evicted_is_told(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ask(cache, model, prompt(300))
        cache.evict()
        plan = cache.plan(np.array(prompt(300), np.int32))
        assert [(c.code, c.tokens) for c in plan.why] == [("evicted", 299), ("seed", 1)]

    def test_an_owned_path_outlives_an_unowned_one(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ask(cache, model, prompt(256, seed=1), 1, owner="@keep")
        ask(cache, model, prompt(256, seed=2), 1)
        ask(cache, model, prompt(256, seed=3), 1)
        cache.evict(100)
        kept = cache.plan(np.array(prompt(256, seed=1), np.int32))
        lost = cache.plan(np.array(prompt(256, seed=2), np.int32))
        assert kept.cached == 255
        assert lost.cached < 255

    def test_short_after_long_gives_the_memory_back(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ask(cache, model, prompt(5000), 1)
        large = cache.live.nbytes()
        cache.evict()
        ask(cache, model, prompt(40), 1)
        ask(cache, model, prompt(50), 1)
        assert cache.live.nbytes() < large / 4


class TestCancel:
    @pytest.mark.parametrize("at", range(7))
    def test_after_every_step_the_record_equals_the_cache(self, model: FakeModel, at: int) -> None:
        ids = prompt(40)
        ticket = Ticket(Request(tokens=tuple(ids)))
        calls = 0

        def count(_: int) -> None:
            nonlocal calls
            if calls == at:
                ticket.cancel()
            calls += 1

        cache = new_cache(model)
        model.before_call = count
        ask(cache, model, ids, 6, ticket=ticket)
        model.before_call = None
        cache.check()
        again = ask(cache, model, ids, 6)
        assert again.tokens == cold(model, ids, 6)

    def test_interrupted_prefills_add_up_to_one(self, model: FakeModel) -> None:
        ids = prompt(640)
        cache = new_cache(model)
        spent = 0
        for _ in range(3):
            ticket = Ticket(Request(tokens=tuple(ids)))
            goal = spent + 0.4 * (len(ids) - spent)
            fed = spent

            def count(n: int, ticket: Ticket = ticket, goal: float = goal) -> None:
                nonlocal fed
                fed += n
                if fed >= goal:
                    ticket.cancel()

            model.before_call = count
            run = ask(cache, model, ids, 1, ticket=ticket)
            assert run.finish == "cancelled"
            spent += run.computed
        model.before_call = None
        run = ask(cache, model, ids, 3)
        assert spent + run.computed <= 1.05 * len(ids)
        assert run.tokens == cold(model, ids, 3)

    def test_cancelled_before_it_starts(self, model: FakeModel) -> None:
        cache = new_cache(model)
        ask(cache, model, prompt(30))
        ticket = Ticket(Request(tokens=(1,)))
        ticket.cancel()
        run = ask(cache, model, prompt(20, seed=4), ticket=ticket)
        assert (run.computed, run.tokens) == (0, [])
        cache.check()
        assert ask(cache, model, prompt(30)).tokens == cold(model, prompt(30), 4)


class TestErrors:
    @pytest.mark.parametrize("at", range(8))
    @pytest.mark.parametrize("layer", [0, 1])
    def test_an_exception_between_two_layers_keeps_the_work(self, at: int, layer: int) -> None:
        model = FakeModel(("rows", "rows"))
        cache = new_cache(model)
        ids = prompt(70)
        calls = -1
        original = model._rows

        def torn(inputs: mx.array, cached: object, index: int) -> mx.array:
            nonlocal calls
            calls += index == 0
            if calls == at and index == layer:
                raise RuntimeError("boom")
            return original(inputs, cached, index)

        model._rows = torn
        with pytest.raises(RuntimeError, match="boom"):
            ask(cache, model, ids, 6)
        model._rows = original
        cache.check()
        run = ask(cache, model, ids, 6)
        assert run.tokens == cold(model, ids, 6)
        assert run.cached == min(16 * at, 64) if at < 5 else run.cached >= 69

    def test_an_exception_with_states_keeps_rows_and_snapshots(self) -> None:
        model = FakeModel(("state", "rows"))
        cache = new_cache(model)
        ids = prompt(70)

        def boom(n: int) -> None:
            if n == 1:
                raise RuntimeError("boom")

        model.before_call = boom
        with pytest.raises(RuntimeError, match="boom"):
            ask(cache, model, ids, marks=[(32, "system")])
        model.before_call = None
        cache.check()
        run = ask(cache, model, ids)
        assert run.cached == 69
        assert run.tokens == cold(model, ids, 4)

    def test_a_failing_restore_leaves_an_empty_live_cache(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ask(cache, model, prompt(70))
        ask(cache, model, prompt(70, seed=1))
        with monkeypatch.context() as patch:
            patch.setattr(Live, "read_in", lambda *_: (_ for _ in ()).throw(MemoryError("no")))
            with pytest.raises(MemoryError):
                ask(cache, model, prompt(70))
        cache.check()
        assert ask(cache, model, prompt(70)).tokens == cold(model, prompt(70), 4)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_sequence_of_requests_equals_cold_runs(data: st.DataObject) -> None:
    """Open, fork, switch, cancel, fail, evict at random on every family; always as if cold."""
    model = FakeModel(
        data.draw(st.sampled_from(FAMILIES)), window=data.draw(st.sampled_from([4, 32]))
    )
    cache = new_cache(model, budget=data.draw(st.sampled_from([0, 3_000, 20_000, 1 << 30])))
    chunk = data.draw(st.sampled_from([1, 7, 64]))
    known: list[list[int]] = [[65]]
    for _ in range(data.draw(st.integers(1, 10))):
        base = data.draw(st.sampled_from(known))
        cut = data.draw(st.integers(0, len(base)))
        ids = [*base[:cut], *data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=300))]
        marks = [(at, "turn") for at in data.draw(st.lists(st.integers(1, len(ids)), max_size=2))]
        action = data.draw(st.sampled_from(["run", "run", "cancel", "fail", "evict"]))
        if action == "evict":
            cache.evict(data.draw(st.sampled_from([None, 500, 5_000])))
            cache.check()
        ticket = Ticket(Request(tokens=tuple(ids)))
        left = data.draw(st.integers(0, 8))

        def hook(_: int, action: str = action, ticket: Ticket = ticket) -> None:
            nonlocal left
            left -= 1
            if left < 0 and action == "cancel":
                ticket.cancel()
            if left < 0 and action == "fail":
                raise RuntimeError("boom")

        model.before_call = hook
        count = data.draw(st.integers(1, 12))
        try:
            run = ask(
                cache, model, ids, count, chunk=chunk, marks=marks, ticket=ticket, owner=str(cut)
            )
        except RuntimeError:
            run = None
        model.before_call = None
        cache.check()
        if run is not None:
            assert run.tokens == cold(model, ids, count)[: len(run.tokens)]
            assert action == "cancel" or run.finish != "cancelled"
            known.append([*ids, *run.tokens])


class TestPins:
    def test_a_pinned_path_outlives_an_eviction_while_it_is_live(self) -> None:
        for kinds in (("rows",), ("rows", "window"), ("rows", "state")):
            model = FakeModel(kinds)
            cache = new_cache(model)
            ask(cache, model, prompt(256, 1), 1, owner="@keep")
            cache.pin("@keep")
            cache.evict()
            cache.check()
            assert cache.plan(np.array([*prompt(256, 1), 3], np.int32)).cached == 256, kinds

    def test_pins_that_fill_the_budget_leave_no_room_for_a_live_cache(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        for seed in (1, 2, 3):
            ask(cache, model, prompt(256, seed), 1, owner=f"@{seed}")
            cache.pin(f"@{seed}")
        cache.budget = int(cache.nbytes() * 0.6)
        ask(cache, model, prompt(256, 4), 1, owner="@b")
        cache.check()
        assert cache.live.offset < 16  # a token or two are those of a pinned path

    def test_unpinning_gives_up_what_is_over_the_budget(self) -> None:
        model = FakeModel()
        cache = new_cache(model, budget=0)
        ask(cache, model, prompt(15), 4, owner="@a")
        cache.pin("@a")
        ask(cache, model, prompt(7, 1), 4)
        cache.unpin("@a")
        cache.check()
        assert cache.nbytes() == 0

    def test_a_pinned_path_outlives_everything_else(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ask(cache, model, prompt(256, seed=1), 1, owner="@keep")
        for seed in range(2, 6):
            ask(cache, model, prompt(256, seed=seed), 1, owner=f"@{seed}")
        assert cache.pin("@keep") > 0
        cache.evict()
        assert cache.plan(np.array(prompt(256, seed=1), np.int32)).cached == 255
        assert cache.plan(np.array(prompt(256, seed=4), np.int32)).cached == 0
        assert cache.unpin("@keep")
        assert not cache.unpin("@keep")
        cache.evict()
        assert cache.stored_bytes() == 0


class TestMarks:
    def test_thinning_one_branch_keeps_the_window_rows_of_another(self) -> None:
        model = FakeModel(("window", "rows"), window=32)
        cache = new_cache(model)
        a = prompt(58)
        ask(cache, model, a, 3)
        ask(cache, model, prompt(8, 1), 2)  # elsewhere
        b = [*a[:54], *prompt(20, 2)]
        ask(cache, model, b, 1)
        ask(cache, model, b, 5)
        cache.check()
        assert cache.plan(np.array(a, np.int32)).recomputed == 1

    def test_a_place_that_was_restored_at_is_one_to_come_back_to(self) -> None:
        model = FakeModel(("window", "rows"), window=4)
        cache = new_cache(model)
        first = ask(cache, model, prompt(12), 12)
        again = [*prompt(12), *first.tokens[:3]]
        ask(cache, model, again, 15)
        ask(cache, model, [*again[:10], *prompt(9, 2)], 3)
        assert cache.plan(np.array(again, np.int32)).recomputed == 1

    def test_window_rows_given_up_behind_the_live_tip_are_stored_again(self) -> None:
        model = FakeModel(("window", "rows"), window=32)
        cache = new_cache(model)
        first = [*prompt(44), *ask(cache, model, prompt(44), 4).tokens]
        making_room.give_up(cache, 1 << 40, {})
        longer = [*first, *prompt(20, 1)]
        ask(cache, model, longer, 1)
        ask(cache, model, prompt(50, 3), 1)
        cache.check()
        assert cache.plan(np.array(longer, np.int32)).recomputed == 1

    def test_a_snapshot_given_up_at_the_tip_leaves_the_live_states_in_use(self) -> None:
        model = FakeModel(("state", "rows"))
        cache = new_cache(model)
        for _ in range(2):
            ask(cache, model, prompt(40), 1)
        making_room.give_up(cache, 1 << 40, {}, rests=True)
        cache.check()
        assert cache.plan(np.array([*prompt(40), 7], np.int32)).reused == 40

    def test_the_lattice_is_nested_and_its_holes_grow_with_the_distance(self) -> None:
        from mlx_jupyter.cache.needs import MARK_EVERY, lattice

        kept: set[int] = set()
        for tip in range(0, 200 * MARK_EVERY, MARK_EVERY):
            kept = {at for at in kept | {tip} if lattice(at, tip)}
            whole = {at for at in range(0, tip + 1, MARK_EVERY) if lattice(at, tip)}
            assert kept == whole  # nothing that is wanted now was given up before
            order = sorted(kept)
            for a, b in pairwise(order):
                assert b - a <= max(tip - a, MARK_EVERY)
        assert len(kept) <= 20

    def test_the_end_of_the_thinking_is_marked(self) -> None:
        model = FakeModel(("state", "rows"))
        first = ask(new_cache(model), model, prompt(40), 30)
        cache = new_cache(model)
        end = tuple(first.tokens[9:11])
        ask(cache, model, prompt(40), 30, think_end=end)
        marks = {at: m.kind for n in cache.trie.nodes() for at, m in n.marks.items()}
        assert marks[40 + 11] == "thinking"
        retry = [*prompt(40), *first.tokens[:11], 65]
        assert ask(cache, model, retry).cached == 51
        cache.check()

    def test_long_answers_of_stateful_models_are_marked_on_the_way(self) -> None:
        model = FakeModel(("state",))
        cache = new_cache(model)
        run = ask(cache, model, prompt(20), 2200)
        marks = sorted(at for n in cache.trie.nodes() for at in n.marks)
        assert {1024, 2048} < set(marks)
        edited = [*prompt(20), *run.tokens[:1500], 65]
        assert ask(cache, model, edited).cached == 1024


class TestCapturesThatFail:
    @pytest.mark.parametrize("kinds", FAMILIES, ids="+".join)
    @pytest.mark.parametrize("where", ["stack", "compacted", "take", "window_rows", "insert"])
    def test_at_any_moment_lose_no_answer(
        self, kinds: tuple[str, ...], where: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner = {
            "stack": pages,
            "compacted": pages,
            "take": pages.Mark,
            "window_rows": Live,
            "insert": Trie,
        }[where]
        original = getattr(owner, where)
        for fails_at in range(4):
            model = FakeModel(kinds)
            cache = new_cache(model)
            calls = 0

            def fail(*args: object, fails_at: int = fails_at) -> object:
                nonlocal calls
                calls += 1
                if calls == fails_at + 1:
                    raise MemoryError("no room for a copy")
                return original(*args)

            with monkeypatch.context() as patch:
                patch.setattr(owner, where, fail)
                for seed in (0, 1, 0, 2):
                    ids = [*prompt(30), *prompt(60, seed=seed)]
                    with suppress(MemoryError):
                        assert ask(cache, model, ids).tokens == cold(model, ids, 4)
                    cache.check()
            for seed in (0, 1, 2):
                ids = [*prompt(30), *prompt(60, seed=seed)]
                assert ask(cache, model, ids).tokens == cold(model, ids, 4)


class TestCosts:
    def test_rows_that_cost_more_to_read_than_to_compute_are_computed(self) -> None:
        from mlx_jupyter.cache.plan import Rates

        model = FakeModel()
        cache = new_cache(model)
        ask(cache, model, prompt(300))
        ask(cache, model, [*prompt(100), *prompt(200, seed=1)])
        ids = np.array(prompt(300), np.int32)
        cache.rates = Rates(prefill=1e-3, restore=1e-6)
        assert (cache.plan(ids).reused, cache.plan(ids).restored) == (100, 199)
        cache.rates = Rates(prefill=1e-3, restore=2e-3)
        assert (cache.plan(ids).reused, cache.plan(ids).restored) == (100, 0)
        run = ask(cache, model, prompt(300))
        assert run.cached == 100
        assert run.tokens == cold(model, prompt(300), 4)


def test_forgetting_given_up_leaves_keeps_what_their_parent_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = FakeModel()
    cache = new_cache(model)
    for seed in (1, 2):
        ask(cache, model, [*prompt(600), *prompt(50, seed=seed)], 1)
    ask(cache, model, prompt(40, seed=3), 1)
    (parent,) = [n for n in cache.trie.nodes() if n.children]
    for leaf in parent.children.values():
        for page in leaf.pages:
            page.leave()
    monkeypatch.setattr("mlx_jupyter.cache.ghosts.GHOST_TOKENS", 0)
    prune(cache)
    cache.check()
    assert cache.plan(np.array([*prompt(600), 7], np.int32)).cached == 600


class TestBytes:
    def test_rows_are_read_from_the_stacks_without_a_copy(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ask(cache, model, prompt(256))
        ask(cache, model, prompt(256, seed=1))
        page = next(p for n in cache.trie.nodes() for p in n.pages if p.residence == "device")
        whole = mx.get_array_buffer_size(page.stacks[0][0])
        for keys, _ in pages.unstack(page.stacks):
            mx.eval(keys)
            assert mx.get_array_buffer_size(keys) == whole  # a view pins the stack

    def test_live_states_own_no_more_than_themselves(self) -> None:
        model = FakeModel(("state",))
        cache = new_cache(model)
        ask(cache, model, prompt(4000), chunk=4096)
        for leaf in cache.live.leaves.states:
            for array in arrays_in(leaf.cache):
                assert mx.get_array_buffer_size(array) <= array.nbytes + ly.PINNED

    def test_room_is_bounded_however_much_may_be_generated(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ask(cache, model, prompt(10), 1)
        with cache.open(np.array(prompt(20), np.int32), room=10**9):
            pass
        assert max(layer.capacity for layer in cache.live.leaves.rows) <= 20 + 2048 + 512

    def test_a_long_answer_outgrows_its_room(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        run = ask(cache, model, prompt(10), 2600)
        assert run.tokens == cold(model, prompt(10), 2600)
        cache.check()

    def test_a_path_over_the_budget_keeps_what_fits(self) -> None:
        model = FakeModel()
        probe = new_cache(model)
        ask(probe, model, prompt(1000), 1)
        cache = new_cache(model, budget=700 * probe.live.row_bytes())
        for _ in range(2):
            run = ask(cache, model, prompt(1000), 3)
            assert run.tokens == cold(model, prompt(1000), 3)
            assert cache.nbytes() <= cache.budget
            cache.check()
        assert run.cached == 512

    def test_forgotten_prompts_don_t_grow_the_trie_of_any_family(self, model: FakeModel) -> None:
        cache = new_cache(model, budget=500)
        for seed in range(200):
            ask(cache, model, prompt(40, seed=seed), 1, chunk=64)
            cache.check()
        first = sum(1 for _ in cache.trie.nodes())
        for seed in range(200, 400):
            ask(cache, model, prompt(40, seed=seed), 1, chunk=64)
        assert sum(1 for _ in cache.trie.nodes()) <= first + 20

    def test_numbers_of_nodes_are_never_used_again(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ask(cache, model, prompt(30))
        before = {n.id for n in cache.view().nodes()}
        cache.clear()
        ask(cache, model, prompt(30, seed=2))
        assert not before & {n.id for n in cache.view().nodes()}

    def test_a_request_counts_as_one_use(self, model: FakeModel) -> None:
        cache = new_cache(model)
        ask(cache, model, prompt(600), 40)
        assert [n.uses for n in cache.view().nodes()] == [1]


def test_rates_from_a_few_tokens_are_not_believed() -> None:
    model = FakeModel()
    cache = new_cache(model)
    cache.now = iter(range(10**9)).__next__  # every look at the clock is a second later
    ask(cache, model, prompt(300))
    ask(cache, model, [*prompt(250), *prompt(40, seed=1)])
    ask(cache, model, prompt(300))
    assert cache.rates.restore == 0
    cache.rates = type(cache.rates)(prefill=1e-3, restore=1.0, doubts=500)
    for _ in range(200):  # what was once measured is doubted when nothing measures it again
        runs = [ask(cache, model, prompt(600, seed=seed), 1) for seed in (3, 4)]
        if any(run.cached > 500 for run in runs):
            break
    else:
        pytest.fail("never read in again")
