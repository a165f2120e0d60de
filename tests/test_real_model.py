"""The embedded default model through the whole engine: warm equals cold on real weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_jupyter import Conversation
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.request import Token

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real

STORY = (
    "A lighthouse keeper on a small island counts the ships that pass. Every evening he writes "
    "their names into a book, and every morning he reads the names aloud to the gulls. "
) * 6
LOGIT_SCALE = 20.0  # the model's logits spread over about this much


@pytest.fixture(scope="module")
def engine(real_model_dir):
    with Engine() as made:
        made.load(str(real_model_dir))
        yield made


def reference(engine: Engine, ids: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities in one uncut pass, without our pipeline."""

    def work() -> tuple[list[int], list[float]]:
        model = engine._shop.find(None).model
        cache = make_prompt_cache(model)
        logits = model(mx.array([list(ids)]), cache=cache)[:, -1]
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < count:
            scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            token = int(mx.argmax(scores, axis=-1).item())
            tokens.append(token)
            logprobs.append(float(scores[0, token].item()))
            logits = model(mx.array([[token]]), cache=cache)[:, -1]
        return tokens, logprobs

    return engine._thread.call(work)


def test_cold_warm_and_restored_agree(engine: Engine) -> None:
    engine.clear()
    how = {"max_tokens": 6, "stop": ()}
    cold = engine.generate(STORY + "What does he count?", **how)
    warm = engine.generate(STORY + "What does he count?", **how)
    again = engine.generate(STORY + "What does he count?", **how)
    other = engine.generate("Name a colour.", **how)
    restored = engine.generate(STORY + "What does he count?", **how)
    tokens, logprobs = reference(engine, cold.prompt_ids, len(cold.tokens))
    assert list(cold.tokens) == tokens
    assert cold.logprobs == pytest.approx(logprobs, abs=1e-5 * LOGIT_SCALE)
    assert warm.logprobs == again.logprobs  # warm to warm is bit-equal
    assert warm.logprobs == pytest.approx(cold.logprobs, abs=1e-5 * LOGIT_SCALE)
    assert restored.logprobs == warm.logprobs
    assert cold.usage.cached == 0
    assert {warm.usage.prefilled, again.usage.prefilled, restored.usage.prefilled} == {1}
    assert other.usage.cached == 24  # the template's default system prompt
    engine.check()


def test_an_edited_question_recomputes_only_itself(engine: Engine) -> None:
    first = engine.generate(STORY + "Who reads the names?", max_tokens=2)
    second = engine.generate(STORY + "Who hears the names?", max_tokens=6)
    common = next(
        i
        for i, (a, b) in enumerate(zip(first.prompt_ids, second.prompt_ids, strict=False))
        if a != b
    )
    assert second.usage.cached == common
    tokens, logprobs = reference(engine, second.prompt_ids, len(second.tokens))
    assert list(second.tokens) == tokens
    assert second.logprobs == pytest.approx(logprobs, abs=1e-5 * LOGIT_SCALE)


def test_a_conversation_goes_on_from_its_own_ids(engine: Engine) -> None:
    messages: list = [{"role": "user", "content": "Count to five."}]
    for question in ("Go on.", "And backwards?"):
        answer = engine.generate(messages, max_tokens=12)
        messages = [*answer.messages, {"role": "user", "content": question}]
        following = engine.generate(messages, max_tokens=1)
        shared = len(answer.prompt_ids) + len(answer.tokens)
        assert following.prompt_ids[: shared - 1] == (answer.prompt_ids + answer.tokens)[:-1]
        assert following.usage.cached >= shared - 1


def test_an_answer_streams_as_it_is_made(engine: Engine) -> None:
    seen = []
    for event in engine.stream("Write a haiku about rain.", max_tokens=24):
        if isinstance(event, Token):
            seen.append(event.text)
        else:
            last = event
    assert "".join(seen) == last.answer.text
    assert len([piece for piece in seen if piece]) > 5
    assert last.answer.timing.ttft < last.answer.timing.total
    assert last.answer.peak_bytes > 0


def test_an_interrupted_story_continues_from_what_was_computed(engine: Engine) -> None:
    question = STORY + "Tell me more about the gulls."
    ticket = engine.submit(engine.request(question, max_tokens=200))
    for event in ticket.events():
        if isinstance(event, Token):
            ticket.cancel()
    partial = ticket.result()
    assert partial.finish == "cancelled"
    assert partial.tokens
    engine.check()
    whole = engine.generate(question, max_tokens=8)
    assert whole.usage.prefilled == 1
    assert whole.tokens[: len(partial.tokens)] == partial.tokens[:8]


def test_a_kept_conversation_goes_on_in_another_kernel(
    real_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_JUPYTER_HOME", str(tmp_path / "home"))
    how = {"max_tokens": 8, "temperature": 0}
    with Engine() as first:
        first.load(str(real_model_dir))
        chat = Conversation(first, "demo", system=STORY)
        chat.ask("What does he count?", **how)
        chat.save()
        receipt = chat.save(tmp_path / "lighthouse")
        assert receipt.tokens > 200
        wanted = chat.ask("And the gulls?", **how)
    for path in (None, receipt.path):
        with Engine() as second:
            second.load(str(real_model_dir))
            back = Conversation.restore(second, path, "demo")
            answer = back.ask("And the gulls?", **how)
            second.check()
            assert answer.prompt_ids == wanted.prompt_ids
            assert answer.usage == wanted.usage
            assert answer.usage.cached == receipt.tokens
            assert answer.tokens == wanted.tokens
            assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-5 * LOGIT_SCALE)
            assert back.forget().memory > 0
            assert second.tree().root.children == ()
