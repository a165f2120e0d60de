"""The page store through the engine: saved when idle and at the end, found by the next one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from fakes import FakeModel, fake_engine, letters
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.thread import EngineThread
from mlx_jupyter.models.pool import ModelPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Engine]:
    """Makes engines whose fake model has an identity, on one store."""
    monkeypatch.delenv("MLX_JUPYTER_STORE", raising=False)
    monkeypatch.setattr("mlx_jupyter.engine.base.EngineThread", partial(EngineThread, grace=0))
    adopt = ModelPool.adopt

    def known(self: ModelPool, model: Any, tokenizer: Any) -> Any:
        loaded = adopt(self, model, tokenizer)
        loaded.identity = "a fake"
        return loaded

    monkeypatch.setattr(ModelPool, "adopt", known)
    return lambda **options: fake_engine(store=tmp_path / "pages", **options)


PROMPT = list(letters(700))


def test_the_next_engine_starts_warm(kept: Callable[..., Engine]) -> None:
    with kept() as engine:
        first = engine.generate(tokens=PROMPT, max_tokens=5)
        assert first.usage.cached == 0
    with kept() as engine:
        again = engine.generate(tokens=PROMPT, max_tokens=5)
        assert again.tokens == first.tokens
        assert again.usage.cached == len(PROMPT) - 1
        longer = engine.generate(tokens=[*PROMPT, *first.tokens, 3, 4], max_tokens=5)
        assert longer.usage.prefilled <= 3
        engine.check()


def test_another_identity_shares_nothing(
    kept: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept() as engine:
        engine.generate(tokens=PROMPT, max_tokens=5)
    adopt = ModelPool.adopt

    def other(self: ModelPool, model: Any, tokenizer: Any) -> Any:
        loaded = adopt(self, model, tokenizer)
        loaded.identity = "another fake"
        return loaded

    monkeypatch.setattr(ModelPool, "adopt", other)
    with kept() as engine:
        assert engine.generate(tokens=PROMPT, max_tokens=5).usage.cached == 0


def test_pages_are_saved_while_the_engine_is_idle(kept: Callable[..., Engine]) -> None:
    with kept() as engine:
        engine.generate(tokens=PROMPT, max_tokens=5)
        assert engine.settle_store(timeout=30)
        assert engine.status().store.files == 3
        # A second engine beside it, as in another kernel.
        with kept() as beside:
            assert beside.generate(tokens=PROMPT, max_tokens=5).usage.cached == len(PROMPT) - 1


def test_status_says_what_is_kept(kept: Callable[..., Engine], tmp_path: Path) -> None:
    with kept(store_bytes=10_000_000) as engine:
        engine.generate(tokens=PROMPT, max_tokens=5)
        assert engine.settle_store(timeout=30)
        use = engine.status().store
        assert use.place == tmp_path / "pages"
        assert use.budget == 10_000_000
        assert 0 < use.nbytes < 10_000_000
        assert use.models == {"model": use.nbytes}
        assert use.fault == ""
        freed = engine.clear_store()
        assert freed == use.nbytes
        engine.check()
        assert engine.status().store.files == 0


def test_what_left_memory_comes_back_from_disk(kept: Callable[..., Engine]) -> None:
    with kept() as engine:
        answer = engine.generate(tokens=PROMPT, max_tokens=5)
        assert engine.settle_store(timeout=30)
        engine.evict()
        assert {p.residence for n in engine.tree().nodes() for p in n.pages} == {"disk"}
        plan = engine.plan(tokens=PROMPT)
        assert (plan.restored, plan.read, plan.recomputed) == (699, 699, 1)
        again = engine.generate(tokens=PROMPT, max_tokens=5)
        assert again.tokens == answer.tokens
        assert again.usage.cached == 699
        engine.check()


def test_a_cleared_store_is_no_longer_counted_on(kept: Callable[..., Engine]) -> None:
    with kept() as engine:
        answer = engine.generate(tokens=PROMPT, max_tokens=5)
        assert engine.settle_store(timeout=30)
        engine.evict()
        engine.clear_store()
        engine.check()
        again = engine.generate(tokens=PROMPT, max_tokens=5)
        assert again.tokens == answer.tokens
        assert again.usage.cached == 0


def test_without_a_place_nothing_is_kept() -> None:
    with Engine(FakeModel(), store=False) as engine:
        engine.generate(tokens=PROMPT, max_tokens=5)
        assert engine.status().store.place is None
        assert engine.clear_store() == 0
        assert engine.settle_store(timeout=1)
