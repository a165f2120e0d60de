"""Filters: two prompts that differ only in what they leave out share everything else."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import pytest

import mlx_jupyter.errors as err
from fake_tokenizer import CHATML, chatml_tokenizer
from fakes import FakeModel, fake_engine
from mlx_jupyter.conversation.answer import Message
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.filters import DEFAULT, Filters, checked_filters
from mlx_jupyter.engine.request import Request
from mlx_jupyter.notebook.footer import footer, plan_line

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch={};"
RULES = "You answer in letters, and in nothing else than letters, whatever you are asked. " * 3
CLOCKED = "{{ 'It is ' + strftime_now('%H:%M') + '. ' }}" + CHATML


def with_header(checksum: str, between: str = "\n") -> str:
    return HEADER.format(checksum) + between + RULES


def left(text: str, role: str = "system") -> str | None:
    """What the filter makes of a message; None when the message goes."""
    request = Request(messages=(Message(role, text), Message("user", "x")))
    kept, _ = Filters().apply(request, "")
    messages = kept.messages or ()
    return messages[0].content if len(messages) == 2 else None


class TestBillingHeader:
    @pytest.mark.parametrize("between", ["\n", "\r\n", "", " "])
    def test_the_header_goes_and_what_follows_stays(self, between: str) -> None:
        assert left(with_header("a1b2c", between)) == RULES

    def test_several_headers_and_a_header_alone(self) -> None:
        assert left(f"{HEADER.format(1)}\n{with_header('2')}") == RULES
        assert left(HEADER.format(1)[:-1] + "\n" + RULES) == RULES
        assert left(HEADER.format(1)) is None  # no system prompt at all is left

    @pytest.mark.parametrize(
        "text",
        [
            f"Be brief.\n{HEADER.format('1')}",
            "x-anthropic-billing-header: is a header that clients send.",
            "y-anthropic-billing-header: cch=1;\nBe brief.",
        ],
    )
    def test_other_texts_stay(self, text: str) -> None:
        assert left(text) == text

    @pytest.mark.parametrize("role", ["user", "assistant", "tool"])
    def test_only_system_text_is_touched(self, role: str) -> None:
        assert left(with_header("1"), role) == with_header("1")

    def test_requests_that_differ_only_in_it_share_everything_else(self, engine: Engine) -> None:
        """Case 8."""
        first = engine.generate("hello", system=with_header("aaaaa"), max_tokens=4)
        plan = engine.plan("hello", system=with_header("bbbbb"))
        second = engine.generate("hello", system=with_header("bbbbb"), max_tokens=4)
        assert plan.recomputed == second.usage.prefilled == 1
        assert second.prompt_ids == first.prompt_ids
        assert second.tokens == first.tokens
        # The caller's own text comes back, and what was left out is told everywhere.
        assert second.messages[0].content == with_header("bbbbb")
        for why in (plan.why, second.why):
            assert sum(cause.tokens for cause in why) == 1
            (told,) = [cause for cause in why if cause.code == "filtered"]
            assert (told.message, told.was) == (1, HEADER.format("bbbbb"))
        words = "left out of the system prompt: 'x-anthropic-billing-header: "
        assert words in footer(second)
        assert words in plan_line(plan)
        assert "billing-header" in plan_line(plan)

    def test_in_a_users_message_it_is_text(self, engine: Engine) -> None:
        answers = [engine.generate(with_header(c), max_tokens=1) for c in ("aaaaa", "bbbbb")]
        assert answers[0].prompt_ids != answers[1].prompt_ids
        assert not [c for a in answers for c in a.why if c.code == "filtered"]

    def test_turned_off_it_costs_and_is_not_told(self) -> None:
        with fake_engine(filters=()) as engine:
            for checksum in ("aaaaa", "bbbbb"):
                answer = engine.generate("hello", system=with_header(checksum), max_tokens=1)
            assert answer.usage.prefilled > 200
            assert not [c for c in answer.why if c.code == "filtered"]
            engine.filters = ["billing-header"]
            assert engine.filters == DEFAULT
            engine.generate("hello", system=with_header("ccccc"), max_tokens=1)
            warm = engine.generate("hello", system=with_header("ddddd"), max_tokens=1)
            assert warm.usage.prefilled == 1

    def test_raw_and_token_prompts_are_left_alone(self, engine: Engine) -> None:
        text = with_header("1")
        answer = engine.generate(text, raw=True, max_tokens=1)
        assert bytes(answer.prompt_ids).decode() == text

    @pytest.mark.real
    def test_the_real_template(self, real_model_dir: Path) -> None:
        with Engine() as engine:
            engine.load(str(real_model_dir))
            for checksum in ("aaaaa", "0f3c9"):
                answer = engine.generate("Hi.", system=with_header(checksum), max_tokens=2)
            assert answer.usage.prefilled == 1
            plain = engine.generate("Hi.", system=RULES, max_tokens=2)
            assert plain.usage.prefilled == 1
            user = [engine.generate(with_header(c), max_tokens=1) for c in ("aaaaa", "0f3c9")]
            assert user[1].usage.prefilled > 1


class TestClock:
    def test_a_template_with_a_clock_costs_all_behind_it(self, monkeypatch) -> None:
        """Case 9, in the template: 61 s later; the filter makes it stand still."""
        tokenizer = chatml_tokenizer(CLOCKED, ("<|im_start|>", "<|im_end|>"))
        told = iter([datetime(2026, 1, 1, 9, 31, 0), datetime(2026, 1, 1, 9, 32, 1)] * 4)
        now = next(told)

        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return now

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
        with Engine(FakeModel(), tokenizer) as engine:
            (fault,) = engine.models()[0].template_faults
            assert "every minute" in fault
            engine.generate("hello " * 30, max_tokens=1, owner="cell")
            now = next(told)
            later = engine.generate("hello " * 30, max_tokens=1, owner="cell")
            assert later.usage.prefilled > 180
            assert "a clock in the template's own text changes: '09:31' → '09:32'" in footer(later)
            engine.filters = [*DEFAULT, "frozen-clock"]
            for moment in (datetime(2026, 1, 1, 10, 0), datetime(2026, 1, 2, 11, 1)):
                now = moment
                still = engine.generate("hello " * 30, max_tokens=1, owner="cell")
            assert still.usage.prefilled == 1
            assert "the template's clock stands still at " in footer(still)

    def test_a_clock_in_the_system_prompt_is_warned_of_with_its_cost(self, engine: Engine) -> None:
        """Case 9: the varying token and what it costs; no filter touches it."""
        system = "It is {}. " + RULES
        engine.filters = ["billing-header", "frozen-clock"]
        engine.generate("hello", system=system.format("09:31"), max_tokens=1, owner="c")
        answer = engine.generate("hello", system=system.format("09:32"), max_tokens=1, owner="c")
        cost = answer.usage.prefilled
        assert cost > 200
        found = footer(answer)
        assert "tokens read again: a clock in the system prompt changes: '09:31' → '09:32'" in found
        (cause,) = [c for c in answer.why if c.code == "volatile"]
        assert cause.tokens > 200
        assert answer.messages[0].content == system.format("09:32")

    def test_a_template_without_a_clock_is_not_spoken_of(self, engine: Engine) -> None:
        engine.filters = ["frozen-clock"]
        answer = engine.generate("hello", max_tokens=1)
        assert not [c for c in answer.why if c.code == "filtered"]


@pytest.mark.parametrize("bad", ["billing-header", ["no-such"], [1], [None]])
def test_filters_that_are_none(engine: Engine, bad) -> None:
    with pytest.raises(err.BadRequest, match="filter"):
        engine.filters = bad
    with pytest.raises(err.BadRequest, match="filter"):
        fake_engine(filters=bad)
    assert checked_filters(["frozen-clock", "frozen-clock"]) == ("frozen-clock",)
