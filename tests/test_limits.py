"""What bounds the context: a model's files, the user, memory; the smallest wins and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import mlx_jupyter.errors as err
from fakes import FakeModel, fake_engine, letters
from mlx_jupyter.models import limits, memory
from mlx_jupyter.models.limits import Limit

if TYPE_CHECKING:
    from mlx_jupyter.engine.engine import Engine

GEMMA = {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}


class TestStated:
    @pytest.mark.parametrize(
        ("config", "tokens", "origin"),
        [
            # A window is no limit, whatever its size.
            ({"max_position_embeddings": 32768, "sliding_window": 512}, 32768, "max_position"),
            ({"model_type": "gemma2", "sliding_window": 4096}, 8192, "gemma2 by default"),
            # Gemma 3 leaves its length out, or states it with the scaling included.
            ({"model_type": "gemma3", "text_config": GEMMA}, 131072, "gemma3_text by default"),
            ({**GEMMA, "max_position_embeddings": 131072}, 131072, "(max_position_embeddings)"),
            # The newer spelling, flat and by the kind of layer.
            (
                {
                    "max_position_embeddings": 4096,
                    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                },
                8192,
                "rope_scaling",
            ),
            (
                {
                    "max_position_embeddings": 1000,
                    "rope_parameters": {
                        "full_attention": {"rope_type": "yarn", "factor": 4},
                        "sliding_attention": {"rope_type": "default"},
                    },
                },
                4000,
                "rope_scaling",
            ),
            (
                {
                    "max_position_embeddings": 163840,
                    "rope_scaling": {
                        "type": "yarn",
                        "factor": 40,
                        "original_max_position_embeddings": 4096,
                    },
                },
                163840,
                "rope_scaling",
            ),
            ({"model_type": "mamba2"}, limits.UNSTATED, "states none"),
            ({"model_type": "no-such-family"}, limits.UNSTATED, "states none"),
        ],
    )
    def test_the_true_limit_of_a_model(self, config, tokens: int, origin: str) -> None:
        (found,) = limits.stated(config, None)
        assert found.tokens == tokens
        assert origin in found.origin


class TestMemory:
    def test_rows_that_fit(self) -> None:
        told = "memory (1.00 MB for rows of 1.00 kB a token)"
        assert limits.by_memory(1000, 1_000_000) == Limit(768, told)
        assert limits.by_memory(0, 1 << 30) is None  # not known, or no full layers
        least = limits.by_memory(1000, 0)
        assert least is not None
        assert least.tokens == limits.STEP

    def test_memory_bounds_a_request_before_any_compute(self, monkeypatch) -> None:
        calls: list[int] = []
        with fake_engine(FakeModel(before_call=calls.append)) as engine:
            engine.generate(tokens=letters(10), max_tokens=1)  # now the size of a row is known
            (row,) = {m.row_bytes for m in engine._shop._pool._models}
            monkeypatch.setattr("mlx_jupyter.engine.context._free", lambda _: 300 * row)
            engine.clear()
            status = engine.status()
            assert status.context == 256
            assert status.context_origin.startswith("memory (")
            calls.clear()
            with pytest.raises(err.ContextOverflow, match="set by memory") as caught:
                engine.generate(tokens=letters(257))
            assert (caught.value.prompt, caught.value.limit) == (257, 256)
            assert not calls
            some = engine.generate(tokens=letters(250), max_tokens=50)
            assert some.finish == "length"
            engine.check()

    def test_what_caches_can_give_up_counts_as_free(self, monkeypatch) -> None:
        with fake_engine() as engine:
            engine.generate(tokens=letters(600), max_tokens=1)
            use = engine.status().memory
            monkeypatch.setattr(memory, "free_within", lambda *_, **__: 0)
            limit = engine.status().limits[0]
            (row,) = {m.row_bytes for m in engine._shop._pool._models}
            assert limit.tokens == (use.live + use.stored) // row // limits.STEP * limits.STEP

    def test_status_says_it_of_each_model(self) -> None:
        with fake_engine(context=50) as engine:
            assert engine.status().contexts == {"model": Limit(50, limits.OPTION)}
            engine.unload()
            status = engine.status()
            assert (status.context, status.limits, dict(status.contexts)) == (0, (), {})

    def test_a_memory_limit_of_the_users_counts(self) -> None:
        with fake_engine(memory_limit=1) as engine:
            engine.generate(tokens=letters(10), max_tokens=1)
            assert engine.status().context_origin.startswith("memory (")


class TestTheUsers:
    def test_the_engines_and_a_requests(self, engine: Engine) -> None:
        assert engine.context is None
        with pytest.raises(err.ContextOverflow, match="own context option"):
            engine.generate(tokens=letters(9), context=8)
        assert engine.generate(tokens=letters(8), context=10, max_tokens=9).usage.generated == 2
        engine.context = 6
        assert engine.status().limits[0] == Limit(6, limits.OPTION)
        with pytest.raises(err.ContextOverflow, match="context option"):
            engine.generate(tokens=letters(8), context=100)
        engine.context = None
        engine.generate(tokens=letters(8), max_tokens=1)

    @pytest.mark.parametrize("bad", [0, -1, "many", True, 1.5])
    def test_bad_ones(self, engine: Engine, bad) -> None:
        with pytest.raises(err.BadRequest, match="context"):
            engine.context = bad
        with pytest.raises(err.BadRequest, match="context"):
            engine.request("x", context=bad)
        with pytest.raises(err.BadRequest, match="context"):
            fake_engine(context=bad)
