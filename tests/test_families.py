"""The prefix cache on a tiny model of every mlx-lm family: warm logits must equal cold ones.

The reference of each run is one uncut pass of a fresh mlx-lm cache over the same tokens, so what
is compared doesn't depend on how a prompt was cut, restored or generated.
"""

from __future__ import annotations

import copy
import random
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import make_prompt_cache

from driver import (  # noqa: F401 - one is a fixture
    CHUNK,
    Bench,
    Watched,
    built,
    next_prompt,
    prompt,
    torn,
    uncompiled,
)
from mlx_jupyter.cache.arrays import arrays_in
from tiny_models import (
    FAMILIES,
    NOT_BUILT,
    VOCAB,
    WINDOW,
    cache_classes,
    leaves,
)

if TYPE_CHECKING:
    from mlx_jupyter.engine.pipeline import Run

WINDOWED = [name for name, family in FAMILIES.items() if family.window]


class TestTheModels:
    def test_every_module_that_makes_caches_is_built_or_explained(self) -> None:
        folder = Path(mlx_lm.__file__).parent / "models"
        makes = {p.stem for p in folder.glob("*.py") if "def make_cache" in p.read_text()}
        built = {family.arch for family in FAMILIES.values()}
        assert makes - built == set(NOT_BUILT)

    @pytest.mark.parametrize("name", FAMILIES)
    def test_logits_are_spread_and_answers_vary(self, name: str) -> None:
        model = Watched(name)
        cache = model.make_cache()
        logits = model.cold(prompt(40), cache)
        assert np.ptp(logits[-1]) > 4
        answer = []
        for _ in range(12):
            answer.append(int(logits[-1].argmax()))
            logits = model.cold(answer[-1:], cache)
        assert len(set(answer)) >= 3

    @pytest.mark.parametrize("name", FAMILIES)
    def test_an_early_token_is_remembered(self, name: str) -> None:
        ids = prompt(48)
        edited = [*ids[:3], (ids[3] + 1) % VOCAB, *ids[4:]]
        model = Watched(name)
        assert np.abs(model.cold(ids)[-1] - model.cold(edited)[-1]).max() > 1e-2

    @pytest.mark.parametrize("name", FAMILIES)
    def test_every_layers_content_matters(self, name: str) -> None:
        model = Watched(name)
        cache = model.make_cache()
        model.cold(prompt(49), cache)
        right = model.cold([7], copy.deepcopy(cache))[-1]
        for index in range(len(list(leaves(cache)))):
            harmed = copy.deepcopy(cache)
            _roll(list(leaves(harmed))[index])
            off = np.abs(model.cold([7], harmed)[-1] - right).max()
            assert off >= 1e-3, (index, off)


def _roll(leaf: Any) -> None:
    """Shift one leaf's content by one: rows of K, a state's last axis."""

    def shifted(array: mx.array, axis: int, end: int | None = None) -> mx.array:
        end = array.shape[axis] if end is None else min(end, array.shape[axis])
        kept, rest = mx.split(array, [end], axis=axis)
        return mx.concatenate([mx.roll(kept, 1, axis=axis), rest], axis=axis)

    if isinstance(leaf, mlx_caches.ArraysCache):
        leaf.cache = [a if a is None else shifted(a, a.ndim - 1) for a in leaf.cache]
    elif hasattr(leaf, "keys"):
        end = leaf.offset - getattr(leaf, "start_position", 0)
        leaf.keys = tree_map(lambda a: shifted(a, 2, end), leaf.keys)
    else:
        leaf.window = shifted(leaf.window, 1)


@pytest.mark.parametrize("name", FAMILIES)
class TestStories:
    @pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
    def test_any_story_equals_cold_runs(self, name: str, tight: bool) -> None:
        """Run, repeat, continue, retry, branch, edit, switch; cancel, fail, evict in between."""
        dice = random.Random(f"{name} {tight}")
        bench = Bench(name)
        first = prompt(60, dice.randrange(1 << 30))
        known = [[*first, *bench.ask(first, 3).tokens]]
        prompts = [first]
        if tight:
            bench.cache.budget = int(1.6 * bench.cache.live.nbytes())
            bench.cache.evict()
        for turn in range(8):
            ids = next_prompt(dice, prompts, known)
            marks = [(at, "turn") for at in (len(ids) // 2, len(ids) - 4) if at > 0]
            match dice.choice(["run", "run", "run", "cancel", "fail", "evict some", "evict"]):
                case "cancel":
                    cut_short = bench.cancelled(ids, dice.randrange(8))
                    known.append([*ids, *cut_short.tokens])
                case "fail":
                    self._failed(bench, ids, dice.randrange(30))
                case "evict some":
                    bench.cache.evict(bench.cache.stored_bytes() // 2)
                case "evict":
                    bench.cache.evict()
            bench.audit()
            run = bench.ask(ids, dice.randint(1, 6), marks=marks, owner=f"cell {turn % 4}")
            assert run.finish == "length"
            prompts.append(ids)
            known.append([*ids, *run.tokens])

    @pytest.mark.parametrize("at", [0, 1, 3, 4])
    def test_cancelled_at_a_call_and_asked_again(self, name: str, at: int) -> None:
        bench = Bench(name)
        ids = prompt(40, at)
        bench.cancelled(ids, at)
        again = bench.ask(ids, 3)
        if at and all(c == "KVCache" for c in cache_classes(bench.model.model)):
            assert again.cached >= min(CHUNK * (at + 1), 39) - CHUNK

    @pytest.mark.parametrize("at", [1, 5, 23])
    def test_torn_in_the_middle_of_a_step_and_asked_again(self, name: str, at: int) -> None:
        bench = Bench(name)
        ids = prompt(40, at)
        bench.ask(ids[:20], 1, verify=False)
        self._failed(bench, ids, at)
        bench.ask(ids, 3)
        bench.ask([*ids[:25], *prompt(4, 1)], 1)

    @staticmethod
    def _failed(bench: Bench, ids: list[int], at: int) -> None:
        with torn(at):
            try:
                bench.ask(ids, 6, verify=False)
            except RuntimeError as error:
                assert str(error) == "boom"  # noqa: PT017 - it may also end before the failure
        bench.audit()


@pytest.mark.parametrize("name", WINDOWED)
class TestWindows:
    def test_prompts_around_the_window(self, name: str) -> None:
        bench = Bench(name)
        for n in (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW):
            ids = prompt(n, n)
            bench.ask(ids, 3)
            bench.ask(ids, 1)
            bench.ask([*ids[:-3], *prompt(2, n + 1)], 2)

    def test_rewound_after_the_ring_has_wrapped(self, name: str) -> None:
        bench = Bench(name)
        ids = prompt(2 * WINDOW + 5)
        run = bench.ask(ids, WINDOW + 9)  # decoding alone goes round the ring once
        whole = [*ids, *run.tokens]
        for at in (len(whole) - 2, len(ids) + 3, len(ids), 2 * WINDOW, WINDOW + 1, WINDOW, 7):
            bench.ask([*whole[:at], *prompt(3, at)], 2, marks=[(at, "turn")])
        bench.ask([*whole, 5], 2)

    def test_window_rows_that_no_place_needs_are_given_up(self, name: str) -> None:
        bench = Bench(name)
        first = prompt(300)
        answer = bench.ask(first, 2, verify=False).tokens
        bench.ask([*first, *answer, *prompt(10, 1)], 2)
        strips = [s for n in bench.cache.trie.nodes() for s in n.strips]
        assert sum(s.end - s.start for s in strips) <= 2 * WINDOW + 3 * CHUNK


@pytest.mark.parametrize("name", FAMILIES)
class TestConversations:
    def test_twenty_turns_within_a_budget(self, name: str) -> None:
        """Bytes stay within what the last turns need, and the tip is still there at the end."""
        bench = Bench(name)
        history = prompt(20)
        bench.ask(prompt(200), 1, verify=False)
        bench.cache.budget = int(1.5 * bench.cache.live.nbytes())
        bench.cache.evict()
        for turn in range(20):
            run = bench.ask(history, 2, owner="@a", verify=turn % 10 == 9)
            history = [*history, *run.tokens, *prompt(5, turn)]
        tip = bench.ask(history, 1)
        assert tip.computed <= 5 + 1 + 16

    def test_a_second_turn_whose_template_replaces_the_generation_tail(self, name: str) -> None:
        bench = Bench(name)
        system, question, tail = prompt(30, 1), prompt(25, 2), prompt(3, 3)
        first = [*system, *question, *tail]
        run = bench.ask(first, 5, marks=[(30, "system"), (55, "prompt")])
        new = [*prompt(2, 4), *run.tokens, *prompt(12, 5)]  # another tail, then the answer
        second = [*system, *question, *new, *tail]
        marks = [(30, "system"), (55, "turn"), (len(second) - 3, "prompt")]
        run = bench.ask(second, 3, marks=marks)
        assert run.computed <= len(new) + len(tail) + 16


@pytest.mark.parametrize("name", FAMILIES)
def test_a_restore_is_lossless(name: str) -> None:
    """Switched away and back, a run's logits are bit for bit those of a cold run cut alike."""
    bench = Bench(name)
    ids = prompt(75)
    step = bench.model.family.chunk or CHUNK
    cold = bench.model.make_cache()
    cuts = [*range(0, len(ids) - 1, step), len(ids) - 1, len(ids)]
    for a, b in pairwise(cuts):
        right = np.array(bench.model.model(mx.array([ids[a:b]]), cache=cold)[0, -1])
    bench.ask(ids, 2)
    for seed in (1, 2):
        bench.ask(prompt(40, seed), 2, verify=False)
        assert bench.ask(ids, 2).computed == 1
        warm = np.array(bench.model.seen[0][0, -1])
        if (
            bench.model.family.chunk == 1
        ):  # a ring that was filled by single steps has another order
            assert np.abs(warm - right).max() <= bench.model.family.tolerance * np.abs(right).max()
        else:
            assert np.array_equal(warm, right)


class TestBytes:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_a_snapshot_is_as_large_as_its_states(self, name: str) -> None:
        """Live states are views of a whole step's activations, which must not be kept."""
        bench = Bench(name)
        ids = prompt(130)
        bench.ask(ids, 2, marks=[(100, "turn")], chunk=100, verify=False)
        bench.ask(prompt(60, 1), 1, verify=False)  # the tip's states are stored now, too
        cold = bench.model.make_cache()
        bench.model.cold(ids[:100], cold)
        own = [leaf.cache for leaf in leaves(cold) if isinstance(leaf, mlx_caches.ArraysCache)]
        marks = [m for n in bench.cache.trie.nodes() for m in n.marks.values() if m.states]
        assert len(marks) == (4 if kind(name) == "state" else 0)
        if name != "deepseek_v41":  # its snapshots grow with what they cover
            for mark in marks:
                assert _nbytes([s.cache for s in mark.states]) == _nbytes(own)
        for mark in marks:
            arrays = arrays_in(mark.states)
            assert mark.nbytes <= _nbytes([arrays]) + SLACK * len(arrays)


SLACK = 8192
"""Bytes by which MLX's allocator may round one buffer up."""


def _nbytes(arrays: Any) -> int:
    return sum(a.nbytes for _, a in tree_flatten(arrays) if isinstance(a, mx.array))


# --- how much is reused -----------------------------------------------------------------------

KIND = {
    "KVCache": "rows",
    "QuantizedKVCache": "rows",
    "ConcatenateKVCache": "rows",
    "RotatingKVCache": "window",
    "ChunkedKVCache": "window",
}
"""What the cache takes each class for; any other is a state that comes back at snapshots only."""

SYSTEM, TURN, TAIL = 40, 80, 3
"""The first prompt: a system text to 40, a question to 80, a generation tail of 3."""

ANSWER = 6

EXPECTED_REUSE: dict[str, dict[str, int]] = {
    "continue": {"rows": 88, "window": 88, "state": 88},
    "retry": {"rows": 82, "window": 82, "state": 82},
    "edit in the last turn": {"rows": 60, "window": 60, "state": SYSTEM},
    "branch at an old turn": {"rows": 83, "window": 83, "state": 82},
    "another question": {"rows": SYSTEM, "window": SYSTEM, "state": SYSTEM},
    "tail replaced": {"rows": TURN, "window": TURN, "state": TURN},
}
"""Tokens reused by each scenario, by the least able kind of layer in the model."""


def kind(name: str) -> str:
    """The least able kind of layer in a family's cache."""
    kinds = {KIND.get(type(c).__name__, "state") for c in leaves(make_prompt_cache(built(name)))}
    return next(k for k in ("state", "window", "rows") if k in kinds)


def last_request(name: str, scenario: str) -> tuple[Run, int]:
    """The scenario's last request, and how many of its tokens were never seen before."""
    bench = Bench(name)
    marks = [(SYSTEM, "system"), (TURN, "prompt")]
    first = prompt(TURN + TAIL)
    answer = bench.ask(first, ANSWER, marks=marks, verify=False).tokens
    new = prompt(9, 77)
    assert new[0] != answer[0]
    longer = [*first, *answer, *new]
    match scenario:
        case "continue":
            asked = longer
        case "retry":
            bench.ask(longer, 2, verify=False)
            asked = first
        case "edit in the last turn":
            asked = [*first[:60], (first[60] + 1) % VOCAB, *first[61:]]
        case "branch at an old turn":
            bench.ask(longer, 2, verify=False)
            asked = [*first, *new]
        case "another question":
            asked = [*first[:SYSTEM], (first[SYSTEM] + 1) % VOCAB, *new]
        case _:
            asked = [*first[:TURN], (first[TURN] + 1) % VOCAB, *answer, *new]
    known = bench.cache.match(np.array(asked, np.int32)).known
    return bench.ask(asked, 2, verify=False), len(asked) - known


@pytest.mark.parametrize("scenario", EXPECTED_REUSE)
@pytest.mark.parametrize("name", FAMILIES)
def test_reuse(name: str, scenario: str) -> None:
    run, _ = last_request(name, scenario)
    assert run.cached == EXPECTED_REUSE[scenario][kind(name)]
