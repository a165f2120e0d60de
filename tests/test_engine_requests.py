"""What a request may say: sampling options, prompts, ids; what is refused, and in which words."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import mlx_jupyter.errors as err
from fakes import cold, fake_engine, letters
from mlx_jupyter.engine.options import DEFAULTS, Options
from mlx_jupyter.engine.request import Request
from mlx_jupyter.engine.sampling import PENALTY_WINDOW, Sampling
from probes import HANG


class TestSampling:
    def test_a_seed_gives_the_same_tokens_with_and_without_cache(self, engine) -> None:
        how = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3, "max_tokens": 20}
        first = engine.generate("draw", seed=7, **how)
        engine.generate("something else", temperature=1.0, max_tokens=3)
        warm = engine.generate("draw", seed=7, **how)
        engine.clear()
        again = engine.generate("draw", seed=7, **how)
        other = engine.generate("draw", seed=8, **how)
        assert first.tokens == warm.tokens == again.tokens != other.tokens
        assert warm.usage.cached > 0
        assert again.usage.cached == 0

    def test_without_a_seed_one_is_drawn_and_told(self, engine) -> None:
        first = engine.generate("draw", temperature=1.0, max_tokens=20)
        again = engine.generate("draw", temperature=1.0, max_tokens=20, seed=first.seed)
        assert first.tokens == again.tokens

    def test_temperature_zero_is_greedy(self, engine, model) -> None:
        answer = engine.generate(tokens=letters(9), temperature=0, max_tokens=9)
        assert list(answer.tokens) == cold(model, letters(9), 9)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_p", 2),
            ("top_k", -1), ("top_k", 1.5), ("min_p", -0.1), ("max_tokens", 0),
            ("max_tokens", True), ("seed", -1), ("stop", [""]), ("repetition_penalty", 0),
            ("colour", "red"),
        ],
    )  # fmt: skip
    def test_a_wrong_option_is_one_clear_line(self, engine, name: str, value: object) -> None:
        with pytest.raises(err.BadRequest, match=name) as caught:
            engine.generate("x", **{name: value})
        assert "\n" not in str(caught.value)

    def test_a_range_is_told_whole(self, engine) -> None:
        with pytest.raises(err.BadRequest, match="from 0 to 18446744073709551615"):
            engine.generate("x", seed=2**64)

    def test_numbers_of_numpy_are_numbers(self) -> None:
        options = Options.of(
            max_tokens=np.int64(3), temperature=np.float32(0.5), top_k=np.array(7), top_p=1
        )
        assert options == Options(max_tokens=3, temperature=0.5, top_k=7, top_p=1.0)
        assert {type(options.max_tokens), type(options.top_k)} == {int}
        assert {type(options.temperature), type(options.top_p)} == {float}
        for name in ("max_tokens", "temperature"):
            for value in (np.True_, float("nan"), 1j, "1"):
                with pytest.raises(err.BadRequest, match=name):
                    Options.of(**{name: value})

    def test_the_penaltys_memory_is_bounded(self, engine) -> None:
        sampling = Sampling(replace(DEFAULTS, repetition_penalty=1.2), 0, letters(300))
        for step in range(20):
            token, _ = sampling(mx.random.normal((1, 260)), step)
        assert sampling._recent.size == PENALTY_WINDOW
        assert int(sampling._recent[-1]) == int(token[0])

    def test_top_k_beyond_the_vocabulary_is_all_of_it(self, engine) -> None:
        answer = engine.generate("x", temperature=1.0, top_k=10**6, max_tokens=3)
        assert len(answer.tokens) == 3


class TestBadRequests:
    @pytest.mark.parametrize(
        "how",
        [
            {"prompt": ""}, {"prompt": "  \n "}, {"prompt": []}, {"tokens": []}, {},
            {"prompt": "x", "tokens": [1]}, {"tokens": [-1]}, {"tokens": ["a"]},
            {"prompt": [{"role": "robot", "content": "x"}]}, {"prompt": [1], "raw": True},
            {"tokens": 5}, {"tokens": "ab"}, {"tokens": [1.0]}, {"tokens": [2**31]},
            {"prompt": "x", "model": 5}, {"prompt": "x", "owner": 5}, {"prompt": "x", "label": 5},
            {"prompt": "x", "system": 5}, {"prompt": "x", "stop": 5}, {"prompt": "x", "stop": b"x"},
            {"prompt": "x", "raw": True, "system": "obey"}, {"tokens": [1], "system": "obey"},
            {"tokens": [1], "raw": True}, {"prompt": 5},
        ],
    )  # fmt: skip
    def test_are_refused_and_nothing_is_lost(self, engine, how: dict) -> None:
        kept = engine.generate("kept", max_tokens=2)
        with pytest.raises(err.BadRequest):
            engine.generate(**how)
        assert engine.generate("kept", max_tokens=2).usage.prefilled == 1
        assert kept.text

    @pytest.mark.parametrize(
        "request_",
        [
            Request(), Request(text="x", tokens=(1,)), Request(tokens=(-1,)), Request(text=""),
            Request(tokens=()), Request(messages=()), Request(tokens=np.array([0.5])),
            Request(text="x", options=Options(top_p=7)), Request(text=5),
        ],
    )  # fmt: skip
    def test_made_by_hand_are_refused_too(self, engine, request_: Request) -> None:
        with pytest.raises(err.BadRequest):
            engine.submit(request_)

    def test_ids_of_any_library_are_ids(self, engine) -> None:
        wanted = engine.generate(tokens=[1, 2, 3], max_tokens=2)
        for tokens in (np.array([1, 2, 3]), [np.int32(1), 2, 3], range(1, 4)):
            ticket = engine.submit(Request(tokens=tokens, options=Options(max_tokens=np.int8(2))))
            assert ticket.result(HANG).tokens == wanted.tokens
            assert ticket.result().prompt_ids == (1, 2, 3)
            assert {type(i) for i in ticket.result().prompt_ids} == {int}

    def test_an_id_outside_the_vocabulary(self, model) -> None:
        model.vocab_size = 260
        with fake_engine(model) as engine:
            assert engine.generate(tokens=[259], max_tokens=1).tokens
            with pytest.raises(err.BadRequest, match="Token 260 is outside"):
                engine.generate(tokens=[260])

    def test_the_name_of_a_model_to_load(self, engine) -> None:
        for name in (5, "", None):
            with pytest.raises(err.BadRequest):
                engine.load(name)

    def test_an_unknown_model(self, engine) -> None:
        with pytest.raises(err.ModelNotFound):
            engine.generate("x", model="no-such-model")
        assert engine.generate("x", max_tokens=1).tokens

    def test_without_a_tokenizer_only_tokens_work(self, model) -> None:
        from mlx_jupyter.engine.engine import Engine

        with Engine(model) as engine:
            assert engine.generate(tokens=[1, 2, 3], max_tokens=2).usage.generated == 2
            with pytest.raises(err.BadRequest, match="tokenizer"):
                engine.generate("x")
