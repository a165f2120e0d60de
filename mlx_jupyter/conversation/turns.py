"""The tree of turns: branches are names for tips, and a cell run again replaces its own turns.

Promises:
- A turn never changes and never moves; a branch is a name for its tip, and the conversation is
  the path from the first turn to it.
- A call is (client session, cell, n-th call of the cell's run). A cell's run replaces all turns
  that its last run made on that branch, however many each made: running it again never makes
  the conversation longer, and a shorter loop leaves nothing behind.
- The first turn of a new run hangs on what now stands where the old one's parent stood. What
  came after the old one is stale, not lost: each takes its place again when its cell is run.
- What happens on one branch never changes another one.

Knows no IPython and no MLX. All methods may be called from any thread.
"""

from __future__ import annotations

import difflib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_jupyter.conversation.answer import Answer, Message
from mlx_jupyter.conversation.turn import (
    Branch,
    Call,
    Place,
    Run,
    Turn,
    check_name,
    goes_on,
    index_of,
    split,
)
from mlx_jupyter.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_KEPT = "(kept)"
"""Names the run of a cell whose turns were kept elsewhere: the next run is another one."""


class Turns:
    """All turns and branches of a kernel.

    Attributes:
        caller: tells who is asking now; the notebook sets it, so that calls from Python code in
            a cell belong to the cell too.
    """

    def __init__(self) -> None:
        self.caller: Callable[[], Call | None] = lambda: None
        self._lock = threading.RLock()
        self._turns: dict[int, Turn] = {}
        self._branches: dict[str, Branch] = {}
        self._next = 1

    @property
    def branches(self) -> dict[str, int | None]:
        """Each branch's tip, in the order in which the branches were made."""
        with self._lock:
            return {name: branch.tip for name, branch in self._branches.items()}

    def __getitem__(self, turn: int) -> Turn:
        return self._turns[turn]

    def __len__(self) -> int:
        return len(self._turns)

    def open(self, name: str | None = None) -> str:
        """Make a branch unless it is there; a free name is chosen when none is given."""
        with self._lock:
            number = 1
            while name is None:
                name = f"chat-{number}" if f"chat-{number}" not in self._branches else None
                number += 1
            self._branches.setdefault(check_name(name), Branch())
            return check_name(name)

    # --- asking ----------------------------------------------------------------------------------

    def start(self, branch: str, call: Call | None = None, origin: str | None = None) -> Place:
        """Where the next turn of a branch will go; changes nothing.

        Args:
            branch: its name; a new one starts empty, or at ``origin``.
            call: who asks; None appends.
            origin: the turn to go on from, such as ``"demo"`` or ``"demo~2"``.

        Raises:
            BadRequest: a bad name, an unknown origin, or an origin for another cell's branch.
        """
        name = check_name(branch)
        with self._lock:
            known = self._branches.get(name)
            run = known.runs.get((call.session, call.cell)) if known and call else None
            if known and run and call and goes_on(run, call):
                parent = known.tip if run.turns[-1] in self._path(known.tip) else run.turns[-1]
                return Place(name, parent, call)
            if origin is not None:
                if known and known.tip is not None and not run and split(origin)[0] != name:
                    raise BadRequest(
                        f"Branch @{name} exists already. Leave --from out to go on with it, "
                        "drop it, or take another name."
                    )
                return Place(name, self.resolve(origin), call, fresh=bool(run), origin=origin)
            if not known or not run:
                return Place(name, known.tip if known else None, call)
            old = self._turns[run.turns[0]].parent
            parent = self._now(known, old)
            if not set(run.turns).isdisjoint(self._path(parent)):
                parent = old  # never hang a turn on the one that it replaces
            return Place(name, parent, call, fresh=True)

    def beside(self, place: Place, name: str) -> Place:
        """Where another answer to the same question goes: on a branch of its own.

        Args:
            place: the question's own.
            name: of the branch beside it.

        Raises:
            BadRequest: another conversation has that name.
        """
        name = check_name(name)
        with self._lock:
            known, call = self._branches.get(name), place.call
            run = known.runs.get((call.session, call.cell)) if known and call else None
            if known and not run and known.source != place.branch:
                raise BadRequest(f"Branch @{name} exists already; drop it, so that it can be used.")
            fresh = bool(run and call and not goes_on(run, call))
            return Place(name, place.parent, call, fresh, place.branch)

    def commit(
        self, place: Place, question: Message, answer: Answer, system: str | None = None
    ) -> Turn:
        """Add the answered turn at its place; the branch's tip becomes this turn."""
        with self._lock:
            branch = self._branches.get(place.branch)
            if branch is None:
                branch = self._branches[place.branch] = self._copy(place.origin, place.parent)
            parent = place.parent if place.parent in self._turns else None
            turn = Turn(self._next, parent, question, answer, place.call, system)
            self._next += 1
            self._turns[turn.id] = turn
            branch.tip = turn.id
            if place.call is None:
                branch.loose.add(turn.id)
            else:
                self._record(branch, place.call, turn.id, fresh=place.fresh)
            self._sweep()
            return turn

    def messages(self, turn: int | None, system: str | None = None) -> tuple[Message, ...]:
        """The conversation up to a turn; each answer carries its own token ids.

        A turn that was cancelled before its answer began is left out.

        Args:
            turn: the last turn; None for an empty conversation.
            system: a system prompt instead of the last one given on the way.
        """
        with self._lock:
            path = [self._turns[each] for each in self._path(turn)]
        prompts = [system, *(each.system for each in reversed(path))]
        found = next((each for each in prompts if each is not None), None)
        made = [Message("system", found)] if found and found.strip() else []
        for each in path:
            if each.answer.text.strip():
                made.append(each.question)
                ids, model = tuple(each.answer.tokens), each.answer.model
                made.append(Message("assistant", each.answer.text, ids, model))
        return tuple(made)

    # --- branches --------------------------------------------------------------------------------

    def resolve(self, ref: str) -> int | None:
        """The turn that ``"demo"`` or ``"demo~2"`` (two turns back) names; None at the root.

        Raises:
            BadRequest: no such branch, or it has fewer turns.
        """
        name, back = split(ref)
        with self._lock:
            path = self._path(self._branch(name).tip)
        if back > len(path):
            raise BadRequest(f"@{name} has {len(path)} turns; {back} back is before its start.")
        return path[-1 - back] if back < len(path) else None

    def fork(self, source: str, name: str, back: int = 0) -> int | None:
        """Make a branch whose tip lies ``back`` turns before the tip of ``source``.

        Forking again under the same name moves that branch to the new place.

        Returns:
            The new branch's tip.

        Raises:
            BadRequest: ``source`` is unknown or too short, or ``name`` is another conversation.
        """
        name, source = check_name(name), check_name(source)
        with self._lock:
            tip = self.resolve(f"{source}~{back}")
            old = self._branches.get(name)
            if old is not None and (name == source or old.source != source):
                raise BadRequest(f"Branch @{name} exists already; drop it or take another name.")
            made = self._copy(source, tip)
            if old is not None:
                made.runs = {**old.runs, **made.runs}
                made.loose |= old.loose
                made.ends |= old.ends
                for key, run in old.runs.items():
                    if made.runs[key] is not run and run.turns != made.runs[key].turns:
                        made.ends.add(run.turns[-1])
            self._branches[name] = made
            return tip

    def drop(self, name: str) -> None:
        """Forget a branch; its turns go when no other branch has them.

        Raises:
            BadRequest: no such branch.
        """
        with self._lock:
            self._branch(check_name(name))
            del self._branches[check_name(name)]
            self._sweep()

    def rename(self, old: str, new: str) -> None:
        """Give a branch another name.

        Raises:
            BadRequest: no such branch, or the new name is taken.
        """
        old, new = check_name(old), check_name(new)
        with self._lock:
            self._branch(old)
            if new in self._branches:
                raise BadRequest(f"Branch @{new} exists already; drop it or take another name.")
            names = {name: new if name == old else name for name in self._branches}
            self._branches = {names[name]: each for name, each in self._branches.items()}
            for each in self._branches.values():
                each.source = names.get(each.source or "", each.source)

    def check_free(self, name: str) -> None:
        """Raise ``BadRequest`` where a branch of that name has turns."""
        with self._lock:
            branch = self._branches.get(check_name(name))
            if branch is not None and (branch.tip is not None or self._held(branch)):
                raise BadRequest(
                    f"Branch @{name} exists already. Drop it first (%llm drop @{name}), or restore "
                    f"its file under another name (%llm restore @other FILE)."
                )

    def revive(self, name: str, log: Sequence[Turn]) -> None:
        """Make a branch of turns that were kept elsewhere; their ids and parents don't count.

        Turns with a call belong to that cell: when it runs again, it replaces them.

        Raises:
            BadRequest: the name is taken, or a bad one.
        """
        with self._lock:
            self.check_free(name)
            branch = Branch()
            for kept in log:
                turn = replace(kept, id=self._next, parent=branch.tip)
                self._next += 1
                self._turns[turn.id] = turn
                branch.tip = turn.id
                if turn.call is None:
                    branch.loose.add(turn.id)
                else:
                    self._record(branch, replace(turn.call, run=_KEPT), turn.id, fresh=False)
            self._branches[check_name(name)] = branch

    def around(self, name: str) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
        """A branch's turns and those of all others, each with the stale ones; any name."""
        with self._lock:
            own: set[int] = set()
            others: set[int] = set()
            for each, branch in self._branches.items():
                found = self._held(branch).union(self._path(branch.tip))
                (own if each == check_name(name) else others).update(found)
            return (
                tuple(self._turns[i] for i in sorted(own)),
                tuple(self._turns[i] for i in sorted(others)),
            )

    def log(self, name: str) -> tuple[Turn, ...]:
        """A branch's turns, from the first to the tip.

        Raises:
            BadRequest: no such branch.
        """
        with self._lock:
            return tuple(self._turns[i] for i in self._path(self._branch(check_name(name)).tip))

    def stale(self, name: str) -> tuple[Turn, ...]:
        """Turns that a rerun left off a branch and that their cells will put back.

        Raises:
            BadRequest: no such branch.
        """
        with self._lock:
            branch = self._branch(check_name(name))
            off = self._held(branch).difference(self._path(branch.tip))
            return tuple(self._turns[i] for i in sorted(off))

    # --- inner -----------------------------------------------------------------------------------

    def _branch(self, name: str) -> Branch:
        found = self._branches.get(name)
        if found is None:
            near = difflib.get_close_matches(name, self._branches, n=3, cutoff=0.5)
            names = near or list(self._branches)[:5]
            listed = ", ".join(f"@{each}" for each in names)
            hint = (
                (f" Did you mean {listed}?" if near else f" There are: {listed}.") if names else ""
            )
            raise BadRequest(f"There is no branch @{name}.{hint}")
        return found

    def _path(self, turn: int | None) -> list[int]:
        path = []
        while turn is not None:
            path.append(turn)
            turn = self._turns[turn].parent
        return path[::-1]

    def _now(self, branch: Branch, turn: int | None) -> int | None:
        """What stands now where ``turn`` stood: the latest turn of the call that made it."""
        call = self._turns[turn].call if turn is not None else None
        run = branch.runs.get((call.session, call.cell)) if call else None
        if call is None or run is None or turn in run.turns:
            return turn
        if turn in branch.ends:
            return run.turns[-1]  # it followed the whole cell, and so it does again
        before = [i for i in run.turns if index_of(self._turns[i]) <= call.index]
        return before[-1] if before else self._turns[run.turns[0]].parent

    def _record(self, branch: Branch, call: Call, turn: int, *, fresh: bool) -> None:
        key = (call.session, call.cell)
        run = branch.runs.get(key)
        if run is None or fresh:
            if run is not None:
                branch.ends.add(run.turns[-1])
            branch.runs[key] = Run(call.run, call.index, [turn])
            return
        run.turns.append(turn)
        run.index = call.index

    def _copy(self, origin: str | None, tip: int | None) -> Branch:
        """A new branch at ``tip`` that knows what the branch of ``origin`` knows of its path."""
        source = self._branches.get(split(origin)[0]) if origin else None
        if origin is None or source is None:
            return Branch(tip, source=split(origin)[0] if origin else None)
        path = set(self._path(tip))
        made = Branch(tip, loose=source.loose & path, source=split(origin)[0])
        made.ends = set(source.ends)
        for key, run in source.runs.items():
            if kept := [i for i in run.turns if i in path]:
                made.runs[key] = Run(run.name, run.index, kept)
        return made

    def _held(self, branch: Branch) -> set[int]:
        return branch.loose.union(*(run.turns for run in branch.runs.values()))

    def _sweep(self) -> None:
        """Forget turns that no branch holds and nothing held hangs on."""
        keep: set[int] = set()
        for branch in self._branches.values():
            for turn in (*self._held(branch), branch.tip):
                at = turn
                while at is not None and at not in keep:
                    keep.add(at)
                    at = self._turns[at].parent
        self._turns = {i: turn for i, turn in self._turns.items() if i in keep}
        for branch in self._branches.values():
            branch.ends &= keep
