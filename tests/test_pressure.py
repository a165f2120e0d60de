"""A request that runs into the memory limit: slower, or one clear error; the next one works."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import mlx.core as mx
import pytest

from fakes import FakeModel, cold, fake_engine, letters
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.pressure import SMALLEST, Measured, Pressure
from mlx_jupyter.errors import ComputeError, OutOfMemory
from mlx_jupyter.models import memory
from tiny_models import build

if TYPE_CHECKING:
    from collections.abc import Callable

MB = 1 << 20
SHORT = "[malloc] Unable to allocate 1048576 bytes."


def taken() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(begin, end) of every chunk of a prefill."""
    seen: list[tuple[int, int]] = []
    chunk_end = Pressure.chunk_end

    def watched(self: Pressure, at: int, end: int, chunk: int) -> int:
        found = chunk_end(self, at, end, chunk)
        seen.append((at, found))
        return found

    monkeypatch.setattr(Pressure, "chunk_end", watched)
    return seen


# --- looking ahead ----------------------------------------------------------------------------


def test_what_a_chunk_takes_is_scaled_by_its_length_and_its_place():
    known = Measured(nbytes=1000, tokens=128, end=1024)
    assert known.ahead(128, 1024) == 1000
    assert known.ahead(64, 1024) == 500
    assert known.ahead(128, 2048) == 2000
    assert known.ahead(128, 512) == 1000  # no less than what was seen


def test_before_anything_was_measured_the_estimate_stands_in_or_nothing():
    assert Measured(nbytes=1280, chunk=128).ahead(64, 64) == 640
    assert Measured().ahead(128, 4096) == 0


def test_a_chunk_is_measured_by_mlxs_peak(ends):
    model = build("llama")
    with Engine(model) as engine:
        answer = engine.generate(tokens=[1 + i % 200 for i in range(600)], max_tokens=2)
        used = engine.status().memory
        # The scores of the last full chunk alone: heads × tokens × keys in float32.
        assert used.compute >= 4 * 128 * 512 * 4
        assert answer.peak_bytes >= used.active
        assert engine.status().memory.compute == used.compute


# --- near the limit ---------------------------------------------------------------------------


def prefilled(
    extra: int, count: int, *, before: Callable[[Engine], None] | None = None
) -> tuple[Engine, tuple[int, ...]]:
    """An engine whose arrays may take ``extra`` bytes beside the weights, and a long prompt."""
    model = build("llama")
    engine = Engine(model, memory_limit=taken() + extra)
    if before is not None:
        before(engine)
    return engine, tuple(1 + (i * 7919) % 200 for i in range(count))


def test_near_the_limit_chunks_shrink_and_the_answer_is_the_same(ends):
    engine, ids = prefilled(1 << 40, 2600)
    with engine:
        free = engine.generate(tokens=ids, max_tokens=4)
        most = engine.status().memory.compute
    whole = len(ends)
    ends.clear()
    engine, ids = prefilled(3 * MB + most // 2, 2600)
    with engine:
        tight = engine.generate(tokens=ids, max_tokens=4)
        engine.check()
        assert tight.peak_bytes <= engine._shop.memory_limit
    assert len(ends) > whole
    # Shorter chunks end at multiples of a power of two, as long as the prompt goes on.
    for begin, end in ends[:-1]:
        assert end - begin in (128, 64, 32, 16)
        assert end % (end - begin) == 0
    assert tight.tokens == free.tokens
    assert tight.logprobs == pytest.approx(free.logprobs, abs=1e-3)


def test_into_the_limit_the_error_is_clear_and_the_next_request_works():
    engine, ids = prefilled(2 * MB, 3500)
    with engine:
        with pytest.raises(OutOfMemory) as caught:
            engine.generate(tokens=ids, max_tokens=4, owner="cell")
        error = caught.value
        assert isinstance(error, ComputeError)
        assert 0 < error.done < error.total == 3500
        assert error.needed > error.free
        for part in ("Out of memory after", "of 3,500 prompt tokens", "needs", "are free"):
            assert part in str(error)
        assert "\n" not in str(error)
        engine.check()
        plan = engine.plan(tokens=ids)
        assert 0 < plan.cached <= error.done
        again = engine.generate(tokens=ids[: plan.cached + 8], max_tokens=4)
        assert again.usage.cached == plan.cached
        assert len(again.tokens) == 4
        engine.check()


def test_pages_are_given_up_before_a_request_fails(monkeypatch):
    """Another conversation's pages go, so that this one can finish."""
    model = FakeModel()
    with fake_engine(model) as engine:
        engine.generate(tokens=letters(900, 1), max_tokens=2, owner="other")
        engine.generate(tokens=letters(900, 2), max_tokens=2, owner="cell")
        assert engine.status().memory.stored > 0
        real, spared = memory.free_within, []
        spare = engine._shop._caches["model"].spare

        def free(bound, **how):
            return real(bound, **how) if spared else 0

        def watched(nbytes):
            spared.append(nbytes)
            spare(nbytes)

        monkeypatch.setattr(memory, "free_within", free)
        monkeypatch.setattr(engine._shop._caches["model"], "spare", watched)
        ids = letters(1500, 3)
        answer = engine.generate(tokens=ids, max_tokens=3, owner="cell")
        assert spared
        assert list(answer.tokens) == cold(FakeModel(), ids, 3)
        assert any(p.residence == "gone" for n in engine.tree().nodes() for p in n.pages)
        engine.check()


# --- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("rows", "rows"), ("window", "rows"), ("state", "rows")])
@pytest.mark.parametrize("error", [RuntimeError(SHORT), MemoryError()])
def test_a_refused_allocation_is_tried_once_more(kinds, error):
    model, ids, calls = FakeModel(kinds), letters(700), []

    def refuse_once(count: int) -> None:
        calls.append(count)
        if len(calls) == 4:
            raise error

    with fake_engine(model) as engine:
        model.before_call = refuse_once
        answer = engine.generate(tokens=ids, max_tokens=5)
        model.before_call = None
        assert list(answer.tokens) == cold(FakeModel(kinds), ids, 5)
        assert answer.usage.prompt == len(ids)
        if kinds == ("rows", "rows"):
            assert sum(calls) <= len(ids) + 128 + 5  # from where it was, not from the beginning
        engine.check()


def test_evaluating_that_is_refused_lets_go_of_the_half_made_cache(monkeypatch):
    from mlx_jupyter.cache.session import Session

    settle, calls = Session.settle, []

    def refuse_once(self: Session) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError(SHORT)
        settle(self)

    monkeypatch.setattr(Session, "settle", refuse_once)
    ids = letters(700)
    with fake_engine() as engine:
        answer = engine.generate(tokens=ids, max_tokens=5)
        assert list(answer.tokens) == cold(FakeModel(), ids, 5)
        engine.check()


@pytest.mark.parametrize("after", [2, 9])
def test_what_is_refused_again_is_one_clear_error(after):
    """In the prefill, and once tokens were made: those are kept."""
    model, ids, calls = FakeModel(), letters(700), []

    def refuse(count: int) -> None:
        calls.append(count)
        if len(calls) > after:
            raise RuntimeError(SHORT)

    with fake_engine(model) as engine:
        model.before_call = refuse
        ticket = engine.submit(engine.request(tokens=ids, max_tokens=50))
        assert ticket.wait(60)
        error = ticket.outcome.error
        assert isinstance(error, OutOfMemory)
        assert "Unable to allocate" in str(error)
        assert ticket.outcome.answer.tokens == tuple(
            cold(FakeModel(), ids, 50)[: len(ticket.outcome.answer.tokens)]
        )
        model.before_call = None
        engine.check()
        answer = engine.generate(tokens=ids, max_tokens=5)
        assert list(answer.tokens) == cold(FakeModel(), ids, 5)


def test_other_errors_are_not_tried_again():
    model, calls = FakeModel(), []

    def fail(count: int) -> None:
        calls.append(count)
        raise RuntimeError("shapes don't match")

    with fake_engine(model) as engine:
        model.before_call = fail
        with pytest.raises(ComputeError, match="shapes"):
            engine.generate(tokens=letters(100), max_tokens=1)
    assert len(calls) == 1
    assert SMALLEST & (SMALLEST - 1) == 0  # chunks are halved down to a power of two
