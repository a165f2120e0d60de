"""Several models in one notebook: the same question side by side, branches, changing models."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from fake_tokenizer import chatml_tokenizer
from fakes import FakeModel, fake_engine
from mlx_jupyter import Conversation, runtime
from mlx_jupyter.conversation.answer import Message
from mlx_jupyter.conversation.conversation import turns_of
from mlx_jupyter.conversation.turn import Call
from mlx_jupyter.engine import serve
from mlx_jupyter.errors import Cancelled
from mlx_jupyter.notebook import columns

if TYPE_CHECKING:
    from mlx_jupyter.engine.engine import Engine


class Gate:
    """``before_call`` of both models: may do something at the n-th call."""

    def __init__(self) -> None:
        self.calls = 0
        self.at: dict[int, Any] = {}

    def __call__(self, count: int) -> None:
        self.calls += 1
        self.at.pop(self.calls, lambda: None)()


def add(engine: Engine, name: str, kinds: tuple[str, ...] = ("rows",), **how: Any) -> None:
    """Give an engine one more model object, by a name."""
    shop = engine._shop

    def work() -> None:
        loaded = shop._pool.adopt(FakeModel(kinds, **how), chatml_tokenizer(), name)
        shop._ready(loaded)

    engine._thread.call(work)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(gate: Gate):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with fake_engine(FakeModel(before_call=gate)) as made:
        add(made, "b", before_call=gate)
        before = runtime.current()
        runtime.set_engine(made)
        yield made
        runtime.set_engine(before)


BOTH = "-m model -m b"


def test_the_same_prompt_to_two_models(run, shell, engine, capsys):
    run(f"%%llm {BOTH} --max 5\nhello")
    first, second = shell.user_ns["_"]
    assert (first.model, second.model) == ("model", "b")
    assert first.prompt_ids == second.prompt_ids
    assert first.text != second.text
    printed = capsys.readouterr().out
    assert printed.index("model:\n" + first.text) < printed.index("\nb:\n" + second.text)
    alone = [run(f"x = %llm -m {m} --max 5 hello\nx") for m in ("model", "b")]
    assert [a.text for a in alone] == [first.text, second.text]
    assert [a.usage.prefilled for a in alone] == [1, 1]
    run(f"%llm {BOTH} -o both --max 2 hello again")
    assert [a.model for a in shell.user_ns["both"]] == ["model", "b"]
    run(f"r = %llm {BOTH} --max 2 hello")
    assert len(shell.user_ns["r"]) == 2
    engine.check()


def test_views_and_plans(run, shell, capsys):
    capsys.readouterr()
    run(f"%%llm {BOTH} --view none --max 2\nhello")
    assert capsys.readouterr().out == ""
    assert len(shell.user_ns["_"]) == 2
    page = run(f"%llm {BOTH} --dry-run hello there")
    heads = [line for line in repr(page).splitlines() if not line.startswith(" ")]
    assert [head.partition(":")[0] for head in heads] == ["model", "b"]
    assert len(page.data) == 2


def test_a_branch_keeps_the_first_and_the_others_lie_beside(run, shell, engine):
    run("%llm @c -m model --max 3 one")
    run(f"%llm @c {BOTH} --max 3 two")
    first, second = shell.user_ns["_"]
    assert [m.content for m in first.messages[:3]] == [m.content for m in second.messages[:3]]
    assert run("%llm branches").data == ("c", "c.b")
    assert run("%llm log @c").data[-1].answer.text == first.text
    assert run("%llm log @c.b").data[-1].answer.text == second.text
    run(f"%llm @c {BOTH} --max 3 three")
    # Both were asked the same: the branch's own conversation.
    first, second = shell.user_ns["_"]
    assert [m.content for m in first.messages[:5]] == [m.content for m in second.messages[:5]]
    assert len(run("%llm log @c.b").data) == len(run("%llm log @c").data) == 3
    run("%llm @c.b -m b --max 3 four")  # and one can go on with the other's answer
    assert shell.user_ns["_"].messages[5].content == second.text
    assert len(run("%llm log @c").data) == 3


def test_running_the_cell_again_replaces_all_answers(engine):
    tree = turns_of(engine)

    def ask(cell: str, text: str, run_name: str) -> None:
        call = Call("s", cell, 0, run_name)
        place = tree.start("c", call)
        beside = tree.beside(place, "c.b")
        for at in (place, beside):
            answer = engine.generate(text, max_tokens=2, model="b" if at is beside else "model")
            tree.commit(at, Message("user", text), answer)

    ask("one", "x", "r1")
    ask("two", "y", "r2")
    for again in range(3):
        ask("two", f"y{again}", f"again{again}")
    for name in ("c", "c.b"):
        assert [t.question.content for t in tree.log(name)] == ["x", "y2"]
    assert tree.log("c.b")[0].answer.model == "model"  # the branch's own, up to the question
    ask("one", "z", "r3")
    assert [t.question.content for t in tree.log("c")] == ["z"]
    assert [t.question.content for t in tree.log("c.b")] == ["z"]


def test_what_followed_another_models_answer_comes_back(engine):
    """The cell runs again: what hung on the other's old answer hangs on its new one."""
    tree = turns_of(engine)

    def commit(place, text):
        tree.commit(place, Message("user", text), engine.generate(text, max_tokens=2))

    def both(run_name: str, text: str) -> None:
        place = tree.start("c", Call("s", "both", 0, run_name))
        for at in (place, tree.beside(place, "c.b")):
            commit(at, text)

    both("r1", "x")
    commit(tree.start("c.b", Call("s", "after", 0, "r1")), "and?")
    both("r2", "y")
    assert [t.question.content for t in tree.log("c.b")] == ["y"]
    assert [t.question.content for t in tree.stale("c.b")] == ["and?"]
    commit(tree.start("c.b", Call("s", "after", 0, "r2")), "and now?")
    assert [t.question.content for t in tree.log("c.b")] == ["y", "and now?"]
    assert [t.question.content for t in tree.log("c")] == ["y"]


def test_a_first_model_that_fails_leaves_the_others_branch(shell, run):
    shell.run_cell("%llm @c -m no-such -m b --max 2 one", store_history=True)
    assert run("%llm branches").data == ("c.b",)
    shell.run_cell("%llm @c -m no-such -m b --max 2 two", store_history=True)
    (turn,) = run("%llm log @c.b").data  # @c has no turns, and so the others start there too
    assert turn.question.content == "two"


def test_anothers_branch_is_not_taken(shell, run, capsys):
    run("%llm @c.b --max 1 mine")
    capsys.readouterr()
    result = shell.run_cell(f"%llm @c {BOTH} --max 1 x", store_history=True)
    assert not result.success
    assert "Branch @c.b exists already" in capsys.readouterr().out


def test_an_interrupt_keeps_what_is_there(shell, engine, gate, capsys):
    run = shell.run_cell
    run(f"%llm {BOTH} --max 4 warm", store_history=True)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGINT)

    gate.at[gate.calls + 10] = interrupt
    result = run(f"%llm {BOTH} --max 300 -o r hello", store_history=True)
    assert isinstance(result.error_in_exec, Cancelled)
    given = shell.user_ns["r"]
    assert len(given) == 1
    assert given[0].finish == "cancelled"
    printed = capsys.readouterr()
    assert "1 of 2 models answered" in printed.out + printed.err
    engine.generate("next", max_tokens=1)
    engine.check()


def test_one_that_fails_does_not_keep_the_other_from_answering(shell, engine, capsys):
    shell.run_cell("%llm --max 1 warm", store_history=True)
    result = shell.run_cell("%llm -m no-such -m b --max 3 -o r hello", store_history=True)
    assert type(result.error_in_exec).__name__ == "ModelNotFound"
    assert [a.model for a in shell.user_ns["r"]] == ["b"]
    printed = capsys.readouterr().out
    assert "no-such:\n" in printed
    assert "[ModelNotFound: Model 'no-such' was not found." in printed
    assert shell.user_ns["r"][0].text in printed


# --- the columns ----------------------------------------------------------------------------------


class FrontEnd:
    """Keeps what a notebook's front end would be sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, str], bool]] = []

    def publish(self, data, metadata, transient=None, update=False) -> None:
        self.sent.append((data, update))


def test_columns_are_one_table_and_one_text() -> None:
    shell: Any = SimpleNamespace(kernel=object(), display_pub=FrontEnd())
    board = columns.board_for(shell, "md", ("a<1>", "b"))
    first, second = board.screens
    first.finish("<script>x</script>\nline", "read 3 tokens")
    second.tell("ModelNotFound: no <b>")
    board.close()
    (data, _) = shell.display_pub.sent[-1]
    assert [update for _, update in shell.display_pub.sent] == [False, True]
    assert data["text/plain"] == (
        "a<1>:\n<script>x</script>\nline\n[read 3 tokens]\n\nb:\n[ModelNotFound: no <b>]"
    )
    table = data["text/html"]
    assert table.count("<th ") == 2
    assert table.count("<td ") == 4
    assert "&lt;script&gt;x&lt;/script&gt;" in table
    assert "<script" not in table
    assert "a&lt;1&gt;" in table
    shell = SimpleNamespace(kernel=object(), display_pub=FrontEnd())
    board = columns.board_for(shell, "text", ("a", "b"))
    board.screens[0].finish("x", "")
    assert set(shell.display_pub.sent[-1][0]) == {"text/plain"}


# --- a conversation that changes models -----------------------------------------------------------


def test_another_model_does_not_use_the_ids_of_the_first(engine, monkeypatch) -> None:
    chat = Conversation(engine, "talk")
    chat.ask("hello", model="model", max_tokens=8)
    seen: list[Any] = []
    was = serve.as_served

    def spy(shop, loaded, request):
        made = was(shop, loaded, request)
        seen.append((loaded.info.name, [m.ids for m in made[0].messages if m.role == "assistant"]))
        return made

    monkeypatch.setattr(serve, "as_served", spy)
    chat.ask("and now?", model="b", max_tokens=8)
    back = chat.ask("and again?", model="model", max_tokens=8)
    assert [name for name, _ in seen] == ["b", "model"]
    assert seen[0][1] == [None]
    assert seen[1][1][0] is not None  # its own first answer's
    assert seen[1][1][1] is None
    assert [m.role for m in back.messages] == ["user", "assistant"] * 3
    assert back.usage.cached > 0
    engine.check()


def test_each_model_has_its_own_trie(engine) -> None:
    text = "the same words " * 20
    for model in ("model", "b"):
        assert engine.generate(text, model=model, max_tokens=1).usage.cached == 0
    for model in ("model", "b"):
        assert engine.generate(text, model=model, max_tokens=1).usage.prefilled == 1
    assert engine.tree("model").model != engine.tree("b").model
