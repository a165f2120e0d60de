"""Memory on real weights: what requests leave behind, what a budget may be, what errors cost."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest

from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.errors import ComputeError, OutOfMemory
from mlx_jupyter.models import memory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.real
MB = 1 << 20


@pytest.fixture
def clean() -> Iterator[int]:
    """MLX's bytes before the test."""
    gc.collect()
    mx.clear_cache()
    yield mx.get_active_memory()
    gc.collect()
    mx.clear_cache()


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, 40_000, count).tolist()


def test_many_requests_stay_within_weights_and_budget(real_model_dir: Path, clean: int) -> None:
    budget = 40 * MB
    with Engine(cache_bytes=budget) as engine:
        weights = engine.load(str(real_model_dir)).weight_bytes
        most = 0
        for i in range(40):
            engine.generate(
                tokens=[*ids(64, i % 3), *ids(20 + i % 40, i)], max_tokens=2, owner=f"c{i % 9}"
            )
            most = max(most, mx.get_active_memory() + mx.get_cache_memory() - clean)
        engine.check()
        assert engine.status().memory.stored > 0
        assert most <= (weights + budget) * 1.05


def test_the_default_budget_fits_beside_the_weights(real_model_dir: Path, clean: int) -> None:
    del clean
    with Engine() as engine:
        engine.load(str(real_model_dir))
        use = engine.status().memory
        assert memory.LEAST_CACHE <= use.budget <= 0.5 * use.free
        assert use.weights + use.budget < use.limit


def test_an_error_inside_the_model_ends_one_request(
    real_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine() as engine:
        engine.load(str(real_model_dir))
        kind = type(engine._shop.find(None).model)
        call, calls = kind.__call__, []

        def fail_once(self, *args, **kwargs):
            calls.append(1)
            if len(calls) == 2:
                raise ValueError("a layer is broken")
            return call(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__call__", fail_once)
        with pytest.raises(ComputeError, match="a layer is broken"):
            engine.generate(tokens=ids(300, 1), max_tokens=2)
        engine.check()
        assert len(engine.generate(tokens=ids(300, 1), max_tokens=2).tokens) == 2


def test_a_prompt_into_the_limit_fails_clearly_and_the_next_one_works(
    real_model_dir: Path, clean: int
) -> None:
    """The limit leaves room for the rows, but not for the activations of the last chunks."""
    with Engine() as engine:
        weights = engine.load(str(real_model_dir)).weight_bytes
        row = engine._shop.find(None).row_bytes
    count = 1200
    gc.collect()
    mx.clear_cache()
    start = mx.get_active_memory()
    with Engine(memory_limit=start + weights + 200 * MB) as engine:
        engine.load(str(real_model_dir))
        engine._shop.memory_limit = start + weights + row * 1290
        with pytest.raises(OutOfMemory) as caught:
            engine.generate(tokens=ids(count, 2), max_tokens=2)
        assert 0 < caught.value.done < count
        engine.check()
        answer = engine.generate(tokens=ids(100, 3), max_tokens=2)
        assert len(answer.tokens) == 2
        engine.check()
