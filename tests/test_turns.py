"""Turns and branches: a cell run again replaces its turns and nothing else."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_jupyter.conversation.answer import Answer, Message
from mlx_jupyter.conversation.turn import Call
from mlx_jupyter.conversation.turns import Turns
from mlx_jupyter.errors import BadRequest


def answer_to(text: str) -> Answer:
    return Answer(f"re {text}", tuple(text.encode()), (), "stop")


class Notebook:
    """Runs cells: each run makes the calls it is told to, as the magics would."""

    def __init__(self, turns: Turns, session: str = "s", named: bool = True) -> None:
        self.turns = turns
        self.session = session
        self.named = named
        self.runs = 0

    def run(
        self, cell: str | None, *texts: str, branch: str = "c", origin: str | None = None
    ) -> None:
        self.runs += 1
        name = f"run {self.runs}" if self.named else ""
        for index, text in enumerate(texts):
            call = Call(self.session, cell, index, name) if cell else None
            place = self.turns.start(branch, call, origin)
            self.turns.commit(place, Message("user", text), answer_to(text))


def asked(turns: Turns, branch: str = "c") -> list[str]:
    return [turn.question.content for turn in turns.log(branch)]


def left_off(turns: Turns, branch: str = "c") -> list[str]:
    return [turn.question.content for turn in turns.stale(branch)]


@pytest.fixture(params=[True, False], ids=["named runs", "counted runs"])
def notebook(request) -> Notebook:
    return Notebook(Turns(), named=request.param)


# --- rerun (43) ----------------------------------------------------------------------------------


def test_rerun_replaces_and_ten_reruns_add_nothing(notebook):
    notebook.run("A", "a")
    notebook.run("B", "b")
    for number in range(10):
        notebook.run("B", f"b{number}")
    assert asked(notebook.turns) == ["a", "b9"]
    assert left_off(notebook.turns) == []
    assert len(notebook.turns) == 2


def test_what_came_after_is_stale_and_takes_its_place_again(notebook):
    for cell in "ABC":
        notebook.run(cell, cell.lower())
    notebook.run("A", "a2")
    assert asked(notebook.turns) == ["a2"]
    assert left_off(notebook.turns) == ["b", "c"]
    notebook.run("B", "b2")
    assert asked(notebook.turns) == ["a2", "b2"]
    assert left_off(notebook.turns) == ["c"]
    notebook.run("C", "c2")
    assert asked(notebook.turns) == ["a2", "b2", "c2"]
    assert left_off(notebook.turns) == []


def test_a_cell_run_out_of_order_hangs_on_what_its_parents_cell_made_last(notebook):
    for cell in "ABC":
        notebook.run(cell, cell.lower())
    notebook.run("A", "a2")
    notebook.run("C", "c2")
    assert asked(notebook.turns) == ["a", "b", "c2"]
    notebook.run("B", "b2")
    notebook.run("C", "c3")
    assert asked(notebook.turns) == ["a2", "b2", "c3"]


def test_without_cell_ids_turns_are_appended():
    notebook = Notebook(Turns())
    for text in ("a", "a", "b"):
        notebook.run(None, text)
    assert asked(notebook.turns) == ["a", "a", "b"]


def test_appended_turns_after_a_rerun_are_kept_as_stale():
    notebook = Notebook(Turns())
    notebook.run("A", "a")
    notebook.run(None, "x")
    notebook.run("A", "a2")
    assert asked(notebook.turns) == ["a2"]
    assert left_off(notebook.turns) == ["x"]


# --- loops and other notebooks (45) --------------------------------------------------------------


def test_loop_makes_one_turn_each_and_leaves_no_ghosts(notebook):
    notebook.run("A", "a")
    notebook.run("L", "1", "2", "3")
    notebook.run("D", "d")
    assert asked(notebook.turns) == ["a", "1", "2", "3", "d"]
    notebook.run("L", "one", "two")
    assert asked(notebook.turns) == ["a", "one", "two"]
    assert left_off(notebook.turns) == ["d"]
    notebook.run("D", "d2")
    assert asked(notebook.turns) == ["a", "one", "two", "d2"]
    notebook.run("L", "i", "ii", "iii", "iv")
    notebook.run("D", "d3")
    assert asked(notebook.turns) == ["a", "i", "ii", "iii", "iv", "d3"]


def test_a_loop_that_stops_early_or_loses_its_first_call():
    notebook = Notebook(Turns())
    notebook.run("A", "a")
    notebook.run("L", "1", "2")
    place = notebook.turns.start("c", Call("s", "L", 1, "another run"))  # call 0 failed
    notebook.turns.commit(place, Message("user", "two"), answer_to("two"))
    assert asked(notebook.turns) == ["a", "two"]


def test_another_client_session_appends(notebook):
    copied = Notebook(notebook.turns, session="t")
    notebook.run("A", "a")
    copied.run("A", "x")
    assert asked(notebook.turns) == ["a", "x"]
    copied.run("A", "y")
    assert asked(notebook.turns) == ["a", "y"]
    notebook.run("A", "a2")
    copied.run("A", "z")
    assert asked(notebook.turns) == ["a2", "z"]


def test_cell_that_changes_its_branch():
    notebook = Notebook(Turns())
    notebook.run("A", "a")
    notebook.run("A", "b", branch="d")
    assert asked(notebook.turns) == ["a"]
    assert asked(notebook.turns, "d") == ["b"]


# --- branches ------------------------------------------------------------------------------------


def test_fork_keeps_its_turns_through_reruns_elsewhere(notebook):
    for cell in "AB":
        notebook.run(cell, cell.lower())
    notebook.turns.fork("c", "f")
    notebook.run("F", "f", branch="f")
    notebook.run("A", "a2")
    assert asked(notebook.turns) == ["a2"]
    assert asked(notebook.turns, "f") == ["a", "b", "f"]
    notebook.run("F", "f2", branch="f")
    assert asked(notebook.turns, "f") == ["a", "b", "f2"]
    notebook.run("B", "b2")
    assert asked(notebook.turns) == ["a2", "b2"]


def test_fork_further_back_and_again():
    notebook = Notebook(Turns())
    for cell in "ABC":
        notebook.run(cell, cell.lower())
    notebook.turns.fork("c", "f", back=2)
    notebook.run("F", "f", branch="f")
    assert asked(notebook.turns, "f") == ["a", "f"]
    notebook.run("A", "a2")
    notebook.turns.fork("c", "f")
    assert asked(notebook.turns, "f") == ["a2"]
    notebook.run("F", "f2", branch="f")
    assert asked(notebook.turns, "f") == ["a2", "f2"]
    with pytest.raises(BadRequest, match="exists already"):
        notebook.turns.fork("f", "c")
    assert notebook.turns.fork("c", "empty", back=1) is None


def test_from_starts_a_branch_and_rerun_starts_it_again():
    notebook = Notebook(Turns())
    for cell in "ABC":
        notebook.run(cell, cell.lower())
    for text in ("f", "f2"):
        notebook.run("F", text, "more", branch="f", origin="c~1")
        assert asked(notebook.turns, "f") == ["a", "b", text, "more"]
    notebook.run("A", "a2")
    notebook.run("F", "f3", branch="f", origin="c")
    assert asked(notebook.turns, "f") == ["a2", "f3"]
    with pytest.raises(BadRequest, match="exists already"):
        notebook.turns.start("f", Call("s", "G", 0), "c")
    notebook.run("G", "g", branch="c", origin="c~1")
    assert asked(notebook.turns) == ["g"]


def test_start_changes_nothing():
    notebook = Notebook(Turns())
    notebook.run("A", "a")
    before = notebook.turns.branches
    notebook.turns.start("c", Call("s", "A", 0))
    notebook.turns.start("new", Call("s", "B", 0), "c")
    assert notebook.turns.branches == before


def test_names():
    notebook = Notebook(Turns())
    notebook.run("A", "a", branch="@demo")
    notebook.run("B", "b", branch="demo")
    turns = notebook.turns
    tip = turns.branches["demo"]
    assert turns.resolve("demo") == turns.resolve("@demo~0") == tip
    assert turns.resolve("demo~1") == turns[tip].parent
    assert turns.resolve("demo~2") is None
    for bad, words in [
        ("demo~3", "has 2 turns"),
        ("dem", "Did you mean @demo"),
        ("xyz", "There are: @demo"),
        ("demo~x", "BRANCH~N"),
        ("a b", "no branch name"),
    ]:
        with pytest.raises(BadRequest, match=words):
            turns.resolve(bad)
    turns.fork("demo", "f")
    turns.rename("demo", "main")
    assert asked(turns, "main") == ["a", "b"]
    with pytest.raises(BadRequest, match="exists already"):
        turns.rename("f", "main")
    turns.drop("main")
    assert asked(turns, "f") == ["a", "b"]
    turns.drop("f")
    assert len(turns) == 0
    with pytest.raises(BadRequest, match="no branch @f"):
        turns.drop("f")


def test_messages_carry_ids_and_the_last_system_prompt():
    turns = Turns()
    for text, system in [("a", "one"), ("b", None), ("c", "two")]:
        turns.commit(turns.start("c"), Message("user", text), answer_to(text), system)
    tip = turns.branches["c"]
    messages = turns.messages(tip)
    assert [m.role for m in messages] == ["system"] + ["user", "assistant"] * 3
    assert messages[0].content == "two"
    assert messages[2] == Message("assistant", "re a", (97,))
    assert turns.messages(turns.resolve("c~1"))[0].content == "one"
    assert turns.messages(tip, "three")[0].content == "three"
    assert turns.messages(tip, "")[0].role == "user"
    assert turns.messages(None) == ()


def test_a_turn_without_an_answer_is_left_out_of_the_messages():
    turns = Turns()
    turns.commit(turns.start("c"), Message("user", "a"), Answer("", (), (), "cancelled"))
    assert turns.messages(turns.branches["c"]) == ()
    assert asked(turns) == ["a"]


def test_many_threads():
    turns = Turns()

    def work(name: str) -> None:
        notebook = Notebook(turns, session=name)
        for _ in range(20):
            notebook.run("A", "1", "2", branch=name)
            notebook.run(None, "x", branch=f"{name}-loose")

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        assert asked(turns, f"t{i}") == ["1", "2"]
        assert len(asked(turns, f"t{i}-loose")) == 20


# --- against a simple model ----------------------------------------------------------------------


@dataclass
class Model:
    """One branch: each cell hangs on the cell that stood before it when it first ran.

    ``paths`` holds, for each cell, the whole conversation at the end of its last run.
    """

    paths: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    anchors: dict[str, str | None] = field(default_factory=dict)
    tip: str | None = None

    def run(self, cell: str, texts: list[str]) -> None:
        anchor = self.anchors.setdefault(cell, self.tip)
        before = self.paths[anchor] if anchor else []
        self.paths[cell] = before + [(cell, text) for text in texts]
        self.tip = cell

    @property
    def path(self) -> list[tuple[str, str]]:
        return self.paths[self.tip] if self.tip else []

    def fork(self, back: int) -> Model:
        path = self.path[: len(self.path) - back]
        made = Model(anchors={}, tip=path[-1][0] if path else None)
        for place, (cell, _) in enumerate(path):
            made.paths[cell] = path[: place + 1]
            made.anchors[cell] = self.anchors[cell]
        return made


CELLS = st.sampled_from("ABCD")
BRANCHES = st.sampled_from(["c", "f", "g"])


class Random(RuleBasedStateMachine):
    """Runs, reruns, loops of changing length, forks and drops in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns()
        self.notebook = Notebook(self.turns)
        self.models: dict[str, Model] = {}
        self.count = 0

    @rule(cell=CELLS, branch=BRANCHES, calls=st.integers(1, 3))
    def run_cell(self, cell, branch, calls):
        texts = [f"{self.count + i}" for i in range(calls)]
        self.count += calls
        # A cell keeps to its branch here: the same cell on two branches is two cells.
        self.notebook.run(cell, *texts, branch=branch)
        self.models.setdefault(branch, Model()).run(cell, texts)

    @precondition(lambda self: self.models)
    @rule(data=st.data(), name=st.sampled_from(["f", "g"]), back=st.integers(0, 3))
    def fork(self, data, name, back):
        source = data.draw(st.sampled_from(sorted(self.models)))
        if name in self.models:
            self.turns.drop(name)
            del self.models[name]
            if source == name:
                return
        if back > len(self.models[source].path):
            with pytest.raises(BadRequest):
                self.turns.fork(source, name, back)
            return
        self.turns.fork(source, name, back)
        self.models[name] = copy.deepcopy(self.models[source].fork(back))

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def drop(self, data):
        name = data.draw(st.sampled_from(sorted(self.models)))
        self.turns.drop(name)
        del self.models[name]

    @invariant()
    def same_paths(self):
        assert set(self.turns.branches) == set(self.models)
        for name, model in self.models.items():
            assert asked(self.turns, name) == [text for _, text in model.path]
            live = set(asked(self.turns, name))
            assert live.isdisjoint(left_off(self.turns, name))
            cells = [turn.call.cell for turn in self.turns.log(name)]
            runs = [c for i, c in enumerate(cells) if not i or cells[i - 1] != c]
            assert len(runs) == len(set(runs))

    @invariant()
    def nothing_piles_up(self):
        depth = sum(len(p) for m in self.models.values() for p in m.paths.values())
        assert len(self.turns) <= depth


Random.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestRandom = Random.TestCase
