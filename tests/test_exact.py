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
from test_families import Watched
from tiny_models import FAMILIES, VOCAB

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
