"""A conversation as it is kept in a file: turns as JSON, and JSON as turns, every field checked.

Text from a file is believed in nothing: what isn't exactly what ``dumped`` writes is refused, with
bounds on counts and numbers. No path, class or code is named in it. Pure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, get_args

from mlx_jupyter.conversation.answer import Answer, Finish, Message
from mlx_jupyter.conversation.turn import Call, Turn, check_name
from mlx_jupyter.errors import BadRequest

MAX_TURNS = 20_000
MAX_IDS = 8_000_000
"""Generated ids of all answers together."""

_NAME = 4096
_ID = 2**31
_SEED = 2**64
_CELL = 200


class Malformed(ValueError):
    """A text isn't a kept conversation; the text says why."""


@dataclass(frozen=True, slots=True)
class SavedTurn:
    """A turn without what only its kernel knew.

    Attributes:
        question: the user's message.
        answer: the model's text.
        ids: the ids that it generated.
        prompt: so many leading ids of the conversation's path are what the model was asked; 0 when
            its prompt isn't the path's beginning.
        finish: how it ended.
        model: who answered, by short name.
        seed: of the sampling.
        stopped_by: the stop string that ended it.
        system: the system prompt given with this turn.
        cell: (cell id, n-th call in it), so that the cell replaces its turn when it is run again.
    """

    question: str
    answer: str
    ids: tuple[int, ...] = ()
    prompt: int = 0
    finish: Finish = "stop"
    model: str = ""
    seed: int = 0
    stopped_by: str | None = None
    system: str | None = None
    cell: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation's turns, from the first to the last.

    Attributes:
        name: the branch's name.
        turns: its turns.
        path: the ids of the last turn's prompt and answer; empty when they aren't known.
    """

    name: str
    turns: tuple[SavedTurn, ...] = ()
    path: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, name: str, log: tuple[Turn, ...]) -> Saved:
        """The turns of a branch."""
        last = log[-1].answer if log else None
        path = last.prompt_ids + last.tokens if last is not None and last.prompt_ids else ()
        return cls(name, tuple(_turn(turn, path) for turn in log), path)

    def log(self, session: str | None = None) -> tuple[Turn, ...]:
        """The turns, for ``Turns.revive``.

        Args:
            session: the client that takes them over: its cells replace their turns. None: no cell
                does.
        """
        return tuple(self._revived(turn, session) for turn in self.turns)

    def _revived(self, turn: SavedTurn, session: str | None) -> Turn:
        answer = Answer(
            text=turn.answer,
            tokens=turn.ids,
            prompt_ids=self.path[: turn.prompt],
            finish=turn.finish,
            model=turn.model,
            seed=turn.seed,
            stopped_by=turn.stopped_by,
        )
        call = Call(session, *turn.cell) if turn.cell is not None and session is not None else None
        return Turn(0, None, Message("user", turn.question), answer, call, turn.system)


def _turn(turn: Turn, path: tuple[int, ...]) -> SavedTurn:
    answer, prompt = turn.answer, turn.answer.prompt_ids
    return SavedTurn(
        question=turn.question.content,
        answer=answer.text,
        ids=tuple(answer.tokens),
        prompt=len(prompt) if path[: len(prompt)] == prompt else 0,
        finish=answer.finish,
        model=answer.model,
        seed=answer.seed,
        stopped_by=answer.stopped_by,
        system=turn.system,
        cell=(turn.call.cell, turn.call.index) if turn.call is not None else None,
    )


# --- JSON ---------------------------------------------------------------------------------------


def dumped(saved: Saved) -> str:
    """The conversation as JSON, without its path.

    Raises:
        BadRequest: a text can't be written.
    """
    turns: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": turn.question},
                {"role": "assistant", "content": turn.answer, "ids": list(turn.ids)},
            ],
            "prompt": turn.prompt,
            "finish": turn.finish,
            "model": turn.model,
            "seed": turn.seed,
            "stopped_by": turn.stopped_by,
            "system": turn.system,
            "cell": list(turn.cell) if turn.cell is not None else None,
        }
        for turn in saved.turns
    ]
    text = json.dumps({"name": saved.name, "turns": turns}, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"@{saved.name} holds half of a surrogate pair, not text.") from None
    return text


def parsed(text: str, path: tuple[int, ...] = ()) -> Saved:
    """What ``dumped`` wrote, with its path.

    Raises:
        Malformed: it is anything else.
    """
    try:
        table = json.loads(text, parse_constant=_no_number)
        name, turns = _fields(table, "name", "turns")
        name = check_name(_text(name, _NAME))
        if type(turns) is not list or len(turns) > MAX_TURNS:
            raise Malformed("it has too many turns")
        made = tuple(_read(each, len(path)) for each in turns)
    except (BadRequest, ValueError) as error:
        raise Malformed(str(error)) from None
    except RecursionError:
        raise Malformed("it is nested too deeply") from None
    if sum(len(turn.ids) for turn in made) > MAX_IDS:
        raise Malformed("it has too many ids")
    return Saved(name, made, path)


def _read(value: Any, path: int) -> SavedTurn:
    messages, prompt, finish, model, seed, stopped, system, cell = _fields(
        value, "messages", "prompt", "finish", "model", "seed", "stopped_by", "system", "cell"
    )
    if type(messages) is not list or len(messages) != 2:
        raise Malformed("a turn isn't a question and an answer")
    asked, question = _fields(messages[0], "role", "content")
    told, answer, ids = _fields(messages[1], "role", "content", "ids")
    if (asked, told) != ("user", "assistant"):
        raise Malformed("a turn isn't a question and an answer")
    if type(ids) is not list or len(ids) > MAX_IDS:
        raise Malformed("an answer's ids aren't a list")
    if finish not in get_args(Finish):
        raise Malformed("an answer ended in no known way")
    return SavedTurn(
        question=_text(question),
        answer=_text(answer),
        ids=tuple(_whole(each, _ID) for each in ids),
        prompt=_whole(prompt, path + 1),
        finish=finish,
        model=_text(model, _NAME),
        seed=_whole(seed, _SEED),
        stopped_by=None if stopped is None else _text(stopped),
        system=None if system is None else _text(system),
        cell=None if cell is None else _cell(cell),
    )


def _fields(value: Any, *names: str) -> list[Any]:
    if type(value) is not dict or set(value) != set(names):
        raise Malformed(f"something isn't what it should be: {', '.join(names)}")
    return [value[name] for name in names]


def _text(value: Any, limit: int | None = None) -> str:
    if type(value) is not str or (limit is not None and len(value) > limit):
        raise Malformed("a text isn't one, or is too long")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Malformed("a text holds half of a surrogate pair") from None
    return value


def _whole(value: Any, below: int) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise Malformed("a number is out of range")
    return value


def _cell(value: Any) -> tuple[str, int]:
    if type(value) is not list or len(value) != 2:
        raise Malformed("a cell isn't one")
    return _text(value[0], _CELL), _whole(value[1], _ID)


def _no_number(word: str) -> None:
    raise Malformed(f"{word} is no number")
