"""Random programs of requests against prefix caches: after every step, all that must hold, holds.

A program opens, runs, cancels, fails, forks, reruns, evicts, pins, unpins, releases, clears and
switches the model. Each run is compared with a cold one; each step is followed by ``check`` and by
what one moment can't show (``Desk.verify``). ``PROGRAMS=100`` in the environment makes a hundred
times as many (with ``--timeout=0``).
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from driver import (  # noqa: F401 - one is a fixture
    Bench,
    FakeBench,
    ask,
    new_cache,
    next_prompt,
    prompt,
    torn,
    uncompiled,
)
from fakes import LETTERS, FakeModel, cold, fake_engine, letters
from mlx_jupyter.cache.invariants import check_settled
from mlx_jupyter.models.lazy import evaluate
from tiny_models import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_jupyter.cache.pages import Mark, Page, Strip
    from mlx_jupyter.cache.prefix_cache import PathNode, PrefixCache

MANY = int(os.environ.get("PROGRAMS", "1"))
"""How many times the usual number of programs."""

ROOMY = 1 << 30

KINDS = [
    ("rows", "rows"),
    ("window",),
    ("state",),
    ("rows", "state"),
    ("window", "rows"),
    ("state", "window"),
    ("window", "state", "rows"),
]

STEPS = {
    "run": 30,
    "fork": 10,
    "rerun": 15,
    "cancel": 15,
    "fail": 10,
    "evict": 5,
    "pin": 5,
    "unpin": 5,
    "release": 5,
    "clear": 1,
    "switch": 10,
}
"""What a program may do, and how often."""


class Desk:
    """One bench, and what must be true of its cache by what was done at it.

    Attributes:
        bench: the cache and its model.
        longest: tokens of the longest prompt.
        prompts: what was asked.
        known: prompts with their answers, to go on from.
        last: owner -> what it asked last.
        equal: prompts that were served whole: asked again, they leave one token.
        tips: recorded paths, each of which restores whole.
        pins: owner -> its path and how much of it was there when it was pinned or asked last.
    """

    def __init__(self, bench: Bench, longest: int) -> None:
        self.bench = bench
        self.cache = bench.cache
        self.cache.now = lambda: 0.0  # restoring is free: no plan depends on this machine
        self.longest = longest
        self.roomy = bench.cache.budget == ROOMY
        self.prompts: list[list[int]] = [[65]]
        self.known: list[list[int]] = [[65]]
        self.last: dict[str, list[int]] = {}
        self.equal: set[tuple[int, ...]] = set()
        self.tips: set[tuple[int, ...]] = set()
        self.pins: dict[str, tuple[tuple[int, ...], int]] = {}

    # --- what it does ------------------------------------------------------------------------

    def step(self, act: str, dice: random.Random) -> str:
        """Do one thing; a line that tells what."""
        match act:
            case "run" | "cancel" | "fail":
                ids = next_prompt(dice, self.prompts, self.known)[: self.longest]
                return self._request(act, ids, f"cell {dice.randrange(4)}", dice)
            case "fork":
                base = dice.choice([*self.last.values(), *self.known])
                cut = dice.randint(1, len(base))
                ids = [*base[:cut], *prompt(dice.randint(1, 24), dice.randrange(50))]
                return self._request("run", ids[-self.longest :], f"@{dice.randrange(3)}", dice)
            case "rerun" if self.last:
                owner = dice.choice(sorted(self.last))
                ids = self.last[owner]
                if dice.random() < 0.5:
                    at = dice.randrange(len(ids))
                    ids = [*ids[:at], (ids[at] + 1) % 256, *ids[at + 1 :]]
                return self._request("run", ids, owner, dice)
            case "evict":
                held = self.cache.nbytes()
                nbytes = dice.choice([None, held // 4, held // 2, 1])
                freed = self.cache.evict(nbytes)
                assert freed >= min(held if nbytes is None else nbytes, held) or self.pins
                self.forget()
                return f"evict({nbytes})"
            case "pin" if self.last:
                owner = dice.choice(sorted(self.last))
                self.cache.pin(owner)
                self._note_pin(owner)
                return f"pin({owner!r})"
            case "unpin" if self.pins:
                owner = dice.choice(sorted(self.pins))
                assert self.cache.unpin(owner)
                del self.pins[owner]
                return f"unpin({owner!r})"
            case "release" if self.last.keys() - self.pins.keys():
                owner = dice.choice(sorted(self.last.keys() - self.pins.keys()))
                self.cache.release(owner)
                assert not self.cache.owns(owner)
                return f"release({owner!r})"
            case "clear" if not self.pins:
                self.cache.clear()
                assert self.cache.nbytes() == 0
                self.forget()
                return "clear()"
        return f"no {act}"

    def _request(self, act: str, ids: list[int], owner: str, dice: random.Random) -> str:
        marks = [(at, "turn") for at in (len(ids) // 2, len(ids) - 4) if at > 0]
        count = dice.choice([1, 2, 5, 12, 40]) if self.longest > 200 else dice.randint(1, 6)
        options = {"owner": owner, "marks": marks[: dice.randrange(3)]}
        if dice.random() < 0.2:
            options["think_end"] = (dice.choice(LETTERS),)
        told = f"{act} {len(ids)} tokens for {owner!r}, {count} more, {options}"
        self.prompts.append(ids)
        self.last[owner] = ids
        if act == "cancel":
            at = dice.randrange(10)
            run = self.bench.cancelled(ids, at, count, **options)
            told += f", cancelled at {at}"
        elif act == "fail":
            at = dice.randrange(30)
            self._failing(ids, count, at, options)
            self._note_pin(owner, asked=True)
            return f"{told}, failed at {at}"
        else:
            run = self.bench.ask(ids, count, **options)
            assert run.finish == "length"
        self.known.append([*ids, *run.tokens])
        self._note_pin(owner, asked=True)
        if self.roomy:
            self.tips.add(tuple(self.cache.live.ids))
            if run.finish == "length":
                self.equal.add(tuple(ids))
        return told

    def _failing(self, ids: list[int], count: int, at: int, options: dict) -> None:
        """Ask with an error at a forward pass (fake) or in the middle of one (families)."""
        bench = self.bench

        def boom(_: int) -> None:
            nonlocal at
            at -= 1
            if at < 0:
                raise RuntimeError("boom")

        try:
            if isinstance(bench, FakeBench):
                bench.model.before_call = boom
                bench.ask(ids, count, verify=False, **options)
            else:
                with torn(at):
                    bench.ask(ids, count, verify=False, **options)
        except RuntimeError as error:
            assert str(error) == "boom"  # noqa: PT017 - it may also end before the failure
            if not isinstance(bench, FakeBench):
                self.forget()  # torn layers are let go of, and all that only they held
                for each in self.pins:
                    self._note_pin(each)
        bench.model.before_call = None

    # --- what must be true -------------------------------------------------------------------

    def forget(self) -> None:
        """Something was given up: from now on nothing need be there but what is pinned."""
        self.equal.clear()
        self.tips.clear()

    def _note_pin(self, owner: str, *, asked: bool = False) -> None:
        if asked and owner not in self.pins:
            return
        nodes = [n for n in self.cache.trie.nodes() if owner in n.owners]
        if not nodes:
            self.pins[owner] = ((), 0)
            return
        path = np.concatenate([n.tokens for n in nodes[0].path()])[: nodes[0].owners[owner]]
        self.pins[owner] = (tuple(path.tolist()), self._cached(path.tolist()))

    def _cached(self, path: Sequence[int]) -> int:
        """How much of a path would be there for one who goes on from it."""
        return self.cache.plan(np.array([*path, 0], np.int32)).cached

    def verify(self) -> None:
        """All that must hold between two steps."""
        self.bench.audit()
        for ids in self.equal:
            plan = self.cache.plan(np.array(ids, np.int32))
            assert plan.recomputed == 1, f"{len(ids)} equal tokens: {plan}"
        for tip in self.tips:
            assert self._cached(tip) == len(tip), f"the tip of {len(tip)} tokens is gone"
        for owner, (path, cached) in self.pins.items():
            assert self._cached(path) >= cached, f"{owner!r} was pinned up to {cached}"


Program = list[tuple[str, int]]
"""Steps: what to do, and the seed of how."""


def run_program(desks: Sequence[Desk], program: Program) -> None:
    """Do the steps at the desks; what was done is told when something is wrong."""
    told: list[str] = []
    at = 0
    try:
        for act, seed in program:
            told.append(f"{at}: {act} by {seed}")
            if act == "switch":
                at = (at + 1) % len(desks)
            else:
                told[-1] = f"{at}: {desks[at].step(act, random.Random(seed))}"
            for desk in desks:
                desk.verify()
    except BaseException as error:
        error.add_note("\n".join(["The program:", *told]))
        raise


_WEIGHTED = [act for act, weight in STEPS.items() for _ in range(weight)]


def budget_of(dice: random.Random, make: Callable[[], Bench], longest: int) -> int:
    """Roomy, or so tight that one or two of the longest conversations fit, or none."""
    share = dice.choice([0, 0, 0, 0.5, 1.2, 2.5])
    if not share:
        return ROOMY if dice.random() < 0.9 else 0
    probe = make()
    ask(probe.cache, probe.model, prompt(longest), 2, chunk=longest if longest > 200 else 16)
    return int(share * probe.cache.live.nbytes())


def fake_desk(kinds: tuple[str, ...], dice: random.Random) -> Desk:
    """A desk with a fake model of these kinds."""
    window, chunk = dice.choice([4, 32]), dice.choice([1, 7, 64])
    budget = budget_of(dice, lambda: FakeBench(kinds, window=window), 400)
    return Desk(FakeBench(kinds, budget, window=window, chunk=chunk), 400)


def family_desk(name: str, dice: random.Random) -> Desk:
    """A desk with the tiny model of a family."""
    bench = Bench(name, budget_of(dice, lambda: Bench(name), 100))
    if name == "llama_quantized":
        bench.leeway = 4  # one value rounded to another level is seen in all later logits
    return Desk(bench, 100)


seeds = st.integers(0, 1 << 16)


class TestPrograms:
    @settings(max_examples=150 * MANY, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
        seed=seeds,
        program=st.lists(st.tuples(st.sampled_from(_WEIGHTED), seeds), min_size=4, max_size=16),
    )
    def test_on_the_fake_model(
        self, kinds: tuple[tuple[str, ...], ...], seed: int, program: Program
    ) -> None:
        dice = random.Random(seed)
        run_program([fake_desk(each, dice) for each in kinds], program)

    @pytest.mark.parametrize("seed", range(MANY))
    @pytest.mark.parametrize("name", FAMILIES)
    def test_on_every_family(self, name: str, seed: int) -> None:
        dice = random.Random(f"{name} {seed}")
        desks = [family_desk(each, dice) for each in (name, dice.choice(list(FAMILIES)))]
        program = [(dice.choice(_WEIGHTED), dice.randrange(1 << 16)) for _ in range(12)]
        run_program(desks, program)

    @pytest.mark.parametrize("seed", range(2 * MANY))
    def test_two_models_of_one_engine(self, seed: int) -> None:
        """Asked in turn by name, each has its own tokens, and each cache its budget."""
        dice = random.Random(seed)
        models = {"first": FakeModel(("window", "rows")), "second": FakeModel(("rows", "state"))}
        known: list[tuple[int, ...]] = [letters(30)]
        with fake_engine(FakeModel(), cache_bytes=40_000) as engine:
            for name, model in models.items():
                evaluate(model)
                engine._thread.call(lambda m=model, n=name: _adopt(engine, m, n))
            for _ in range(40):
                name = dice.choice(list(models))
                base = dice.choice(known)
                ids = (*base[: dice.randint(1, len(base))], *letters(9, dice.randrange(20)))
                answer = engine.generate(tokens=ids, model=name, max_tokens=3)
                assert answer.model == name
                assert list(answer.tokens) == cold(models[name], ids, 3)
                known.append((*ids, *answer.tokens)[:400])
                if dice.random() < 0.1:
                    engine.evict(dice.choice([None, 2_000]))
                engine.check()
                for each in models:
                    tree = engine.tree(each)
                    assert tree.live_bytes + tree.stored_bytes <= tree.budget == 40_000


def _adopt(engine: Any, model: FakeModel, name: str) -> None:
    shop = engine._shop
    shop._ready(shop._pool.adopt(model, None, name))


BRANCHES = 20


@pytest.mark.parametrize(
    "kinds", [("rows", "rows"), ("window", "rows"), ("state", "rows")], ids="+".join
)
def test_twenty_unaligned_branches_switched_at_random(kinds: tuple[str, ...]) -> None:
    """Twenty branches of 250 tokens from a prefix of 4,100, 200 switches, a third of their bytes.

    No token is wrong and the budget holds after every call.
    """
    dice = random.Random("+".join(kinds))
    model = FakeModel(kinds)
    prefix = prompt(4100)
    branches = [[*prefix, *prompt(250, seed + 1)] for seed in range(BRANCHES)]
    right = [cold(model, ids, 4) for ids in branches]
    cache = new_cache(model)
    for i, ids in enumerate(branches):
        ask(cache, model, ids, 4, chunk=512, owner=f"@{i}")
    cache.check()
    cache.budget = cache.nbytes() // 3
    cache.evict(cache.nbytes() - cache.budget)
    for _ in range(200):
        i = dice.randrange(BRANCHES)
        run = ask(cache, model, branches[i], 4, chunk=512, owner=f"@{i}", watch=check_settled)
        assert run.tokens == right[i]
        assert cache.nbytes() <= cache.budget
        cache.check()


class Own(KVCache):
    """A class that the cache doesn't know: to it, its rows are a state that knows its offset."""


def _pages(cache: PrefixCache, residence: str = "device") -> list[Page]:
    return [p for n in cache.trie.nodes() for p in n.pages if p.residence == residence]


def _strip(cache: PrefixCache) -> tuple[PathNode, Strip]:
    return next((n, s) for n in cache.trie.nodes() for s in n.strips)


def _mark(cache: PrefixCache) -> tuple[PathNode, Mark]:
    return next((n, m) for n in cache.trie.nodes() for m in n.marks.values() if m.states)


def _holds(thing: Page | Strip, stacks: Any) -> None:
    """Let a thing hold other arrays, and count them."""
    mx.eval(stacks)
    thing.release()
    thing.hold(stacks)


def _move(node: PathNode, mark: Mark, at: int) -> None:
    del node.marks[mark.at]
    mark.at = at
    node.marks[at] = mark


def a_node_starts_late(cache: PrefixCache) -> str:
    next(n for n in cache.trie.nodes() if n.children).start += 1
    return ""


def siblings_start_alike(cache: PrefixCache) -> str:
    inner = next(n for n in cache.trie.nodes() if n.children)
    one, two = list(inner.children.values())[:2]
    two.tokens = np.array([one.tokens[0], *two.tokens[1:]], np.int32)
    return ""


def a_page_ends_outside_its_edge(cache: PrefixCache) -> str:
    _pages(cache)[0].end += 1
    return ""


def strips_overlap(cache: PrefixCache) -> str:
    node, strip = _strip(cache)
    node.strips.insert(0, strip)
    return ""


def a_mark_lies_outside_its_edge(cache: PrefixCache) -> str:
    node, mark = _mark(cache)
    _move(node, mark, node.end + 1)
    return ""


def an_owner_has_two_tips(cache: PrefixCache) -> str:
    one, two = (n for n in list(cache.trie.nodes())[-2:])
    one.owners["@9"], two.owners["@9"] = one.end, two.end
    return "an owner has two tips"


def a_full_layer_is_ahead(cache: PrefixCache) -> str:
    cache.live.leaves.rows[1].cache.offset += 1
    return "a layer stands at"


def a_window_is_behind(cache: PrefixCache) -> str:
    cache.live.leaves.windows[0].cache.offset -= 1
    return "a layer stands at"


def a_state_is_behind(cache: PrefixCache) -> str:
    cache.live.leaves.states[-1].cache.offset -= 1
    return "a layer stands at"


def more_is_recorded_than_computed(cache: PrefixCache) -> str:
    cache.live.ids.append(7)
    return "a layer stands at"


def other_tokens_are_recorded(cache: PrefixCache) -> str:
    cache.live.ids[-1] ^= 1
    return "the live path left the trie"


def a_page_counts_too_much(cache: PrefixCache) -> str:
    _pages(cache)[0].nbytes += 1
    return "counts .* bytes, not"


def a_strip_counts_too_little(cache: PrefixCache) -> str:
    _strip(cache)[1].nbytes -= 1
    return "counts .* bytes, not"


def a_snapshot_counts_nothing(cache: PrefixCache) -> str:
    _mark(cache)[1].nbytes = 0
    return "counts 0 bytes, not"


def the_sum_is_wrong(cache: PrefixCache) -> str:
    _pages(cache)[0].tally.nbytes -= 1
    return "counted, .* stored"


def two_pages_share_their_rows(cache: PrefixCache) -> str:
    one, two = [p for p in _pages(cache) if p.tokens == 92][:2]
    _holds(two, one.stacks)
    return "two stored things share a buffer"


def a_page_is_a_view_of_live_rows(cache: PrefixCache) -> str:
    page = _pages(cache)[0]
    _holds(page, tuple(layer.rows(0, page.tokens) for layer in cache.live.full_layers()))
    return "shares a live buffer"


def a_live_page_holds_rows_of_its_own(cache: PrefixCache) -> str:
    page = _pages(cache, "live")[0]
    rows = [layer.rows(page.start, page.end) for layer in cache.live.full_layers()]
    _holds(page, tuple((mx.array(k), mx.array(v)) for k, v in rows))
    return "rows of 2 layers, not 0"


def a_row_is_missing(cache: PrefixCache) -> str:
    page = _pages(cache)[0]
    _holds(page, tuple(tuple(a[..., 1:, :] for a in arrays) for arrays in page.stacks))
    return "has rows of"


def a_layer_is_missing_in_a_page(cache: PrefixCache) -> str:
    page = _pages(cache)[0]
    _holds(page, tuple(tuple(a[:1] for a in arrays) for arrays in page.stacks))
    return "rows of 1 layers, not 2"


def a_layer_is_missing_in_a_strip(cache: PrefixCache) -> str:
    _, strip = _strip(cache)
    _holds(strip, tuple(tuple(a[:1] for a in arrays) for arrays in strip.stacks))
    return "rows of 1 layers, not 2"


def a_snapshot_lacks_a_layer(cache: PrefixCache) -> str:
    _mark(cache)[1].states.pop()
    return "states missing"


def a_snapshot_was_taken_elsewhere(cache: PrefixCache) -> str:
    _mark(cache)[1].states[-1].offset -= 1
    return "a state of"


def a_live_page_is_given_up(cache: PrefixCache) -> str:
    _pages(cache, "live")[0].residence = "gone"
    return ""


def a_page_off_the_live_path_is_called_live(cache: PrefixCache) -> str:
    _pages(cache)[0].now_live()
    return ""


def the_tips_mark_is_gone(cache: PrefixCache) -> str:
    assert cache.tip is not None
    del cache.path_to(cache.live.id_array())[-1].marks[cache.tip.at]
    return "the tip isn't at"


def the_live_states_have_no_mark(cache: PrefixCache) -> str:
    the_tips_mark_is_gone(cache)
    cache.tip = None
    return "no mark where the live states stand"


def the_tips_mark_lies_before_it(cache: PrefixCache) -> str:
    assert cache.tip is not None
    _move(cache.path_to(cache.live.id_array())[-1], cache.tip, cache.tip.at - 3)
    return "the tip isn't at"


def more_is_held_than_the_budget(cache: PrefixCache) -> str:
    cache.budget = cache.nbytes() - 1
    return "over the budget"


def the_live_cache_alone_is_over_the_budget(cache: PrefixCache) -> str:
    cache.budget = cache.nbytes()
    cache.evict(cache.stored_bytes())
    cache.budget = cache.nbytes() - 1
    return "over the budget"


HARMS = (
    a_node_starts_late,
    siblings_start_alike,
    a_page_ends_outside_its_edge,
    strips_overlap,
    a_mark_lies_outside_its_edge,
    an_owner_has_two_tips,
    a_full_layer_is_ahead,
    a_window_is_behind,
    a_state_is_behind,
    more_is_recorded_than_computed,
    other_tokens_are_recorded,
    a_page_counts_too_much,
    a_strip_counts_too_little,
    a_snapshot_counts_nothing,
    the_sum_is_wrong,
    two_pages_share_their_rows,
    a_page_is_a_view_of_live_rows,
    a_live_page_holds_rows_of_its_own,
    a_row_is_missing,
    a_layer_is_missing_in_a_page,
    a_layer_is_missing_in_a_strip,
    a_snapshot_lacks_a_layer,
    a_snapshot_was_taken_elsewhere,
    a_live_page_is_given_up,
    a_page_off_the_live_path_is_called_live,
    the_tips_mark_is_gone,
    the_live_states_have_no_mark,
    the_tips_mark_lies_before_it,
    more_is_held_than_the_budget,
    the_live_cache_alone_is_over_the_budget,
)


class TestTheCheck:
    """Each invariant, broken by hand, is seen."""

    @pytest.fixture
    def cache(self) -> PrefixCache:
        """Pages, strips and snapshots of several branches; the live cache in the middle of one."""
        model = FakeModel(("rows", "rows", "window", "window", "state", "rows"))
        make = (KVCache, KVCache, *[lambda: RotatingKVCache(32)] * 2, lambda: ArraysCache(2), Own)
        model.make_cache = lambda: [each() for each in make]
        cache = new_cache(model)
        for seed in (1, 2, 1, 3):
            ask(cache, model, [*prompt(300), *prompt(90, seed)], 3, owner=f"@{seed}")
        run = ask(cache, model, [*prompt(300), *prompt(50, 2)], 1, owner="@4")
        assert run.tokens == cold(FakeModel(model.kinds), [*prompt(300), *prompt(50, 2)], 1)
        cache.check()
        return cache

    @pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
    def test_what_is_broken_is_seen(
        self, cache: PrefixCache, harm: Callable[[PrefixCache], str]
    ) -> None:
        told = harm(cache)
        with pytest.raises(AssertionError, match=told or None):
            cache.check()

    def test_a_layer_ahead_is_seen_within_a_session(self, cache: PrefixCache) -> None:
        with cache.open(np.array(prompt(320), np.int32)) as session:
            check_settled(cache)
            session.layers[1].offset += 1
            with pytest.raises(AssertionError, match="a layer stands at"):
                check_settled(cache)
            session.layers[1].offset -= 1
        cache.check()
