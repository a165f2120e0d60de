"""Exactness mode: what a warm run computes is bit-equal to a cold replay of the same passes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from driver import ask, new_cache
from fakes import FakeModel
from mlx_jupyter.cache import exact
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.verify import verify
from mlx_jupyter.errors import BadRequest, Interrupted
from test_families import Watched
from tiny_models import FAMILIES, VOCAB, build

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHUNK = 16


@pytest.fixture(autouse=True, scope="module")
def _uncompiled() -> Iterator[None]:
    """Without MLX's compiler: it would call g++ for seconds in each family."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def letters(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=n)


def replayed(model: Any, ids: Sequence[int], ends: Sequence[int]) -> np.ndarray:
    """Logits after the last token of a fresh cache that is led through the same passes."""
    cache = make_prompt_cache(model)
    at = 0
    for end in ends:
        logits = model(mx.array([ids[at:end]]), cache=cache)
        mx.eval(logits, [c.state for c in cache])
        at = end
    assert at == len(ids)
    return np.array(logits[0, -1].astype(mx.float32))


def passes_of(cache: Any, ids: Sequence[int]) -> list[int]:
    path = cache.path_to(np.array(ids, np.int32))
    return exact.places(exact.flags(path, len(ids))).tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_warm_runs_are_bit_equal_to_a_replay_of_their_passes(name: str) -> None:
    rng = random.Random(name)
    watched = Watched(name)
    cache = new_cache(watched)
    cache.exact = True
    base = letters(70, 1)
    known: list[list[int]] = []
    restored = 0
    for turn in range(10):
        if known and rng.random() < 0.8:
            old = rng.choice(known)
            ids = old[: rng.randint(len(old) // 2, len(old))] + letters(rng.randint(0, 25), turn)
        else:
            ids = base + letters(rng.randint(1, 30), turn)
        chunk = watched.family.chunk or CHUNK
        run = ask(cache, watched, ids, rng.choice([1, 5, 40]), chunk=chunk, owner=str(turn % 3))
        cache.check()
        restored += run.cached
        whole = ids + run.tokens
        fed = whole[: cache.live.offset]
        ends = passes_of(cache, fed)
        assert ends[-1] == len(fed)
        warm = np.array(watched.seen[-1][0, -1].astype(mx.float32))
        assert np.array_equal(warm, replayed(watched.model, fed, ends)), (turn, run.cached)
        known.append(whole)
    assert restored > 100


def story(name: str) -> list[bool]:
    """For each of a few forks and reruns whether it was bit-equal to a replay of its passes."""
    rng = random.Random(name)
    watched = Watched(name)
    cache = new_cache(watched)
    cache.exact = True
    first = letters(90, 2)
    known = [first + ask(cache, watched, first, 45, chunk=CHUNK).tokens]
    same = []
    for turn in range(12):
        old = rng.choice(known)
        ids = old[: rng.randint(70, len(old))] + letters(rng.choice([0, 0, 4, 9]), turn)
        run = ask(cache, watched, ids, 3, chunk=CHUNK)
        fed = (ids + run.tokens)[: cache.live.offset]
        warm = np.array(watched.seen[-1][0, -1].astype(mx.float32))
        same.append(np.array_equal(warm, replayed(watched.model, fed, passes_of(cache, fed))))
        known.append(ids + run.tokens)
    return same


class TestTheTestNotices:
    def test_what_is_right(self) -> None:
        assert all(story("llama"))
        assert all(story("gemma3_text"))

    def test_rows_of_another_pass(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def forgetful(path: Any, passes: Any, start: int) -> Any:
            for node in path:
                node.ends[: len(passes) - node.start] = passes[node.start : node.end]
            return lambda at: True

        monkeypatch.setattr(exact, "note", forgetful)
        assert not all(story("llama"))

    def test_a_ring_that_is_not_turned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exact, "turning_since", len)
        assert not all(story("gemma3_text"))


class TestPlaces:
    @pytest.mark.parametrize(
        ("passes", "since"),
        [("", 0), ("1", 0), ("01", 2), ("0111", 2), ("111", 0), ("0101", 4), ("01101", 5)],
    )
    def test_since_when_a_ring_turns(self, passes: str, since: int) -> None:
        flags = np.array([c == "1" for c in passes], np.bool_)
        assert exact.turning_since(flags) == since

    def test_a_match_is_rounded_down_to_where_a_pass_ended(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        cache.exact = True
        ids = letters(100, 3)
        ask(cache, model, ids, 2, chunk=16)
        plan = cache.plan(np.array([*ids[:60], 1, 2, 3], np.int32))
        assert plan.cached == 48
        assert [(c.code, c.at, c.tokens) for c in plan.why] == [
            ("exact", 48, 12),
            ("diverged", 60, 3),
        ]
        cache.exact = False
        assert cache.plan(np.array([*ids[:60], 1, 2, 3], np.int32)).cached == 60

    def test_switching_it_on_computes_once_more_what_was_there(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ids = letters(100, 3)
        ask(cache, model, ids, 2)
        cache.exact = True
        assert ask(cache, model, ids, 2).cached == 0
        assert ask(cache, model, ids, 2).cached == 99
        cache.check()

    def test_of_two_that_part_within_a_pass_the_later_one_stays_whole(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        cache.exact = True
        a, b = [*letters(40, 4), 7, *letters(40, 5)], [*letters(40, 4), 8, *letters(40, 6)]
        ask(cache, model, a, 2)
        assert ask(cache, model, b, 2).cached == 32
        assert cache.plan(np.array(b, np.int32)).cached == len(b) - 1
        assert cache.plan(np.array(a, np.int32)).cached == 32

    def test_chunked_layers_go_on_only_in_place(self) -> None:
        name = "llama4"
        watched = Watched(name)
        cache = new_cache(watched)
        cache.exact = True
        ids = letters(50, 1)
        run = ask(cache, watched, ids, 4, chunk=watched.family.chunk or CHUNK)
        longer = np.array([*ids, *run.tokens, 5, 6], np.int32)
        assert cache.plan(longer).cached == cache.live.offset
        assert cache.plan(longer[:30]).cached == 0


class TestVerify:
    @pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
    def test_exact_hits_are_bit_equal(self, name: str) -> None:
        with Engine(build(name), exact=True) as engine:
            first = engine.generate(tokens=letters(300, 1), max_tokens=40)
            again = [*first.prompt_ids, *first.tokens, 3, 4, 5]
            engine.generate(tokens=again, max_tokens=4)
            engine.generate(tokens=[*letters(200, 1), 9, 9], max_tokens=4)
            for seed in range(4):
                found = engine.verify(seed=seed)
                assert found.equal
                assert found.same_passes
                assert found.cached
            engine.check()

    def test_without_it_hits_agree_to_a_few_roundings(self) -> None:
        with Engine(build("llama")) as engine:
            engine.generate(tokens=letters(300, 1), max_tokens=40)
            engine.generate(tokens=[*letters(210, 1), 9, 9], max_tokens=4)
            found = engine.verify(seed=1)
            assert not found.same_passes
            assert found.largest <= 2e-5 * found.scale
            assert f"of {found.tokens:,} tokens" in str(found)

    def test_it_finds_a_swapped_row(self) -> None:
        with Engine(FakeModel()) as engine:
            engine.generate(tokens=letters(300, 1), max_tokens=4)
            assert engine.verify(seed=1).equal
            cache = engine._shop._caches["model"]  # to harm it

            def swap() -> None:
                keys = cache.live.layers[0].keys
                keys[..., 3:5, :] = keys[..., 4:2:-1, :]
                mx.eval(keys)

            engine._thread.call(swap)
            assert not engine.verify(seed=1).equal

    def test_nothing_to_verify_is_told(self) -> None:
        with Engine() as engine, pytest.raises(BadRequest, match="not loaded"):
            engine.verify()
        with Engine(FakeModel()) as engine, pytest.raises(BadRequest, match="cached yet"):
            engine.verify()

    def test_it_can_be_cancelled_between_passes(self) -> None:
        model = FakeModel()
        cache = new_cache(model)
        ids = np.array(letters(100, 1), np.int32)
        ask(cache, model, ids.tolist(), 2)
        asked = iter([False, False, True])
        with pytest.raises(Interrupted):
            verify(cache, model, ids, 16, lambda: next(asked))
        cache.check()
        assert cache.plan(ids).cached == 99
