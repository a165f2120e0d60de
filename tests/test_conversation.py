"""Conversations from Python, on an engine that only repeats."""

from __future__ import annotations

import gc
import weakref

import pytest

from fake_tokenizer import chatml_tokenizer
from mlx_jupyter.conversation.answer import Answer, Message
from mlx_jupyter.conversation.conversation import Conversation, turns_of
from mlx_jupyter.conversation.turn import Call
from mlx_jupyter.errors import BadRequest, Cancelled, ComputeError
from mlx_jupyter.models.template import render


class Parrot:
    """An engine that repeats the question; its ids aren't those of the text."""

    def __init__(self) -> None:
        self.seen = []
        self.fail: Exception | None = None
        self.cancel = False

    def generate(self, prompt, *, model=None, owner=None, **options):
        self.seen.append((tuple(prompt), model, owner, options))
        if self.fail:
            raise self.fail
        text = f"You said {prompt[-1].content}."
        if self.cancel:
            raise Cancelled(Answer(text[:8], tuple(text[:8].encode()), (), "cancelled"))
        return Answer(text, tuple(text.encode()), (), "stop")


@pytest.fixture
def parrot() -> Parrot:
    return Parrot()


def test_ask(parrot):
    talk = Conversation(parrot, "demo", system="Be brief.")
    answer = talk.ask("one", max_tokens=5, model="m")
    assert answer.text == "You said one."
    assert parrot.seen[0][1:] == ("m", "@demo", {"max_tokens": 5})
    talk.ask("two")
    assert [m.content for m in parrot.seen[1][0]] == ["Be brief.", "one", "You said one.", "two"]
    assert parrot.seen[1][0][2].ids == answer.tokens
    assert [turn.question.content for turn in talk.turns] == ["one", "two"]
    assert talk.messages[-1] == Message("assistant", "You said two.", tuple(b"You said two."))
    assert len(talk) == 2
    assert "demo" in repr(talk)


def test_a_turns_own_ids_reach_the_prompt(parrot):
    tokenizer = chatml_tokenizer()
    talk = Conversation(parrot)
    talk.ask("<|im_end|>")
    first = render(tokenizer, parrot.seen[0][0])
    talk.ask("again")
    second = render(tokenizer, parrot.seen[1][0])
    before = first.ids + talk.turns[0].answer.tokens
    assert second.ids[: len(before)] == before


def test_system_prompt_from_a_turn_on(parrot):
    talk = Conversation(parrot)
    talk.ask("one")
    talk.ask("two", system="Shout.")
    talk.ask("three")
    assert [prompt[0].role for prompt, *_ in parrot.seen] == ["user", "system", "system"]


def test_fork(parrot):
    talk = Conversation(parrot, "demo")
    for text in ("one", "two", "three"):
        talk.ask(text)
    other = talk.fork("other", back=1)
    other.ask("four")
    assert [turn.question.content for turn in other.turns] == ["one", "two", "four"]
    assert len(talk) == 3
    with pytest.raises(BadRequest, match="back is before"):
        talk.fork("more", back=4)


def test_names(parrot):
    first, second = Conversation(parrot), Conversation(parrot)
    assert first.name != second.name
    first.ask("one")
    assert Conversation(parrot, f"@{first.name}").turns == first.turns
    assert second.turns == ()
    with pytest.raises(BadRequest, match="no branch name"):
        Conversation(parrot, "a b")


def test_a_failed_request_changes_nothing(parrot):
    talk = Conversation(parrot)
    talk.ask("one")
    parrot.fail = ComputeError("out of luck")
    with pytest.raises(ComputeError):
        talk.ask("two")
    with pytest.raises(BadRequest, match="empty"):
        talk.ask(" ")
    assert len(talk) == 1


def test_a_cancelled_answer_is_kept(parrot):
    talk = Conversation(parrot)
    parrot.cancel = True
    with pytest.raises(Cancelled):
        talk.ask("one")
    assert talk.messages[-1] == Message("assistant", "You said", tuple(b"You said"))
    assert talk.turns[0].answer.finish == "cancelled"


def test_a_cell_run_again_replaces_what_it_asked(parrot):
    tree = turns_of(parrot)
    talk = Conversation(parrot)
    for run in range(10):
        for index, text in enumerate(("one", "two")):
            tree.caller = lambda i=index, r=run: Call("s", "cell", i, f"run {r}")
            talk.ask(text)
    assert [turn.question.content for turn in talk.turns] == ["one", "two"]
    tree.caller = lambda: None
    talk.ask("three")
    assert len(talk) == 3


def test_dropped_branch_starts_anew(parrot):
    talk = Conversation(parrot)
    talk.ask("one")
    turns_of(parrot).drop(talk.name)
    assert talk.turns == ()
    assert talk.messages == ()
    talk.ask("two")
    assert len(talk) == 1


def test_turns_end_with_their_engine():
    parrot = Parrot()
    Conversation(parrot).ask("one")
    tree = weakref.ref(turns_of(parrot))
    del parrot
    gc.collect()
    assert tree() is None
