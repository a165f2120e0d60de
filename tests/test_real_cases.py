"""Cases 6, 8, 9, 23 and 29 of users' fault reports, on the embedded default model."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pytest

import mlx_jupyter.errors as err
from mlx_jupyter.conversation.answer import Message
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.sampling import Sampling
from mlx_jupyter.notebook.footer import footer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real

REWRITING = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Writes an empty thought before each earlier answer, which wasn't there when it was made."""

RULES = "You are a helpful guide to a small island. You answer in one short sentence. " * 4


@pytest.fixture(scope="module")
def engine(real_model_dir: Path):
    with Engine() as made:
        made.load(str(real_model_dir))
        yield made


def test_a_template_that_rewrites_history_is_named(engine: Engine, monkeypatch) -> None:
    """Case 6: which token differs first, and in which message."""
    tokenizer = engine._shop.find(None).tokenizer
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", REWRITING)
    talk = [Message("user", "Name the gulls' favourite ship.")]
    first = engine.generate(talk, max_tokens=12, owner="six")
    talk = [*first.messages, Message("user", "And why?")]
    second = engine.generate(talk, max_tokens=1, owner="six")
    (cause,) = [c for c in second.why if c.code == "template"]
    assert cause.message == 2
    assert cause.at == len(first.prompt_ids)
    assert "<think>" in cause.now
    assert f"from token {cause.at}" in cause.text


def test_only_a_billing_header_differs(engine: Engine) -> None:
    """Case 8."""
    line = "x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch={};\n"
    for checksum in ("a1b2c", "0f3c9"):
        answer = engine.generate("Hi.", system=line.format(checksum) + RULES, max_tokens=1)
    assert answer.usage.prefilled == 1
    asked = [engine.generate(line.format(c) + "Hi.", max_tokens=1) for c in ("a1b2c", "0f3c9")]
    assert asked[0].prompt_ids != asked[1].prompt_ids


def test_a_clock_is_warned_of_with_what_it_costs(engine: Engine) -> None:
    """Case 9: 61 s apart."""
    then = datetime(2026, 3, 1, 9, 31, 0)
    for now in (then, then + timedelta(seconds=61)):
        system = f"It is {now:%H:%M}. {RULES}"
        answer = engine.generate("Hi.", system=system, max_tokens=1, owner="nine")
    (cause,) = [c for c in answer.why if c.code == "volatile"]
    assert (cause.was, cause.now) == ("09:31", "09:32")
    assert 50 < cause.tokens <= answer.usage.prefilled
    assert f"{cause.tokens} tokens read again: a clock in the system prompt" in footer(answer)


def test_the_context_holds_to_the_token(engine: Engine) -> None:
    """Case 23: one over fails before any compute, the limit itself passes, and decode stops."""
    size = len(engine.generate("Count to three.", max_tokens=1).prompt_ids)
    engine.clear()
    with pytest.raises(err.ContextOverflow) as caught:
        engine.generate("Count to three.", context=size - 1)
    assert (caught.value.prompt, caught.value.limit) == (size, size - 1)
    assert engine.tree().root.children == ()
    full = engine.generate("Count to three.", context=size, max_tokens=8)
    assert (full.finish, full.usage.generated) == ("length", 0)
    some = engine.generate("Count to three.", context=size + 3, max_tokens=8)
    assert (some.finish, some.usage.generated) == ("length", 3)
    over = [7] * (engine.status().context + 1)
    with pytest.raises(err.ContextOverflow, match="max_position_embeddings") as caught:
        engine.generate(tokens=over)
    assert caught.value.prompt == caught.value.limit + 1 == 8193


@pytest.mark.parametrize("where", ["model", "sampler", "template"])
def test_what_raises_inside_ends_one_request_only(engine: Engine, where: str) -> None:
    """Case 29."""
    loaded = engine._shop.find(None)

    def boom(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    with pytest.MonkeyPatch.context() as patch:
        if where == "model":
            patch.setattr(type(loaded.model), "__call__", boom)
        elif where == "sampler":
            patch.setattr(Sampling, "_sample", boom)
        else:
            patch.setattr(loaded.tokenizer._tokenizer, "apply_chat_template", boom, raising=False)
        ticket = engine.submit(engine.request("Say something new.", max_tokens=4))
        with pytest.raises(err.ComputeError, match="boom"):
            ticket.result(120)
        ends = [e for e in ticket.events() if type(e).__name__ in ("Done", "Failed")]
        assert len(ends) == 1
    engine.check()
    assert engine.generate("Say something new.", max_tokens=4).usage.generated == 4
