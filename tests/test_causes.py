"""Why tokens are computed again: every reason provoked through an engine, and said right."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_tokenizer import CHATML, bpe_tokenizer, chatml_tokenizer
from fakes import FakeModel, fake_engine, letters
from mlx_jupyter.cache.plan import Cause, CauseCode, Rates
from mlx_jupyter.cache.view import NodeView
from mlx_jupyter.conversation.answer import Message
from mlx_jupyter.engine import asked, causes
from mlx_jupyter.engine.asked import Asking, Memory
from mlx_jupyter.engine.causes import differing
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.request import Request
from mlx_jupyter.engine.volatile import ticking
from mlx_jupyter.notebook.footer import footer, plan_line
from probes import HANG, Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_jupyter.conversation.answer import Answer

TAGS = ("<think>", "</think>", "<|im_start|>", "<|im_end|>")
CONTENT = "message['content']"
THOUGHTS = {  # how a template writes an earlier answer
    "empty thoughts are added": f"'<think>\n\n</think>\n\n' + {CONTENT}",
    "thoughts are dropped": f"{CONTENT}.split('</think>')[-1]",
}
CLOCK = "You are a clock. It is {} now. Be brief, and kind to everybody who asks."


def thinking(written: str, tail: str = "") -> str:
    """A template that writes all answers but the last message's in a way of its own."""
    history = f"({CONTENT} if loop.last or message['role'] != 'assistant' else {written})"
    return CHATML.replace(CONTENT, history).replace("assistant\n' }}", f"assistant\n{tail}' }}}}")


def ask(engine: Engine, *prompt: object, **how: object) -> Answer:
    """One request, whose plan said beforehand what the answer says afterwards."""
    plan = engine.plan(*prompt, **how)
    answer = engine.generate(*prompt, max_tokens=3, **how)
    assert plan.why == answer.why
    assert sum(c.tokens for c in answer.why) == answer.usage.prefilled == plan.recomputed
    assert all(c.tokens > 0 for c in answer.why)
    at = answer.usage.cached
    for cause in answer.why:
        assert cause.at == at
        at += cause.tokens
    return answer


def codes(answer: Answer) -> list[CauseCode]:
    return [cause.code for cause in answer.why]


def add_model(engine: Engine, name: str) -> None:
    """A second model beside the engine's first."""
    shop = engine._shop
    engine._thread.call(
        lambda: shop._ready(shop._pool.adopt(FakeModel(), chatml_tokenizer(), name=name))
    )


# --- the closed list -----------------------------------------------------------------------------


def first(engine: Engine) -> Answer:
    return ask(engine, "hello")


def seed(engine: Engine) -> Answer:
    ask(engine, "hello")
    return ask(engine, "hello")


def extended(engine: Engine) -> Answer:
    talk = ask(engine, "hello").messages
    return ask(engine, [*talk, Message("user", "and then?")])


def diverged(engine: Engine) -> Answer:
    ask(engine, "a red house", owner="cell")
    return ask(engine, "a blue house", owner="cell")


def cost(engine: Engine) -> Answer:
    ask(engine, tokens=letters(300))
    ask(engine, tokens=[*letters(100), *letters(200, 1)])
    cache = engine._shop._caches["model"]
    cache.rates = Rates(prefill=1e-3, restore=2e-3)
    engine._thread.call(engine._shop.publish)
    return ask(engine, tokens=letters(300))


def evicted(engine: Engine) -> Answer:
    ask(engine, tokens=letters(300))
    engine.evict()
    return ask(engine, tokens=letters(300))


def snapshot(_: Engine) -> Answer:
    with fake_engine(FakeModel(("state", "rows"))) as engine:
        ask(engine, tokens=letters(100))
        return ask(engine, tokens=[*letters(60), *letters(40, 1)])


def window(_: Engine) -> Answer:
    with fake_engine(FakeModel(("window", "rows"))) as engine:
        for prompt in (letters(600), letters(600, 5), [*letters(600), *letters(40, 1)]):
            ask(engine, tokens=prompt)
        return ask(engine, tokens=[*letters(560), *letters(40, 1)])


def exact(_: Engine) -> Answer:
    with fake_engine(exact=True) as engine:
        ask(engine, tokens=letters(600))
        return ask(engine, tokens=[*letters(560), *letters(40, 1)])


def model(engine: Engine) -> Answer:
    add_model(engine, "llama-1b")
    ask(engine, "hello", model="model", owner="cell")
    return ask(engine, "hello", model="llama-1b", owner="cell")


def template(_: Engine) -> Answer:
    tokenizer = chatml_tokenizer(thinking(THOUGHTS["empty thoughts are added"]), TAGS)
    with Engine(FakeModel(), tokenizer) as engine:
        return extended(engine)


def volatile(engine: Engine) -> Answer:
    ask(engine, "what is it?", system=CLOCK.format("09:31"))
    return ask(engine, "what is it?", system=CLOCK.format("09:32"))


def filtered(engine: Engine) -> Answer:
    """A line that a client writes anew in each request is left out, and told."""
    header = "x-anthropic-billing-header: cch=1;\n"
    return engine.generate("x", system=header + "Be brief.", max_tokens=1)


PROVOKED: dict[CauseCode, Callable[[Engine], Answer]] = {
    "first": first,
    "diverged": diverged,
    "extended": extended,
    "cost": cost,
    "evicted": evicted,
    "snapshot": snapshot,
    "exact": exact,
    "window": window,
    "seed": seed,
    "model": model,
    "template": template,
    "volatile": volatile,
    "filtered": filtered,
}


def test_the_table_is_the_closed_list() -> None:
    assert set(PROVOKED) == set(get_args(CauseCode))


@pytest.mark.parametrize("code", PROVOKED)
def test_every_reason_is_provoked(engine: Engine, code: CauseCode) -> None:
    assert code in codes(PROVOKED[code](engine))


# --- what it says --------------------------------------------------------------------------------


class TestTemplates:
    """Case 6: a template that rewrites history."""

    @pytest.mark.parametrize("how", THOUGHTS)
    def test_case_6_which_token_differs_and_in_which_message(self, how: str) -> None:
        tokenizer = chatml_tokenizer(thinking(THOUGHTS[how]), TAGS)
        answer = Message("assistant", "<think>\nhm\n</think>\n\nfour")
        talk = [Message("user", "two and two?"), answer]
        with Engine(FakeModel(), tokenizer) as engine:
            if how == "empty thoughts are added":
                talk = list(ask(engine, talk[:1], owner="@a").messages)
                said = talk[1].content
                was, now, rendered_anew = "", "<think>\n\n</think>", "<think>\n\n</think>\n\n"
            else:
                ask(engine, talk, owner="@a")
                was, now, rendered_anew = "<think>\nhm\n</think>", "", ""
                said = "\n\nfour"
            later = ask(engine, [*talk, Message("user", "and three?")], owner="@a")
        cause, rest = later.why
        assert (cause.code, cause.message, cause.was, cause.now) == ("template", 2, was, now)
        assert cause.text == (
            f"the template renders message 2 (assistant) otherwise: {was!r} → {now!r}, "
            f"from token {cause.at:,}"
        )
        before = "<|im_start|>user\ntwo and two?<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(later.prompt_ids[: cause.at]) == before
        rendered = tokenizer.decode(later.prompt_ids[cause.at :][: cause.tokens])
        assert rendered == f"{rendered_anew}{said}<|im_end|>\n"
        assert (rest.code, rest.message) == ("extended", 3)

    def test_a_tail_that_history_leaves_out(self) -> None:
        tokenizer = chatml_tokenizer(thinking(CONTENT, "<think>\n"), TAGS)
        with Engine(FakeModel(), tokenizer) as engine:
            later = extended(engine)
        assert codes(later) == ["template", "extended"]
        assert (later.why[0].was, later.why[0].now) == ("<think>", "")

    def test_another_template(self, engine: Engine) -> None:
        ask(engine, "hello there", owner="a")
        tokenizer = engine._shop.find(None).tokenizer
        tokenizer.chat_template = "{{ '<|im_start|>about:\n' }}" + CHATML
        later = ask(engine, "hello there", owner="a")
        assert codes(later) == ["template"]
        assert (later.why[0].was, later.why[0].now) == ("", "about:\n<|im_start|>")
        tokenizer.chat_template = CHATML.replace("assistant\n' }}", "model\n' }}")
        ask(engine, "hello there", owner="a")
        tokenizer.chat_template = CHATML
        last = engine.plan("hello there", owner="a").why[-1]
        assert last.code == "seed"  # what was stored first is stored still
        tokenizer.chat_template = CHATML.replace("assistant\n' }}", "bot\n' }}")
        (cause,) = ask(engine, "hello there", owner="a").why
        assert cause.text.startswith("the template renders the start of the answer otherwise: 'mod")
        assert cause.code == "template"

    def test_the_same_text_in_other_tokens(self) -> None:
        tokenizer = bpe_tokenizer(["the other house " * 9], size=270)
        with Engine(FakeModel(), tokenizer) as engine:
            spelled = tuple(tokenizer.encode("th")) + tuple(tokenizer.encode("e house"))
            talk = [Message("user", "a"), Message("assistant", "the house", spelled)]
            ask(engine, [*talk, Message("user", "b")], owner="@a")
            talk[1] = Message("assistant", "the house")
            later = ask(engine, [*talk, Message("user", "b")], owner="@a")
        (cause,) = later.why
        assert (cause.code, cause.message, cause.was, cause.now) == ("diverged", 2, "", "")
        assert "message 2 (assistant) is the same text in other tokens" in cause.text


class TestClocks:
    """Case 9: a clock in the system prompt."""

    @pytest.mark.parametrize("owners", [("cell", "cell"), (None, None), ("one", "other")])
    def test_case_9_twice_61_seconds_apart(self, engine: Engine, owners: tuple) -> None:
        then = datetime(2026, 3, 1, 9, 31, 7, tzinfo=UTC)
        answers = [
            ask(engine, "what is it?", system=CLOCK.format(f"{now:%H:%M}"), owner=owner)
            for now, owner in zip((then, then + timedelta(seconds=61)), owners, strict=True)
        ]
        (cause,) = answers[1].why
        at = len("|system\n") + CLOCK.index("{") + len("09:3")
        assert cause.text == (
            f"a clock in the system prompt changes: '09:31' → '09:32', from token {at}"
        )
        assert (cause.code, cause.message, cause.at) == ("volatile", 1, at)
        assert cause.tokens == answers[1].usage.prefilled == len(answers[1].prompt_ids) - at
        assert footer(answers[1]).endswith(f"{cause.tokens} tokens read again: {cause.text}")
        assert plan_line(engine.plan("what is it?", system=CLOCK.format("09:33"))).endswith(
            "changes: '09:32' → '09:33', from token 35"
        )

    @pytest.mark.parametrize("owner", ["cell", "other"])
    def test_it_costs_what_would_have_been_reused(self, engine: Engine, owner: str) -> None:
        ask(engine, "what is it?", system=CLOCK.format("09:31"), owner="cell")
        later = ask(engine, "what else?", system=CLOCK.format("09:45:59"), owner=owner)
        clock, rest = later.why
        assert (clock.code, clock.was, clock.now) == ("volatile", "09:31", "09:45:59")
        assert bytes(later.prompt_ids[rest.at :][:5]) == b"else?"
        assert (rest.code, rest.message) == ("extended", 2)

    def test_of_the_templates_own(self) -> None:
        for place in ("<|im_start|>system\nIt is {}.<|im_end|>\n", "It is {}.\n"):
            tokenizer = chatml_tokenizer(f"{{{{ {place.format('09:31')!r} }}}}{CHATML}")
            with fake_engine() as engine:
                engine._shop.find(None).tokenizer._tokenizer = tokenizer
                ask(engine, "what is it?", owner="cell")
                tokenizer.chat_template = f"{{{{ {place.format('09:32')!r} }}}}{CHATML}"
                (cause,) = ask(engine, "what is it?", owner="cell").why
            assert cause.code == "volatile"
            assert cause.text.startswith("a clock in the template's own text changes: '09:31'")

    @pytest.mark.parametrize("role", ["system", "user"])
    @pytest.mark.parametrize(
        ("was", "now"),
        [("I have 7 apples.", "I have 8 apples."), ("It is red.", "It is blue."), ("v1.2", "v1.3")],
    )
    def test_an_ordinary_edit(self, engine: Engine, role: str, was: str, now: str) -> None:
        for text in (was, now):
            talk = [Message(role, text), Message("user", "so?")]
            later = ask(engine, talk, owner="cell")
        (cause,) = later.why
        assert (cause.code, cause.message) == ("diverged", 1)
        assert cause.text.startswith(f"message 1 ({role}) changed at token {cause.at:,}: ")
        assert (cause.was in was, cause.now in now) == (True, True)

    def test_a_clock_in_a_users_text_is_an_ordinary_edit(self, engine: Engine) -> None:
        ask(engine, "the train at 09:31 is late", owner="cell")
        (cause,) = ask(engine, "the train at 09:32 is late", owner="cell").why
        assert cause.text.startswith("message 1 (user) changed at token ")
        assert (cause.code, cause.was, cause.now) == ("diverged", "09:31", "09:32")

    def test_a_clock_and_another_edit_beside_it(self, engine: Engine) -> None:
        ask(engine, "so?", system="At 09:31 be kind.", owner="cell")
        later = ask(engine, "so?", system="At 09:32 be rude.", owner="cell")
        assert codes(later) == ["diverged"]


class TestModels:
    def test_another_one(self, engine: Engine) -> None:
        add_model(engine, "llama-1b")
        talk = [*ask(engine, "hello", model="model", owner="@a").messages, Message("user", "so?")]
        later = ask(engine, talk, model="llama-1b", owner="@a")
        moved, new = later.why
        assert moved.text == "computed with model before; llama-1b has its own cache"
        assert (new.code, new.message) == ("extended", 3)
        assert bytes(later.prompt_ids[new.at + 1 :][:8]) == b"user\nso?"
        assert footer(later).endswith(f"tokens read again: {moved.text}")
        # Back again: what the first model has is there.
        back = ask(engine, talk, model="model", owner="@a")
        assert codes(back) == ["model"]
        assert back.usage.cached > 20

    def test_ids_are_shared_as_far_as_they_agree(self, engine: Engine) -> None:
        add_model(engine, "llama-1b")
        ask(engine, tokens=letters(50), model="model", owner="a")
        why = ask(engine, tokens=[*letters(30), 1, 2], model="llama-1b", owner="a").why
        assert [(c.code, c.tokens) for c in why] == [("model", 30), ("extended", 2)]

    def test_a_text_of_its_own_is_no_reason(self, engine: Engine) -> None:
        add_model(engine, "llama-1b")
        ask(engine, "hello", model="model", owner="a")
        assert codes(ask(engine, "goodbye", model="llama-1b", owner="a")) == ["first"]
        assert codes(ask(engine, "hello", model="llama-1b", owner="b")) == ["diverged"]

    @pytest.mark.parametrize("kind", ["prompt", "raw", "tokens"])
    def test_the_same_name_with_other_weights(self, engine: Engine, kind: str) -> None:
        how: dict = {"tokens": letters(30)} if kind == "tokens" else {"prompt": "hello"}
        how |= {"raw": True} if kind == "raw" else {}
        ask(engine, owner="cell", **how)
        engine.unload()
        remembered = engine._shop.memory.of("cell")
        assert (remembered.gone, len(remembered.path)) == (True, 0)
        add_model(engine, "model")
        (cause,) = ask(engine, owner="cell", **how).why
        assert cause.text == "computed before model was unloaded; its cache went with it"
        assert codes(ask(engine, owner="cell", **how)) == ["seed"]


class TestWhoseText:
    def test_the_owners_own_is_compared_first(self, engine: Engine) -> None:
        ask(engine, "a red house", owner="a")
        ask(engine, "a green house", owner="b")
        (own,) = ask(engine, "a blue house", owner="a").why
        assert own.text == f"message 1 (user) changed at token {own.at}: 'red' → 'blue'"
        (other,) = ask(engine, "a pink house", owner="c").why
        assert other.text == (
            f"message 1 (user) differs from what is stored at token {other.at}: 'blue' → 'pink'"
        )

    def test_a_fork_doesnt_make_a_new_turn_an_edit(self, engine: Engine) -> None:
        talk = ask(engine, "hello", owner="@a").messages
        ask(engine, [*talk, Message("user", "left")], owner="@b")
        later = ask(engine, [*talk, Message("user", "right")], owner="@a")
        assert codes(later) == ["extended"]
        assert later.why[0].text.endswith("in message 3 (user)")

    def test_a_cancelled_prefill_goes_on(self, engine: Engine) -> None:
        model = engine._shop.find(None).model
        gate = model.before_call = Gate()
        prompt = "x" * 700
        ticket = engine.submit(engine.request(prompt, owner="cell"))
        assert gate.reached.wait(HANG)
        ticket.cancel()
        gate.open.set()
        done = ticket.result(HANG).usage.prefilled
        assert 0 < done < 700
        (cause,) = ask(engine, prompt, owner="cell").why
        assert (cause.code, cause.at) == ("extended", done)
        assert cause.text == f"new from token {done}, in message 1 (user)"

    def test_what_was_forgotten_altogether(self, engine: Engine) -> None:
        ask(engine, tokens=letters(300), owner="cell")
        cache = engine._shop._caches["model"]
        engine._thread.call(lambda: (cache.clear(), engine._shop.publish()))
        later = ask(engine, tokens=[*letters(200), 1, 2], owner="cell")
        assert [(c.code, c.tokens) for c in later.why] == [("evicted", 200), ("diverged", 2)]
        engine._thread.call(lambda: (cache.clear(), engine._shop.publish()))
        ask_again = ask(engine, tokens=letters(200), owner="cell")
        assert [(c.code, c.tokens) for c in ask_again.why] == [("evicted", 200)]

    @pytest.mark.parametrize("forget", ["clear", "release"])
    def test_what_is_let_go_of_is_no_reason(self, engine: Engine, forget: str) -> None:
        add_model(engine, "llama-1b")
        ask(engine, "hello", model="model", owner="cell")
        engine.clear() if forget == "clear" else engine.release("cell")
        assert codes(ask(engine, "hello", model="llama-1b", owner="cell")) == ["first"]

    def test_without_a_tokenizer_ids_are_told(self) -> None:
        with Engine(FakeModel()) as engine:
            ask(engine, tokens=[1, 2, 3], owner="cell")
            (cause,) = ask(engine, tokens=[1, 2, 4], owner="cell").why
        assert cause.text == "the prompt changed at token 2: '3' → '4'"

    def test_a_raw_text(self, engine: Engine) -> None:
        ask(engine, "It was a red house", raw=True, owner="cell")
        (cause,) = ask(engine, "It was a blue house", raw=True, owner="cell").why
        assert cause.text == "the prompt changed at token 9: 'red' → 'blue'"
        assert cause.message is None

    def test_messages_whose_places_arent_known(self) -> None:
        tokenizer = chatml_tokenizer(CHATML.replace(CONTENT, f"{CONTENT}|upper"))
        with Engine(FakeModel(), tokenizer) as engine:
            ask(engine, "a red house", system="be", owner="cell")
            (cause,) = ask(engine, "a blue house", system="be", owner="cell").why
        assert cause.message is None
        assert cause.text.startswith("the prompt changed at token ")


class TestFootersAndPlans:
    def test_a_reason_stays_short(self, engine: Engine) -> None:
        rng = random.Random(0)
        words = ["<|im_end|>", "é", "x" * 90, "09:31", "a b", "\n\n\n", "red", "<", "'\"", "🙂"]
        for _ in range(60):
            system, text = (" ".join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(2))
            answer = ask(engine, f"q{text}", system=f"s{system}", owner=rng.choice("ab"))
            assert all(len(c.text) <= 140 and "\n" not in c.text for c in answer.why)

    def test_a_plan_never_waits_for_the_engine(self, engine: Engine) -> None:
        ask(engine, "a red house", owner="cell")
        gate = engine._shop.find(None).model.before_call = Gate()
        ticket = engine.submit(engine.request("something long", max_tokens=2))
        assert gate.reached.wait(HANG)
        (cause,) = engine.plan("a blue house", owner="cell").why
        assert (cause.was, cause.now) == ("red", "blue")
        gate.open.set()
        assert ticket.wait(HANG)

    def test_no_prompt_fails_because_of_its_explanation(self, engine: Engine, monkeypatch) -> None:
        def broken(*_: object) -> None:
            raise RuntimeError("no")

        ask(engine, "a red house", owner="cell")
        for module, name in ((causes, "_refined"), (asked, "match"), (asked, "block_ends")):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, broken)
                answer = ask(engine, f"a blue {name}", owner="cell")
        assert codes(answer) == ["diverged"]
        assert answer.why[0].text.startswith("differs from what is stored")


# --- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("was", "now", "name"),
    [
        ("It is 09:31.", "It is 09:32.", "a clock"),
        ("9:05 PM, rain", "10:06 AM, rain", "a clock"),
        ("at 09:31:07.25 UTC", "at 10:31:08.50 UTC", "a clock"),
        ("Today Date: 26 Jul 2024\n", "Today Date: 27 Jul 2024\n", "a date"),
        ("Sunday, 1 March 2026", "Monday, 2 March 2026", "a date"),
        ("March 3rd, 2026", "April 14th, 2026", "a date"),
        ("Mon Mar  3 09:31:00 2026", "Tue Mar  4 09:31:00 2026", "a date"),
        ("on 2026-03-01,", "on 2026-03-02,", "a date"),
        ("on 3/4/2026", "on 3/5/2026", "a date"),
        ("on 01.03.2026", "on 02.03.2026", "a date"),
        ("log 20260301", "log 20260302", "a date"),
        ("2026-03-01T09:31:00Z", "2026-03-01T09:32:00Z", "a time stamp"),
        ("2026-03-01 09:31:07.123+01:00", "2026-03-01 09:32:08.123+01:00", "a time stamp"),
        ("now=1772357460", "now=1772357521", "a long number"),
        ("now 1772357460.51", "now 1772357521.7", "a long number"),
        ("id 6ba7b810-9dad-11d1-80b4-00c04fd430c8", "id 6ba7b811-9dad-11d1-80b4-00c04fd430c8",
         "an id"),
        ("session=deadbeef01;", "session=deadbeef02;", "an id"),
    ],
)  # fmt: skip
def test_what_ticks(was: str, now: str, name: str) -> None:
    found = ticking(was, now)
    assert found is not None
    assert found.name == name
    assert (found.was in was, found.now in now) == (True, True)
    assert ticking(f"{was} {now}", f"{now} {was}") is not None
    assert ticking(was, was) is None
    assert ticking(f"{was} and red", f"{now} and blue") is None


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("7 apples", "8 apples"), ("in 2025", "in 2026"), ("on Monday", "on Tuesday"),
        ("version 1.2.34", "version 1.2.35"), ("10.0.0.1", "10.0.0.2"), ("port 8080", "port 8081"),
        ("16:9", "16:8"), ("red", "blue"), ("defaced", "effaced"), ("1,024 words", "2,048 words"),
        ("$12.50", "$13.50"), ("room 4711", "room 4712"), ("section 3.1", "section 3.2"),
        ("at 09:31", "at noon"), ("", "09:31"), ("09:31", ""), ("in May", "in June"),
        ("gpt4o-12", "gpt4o-13"),
    ],
)  # fmt: skip
def test_what_is_an_ordinary_edit(was: str, now: str) -> None:
    assert ticking(was, now) is None
    assert ticking(f"a {was} b", f"a {now} b") is None


def test_a_text_that_is_cut_off() -> None:
    assert ticking("at 09:31 in the hou", "at 09:32 in the h", whole=False) is not None
    assert ticking("at 09:31 in the mou", "at 09:32 in a h", whole=False) is None
    assert ticking("09:31", "09:3", whole=False) is None


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ("a red house is", "a blue house is", ("red", "blue")),
        ("a red, old house", "a blue, old house", ("red", "blue")),
        ("at 09:31 it", "at 09:32 it", ("09:31", "09:32")),
        ("<a><think>\nhm\n</think>\n\nFour.", "<a>Four.<e>", ("<think>\nhm\n</think>", "")),
        ("Four.", "<think>\n\n</think>\n\nFour.", ("", "<think>\n\n</think>")),
        ("red<e>\n", "blue<e>\n", ("red", "blue")),
        ("one<e>\n<s>two", "six seven<x>", ("one", "six seven")),
        ("same", "same", ("", "")),
        ("a b", "a  b", ("", " ")),
        ("be", "be not", ("", "not")),
        ("x" * 99, "y" * 99, ("x" * 23 + "…", "y" * 23 + "…")),
        ("", "", ("", "")),
    ],
)
def test_the_differing_words(was: str, now: str, words: tuple[str, str]) -> None:
    assert differing(was, now) == words


@settings(max_examples=300, deadline=None)
@given(st.text("ab <>|/\n09:é", max_size=60), st.text("ab <>|/\n09:é", max_size=60))
def test_any_two_texts_have_their_difference(was: str, now: str) -> None:
    before, after = differing(was, now)
    assert max(len(before), len(after)) <= causes.ROOM
    if was == now:
        assert not before
        assert not after


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "OWNERS", 4)
    monkeypatch.setattr(asked, "TOKENS", 100)
    memory = Memory()

    def keep(owner: str, size: int) -> None:
        ids = np.array(letters(size), np.int32)
        root = NodeView(0, 0, 0, ids[:0], (NodeView(1, 0, size, ids),))
        request = Request(tokens=tuple(ids), owner=owner)
        memory.keep(Asking.of("m", request, ids, ()), "", (), root)

    for owner in "abcdea":
        keep(owner, 10)
    assert [memory.of(owner) is not None for owner in "abcde"] == [True, False, True, True, True]
    keep("f", 90)
    assert [memory.of(owner) is not None for owner in "acdef"] == [True, *[False] * 3, True]
    keep("g", 1000)
    assert memory.of("f") is None
    assert len(memory.of("g").path) == 1000
    memory.release("g")
    assert memory.of("g") is None


@pytest.fixture
def families() -> Iterator[list[Engine]]:
    kinds = [("rows",), ("window", "rows"), ("state", "rows")]
    made = [fake_engine(FakeModel(k), cache_bytes=30_000) for k in kinds]
    yield made
    for engine in made:
        engine.close()


def test_whatever_happens_causes_add_up(families: list[Engine]) -> None:
    for engine in families:
        rng = random.Random(7)
        talks: dict[str, list[Message]] = {}
        for step in range(80):
            owner = rng.choice("abc")
            talk = talks.get(owner, [])
            match rng.randrange(7):
                case 0:
                    talk = [Message("system", CLOCK.format(f"09:{step % 60:02}"))]
                case 1:
                    talk = talk[: rng.randrange(len(talk) + 1)]
                    talk = talk[:-1] if talk and talk[-1].role == "user" else talk
                case 2:
                    talk = list(talks.get(rng.choice("abc"), []))
                case 3:
                    engine.evict(rng.randrange(20_000))
                case 4 if rng.random() < 0.3:
                    engine.clear()
                case _:
                    pass
            question = Message("user", "".join(rng.choices("ab ", k=rng.randint(1, 40))) + "?")
            talks[owner] = list(ask(engine, [*talk, question], owner=owner).messages)
            engine.check()


def test_causes_are_plain_values() -> None:
    assert Cause("seed", "t", 1, 2) == Cause("seed", "t", 1, 2, None, "", "")
