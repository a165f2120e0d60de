"""Synthetic notebook sessions for ``retention.py``: seeded, in units of several tokens.

A unit of a synthetic trace stands for ``UNIT`` tokens, so that long conversations stay small here;
``scaled`` makes real lengths of them.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_jupyter.cache.trace import Step
from mlx_jupyter.cache.trie import Trie

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_jupyter.cache.view import MarkKind

UNIT = 16
"""Tokens that one unit of a synthetic trace stands for."""


def scaled(steps: Sequence[Step], factor: int) -> list[Step]:
    """The same requests with each token replaced by ``factor`` tokens of their own."""

    def longer(ids: np.ndarray) -> np.ndarray:
        return (ids[:, None] * factor + np.arange(factor, dtype=np.int32)).reshape(-1)

    return [
        Step(
            longer(s.ids),
            longer(s.generated),
            s.owner,
            tuple((at * factor, kind) for at, kind in s.marks),
        )
        for s in steps
    ]


def distinct(steps: Sequence[Step]) -> int:
    """Tokens that a cache without limit would hold in the end."""
    trie: Trie[_Span, _Span, Any] = Trie(_Span)
    for step in steps:
        trie.insert(np.concatenate([step.ids, step.generated]))
    return sum(len(node.tokens) for node in trie.nodes())


class _Span:
    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def split(self, at: int) -> tuple[_Span, _Span]:
        return _Span(self.start, at), _Span(at, self.end)


@dataclass(frozen=True)
class Style:
    """How a user works.

    Attributes:
        requests: how many requests.
        notebooks: open at once.
        moves: weights of append, retry, edit (rerun with the cells below), new chat, fork, switch
            to another chat of the notebook, switch to another notebook, rerun all cells.
        system: tokens of a notebook's system prompt (least, most).
        question: tokens of a question.
        document: tokens of a pasted document, and how often there is one.
        answer: tokens of an answer.
        thinking: tokens of thinking before it.
        longest: tokens after which a user begins a new chat.
        kept: whether the template keeps the thinking of earlier turns.
        sampled: answers differ each time; else a prompt that comes again gets its answer again.
    """

    requests: int = 120
    notebooks: int = 1
    moves: tuple[float, ...] = (8, 2, 2, 1, 1, 2, 0, 0.2)
    system: tuple[int, int] = (1000, 4000)
    question: tuple[int, int] = (60, 800)
    document: tuple[int, int, float] = (3000, 12000, 0.15)
    answer: tuple[int, int] = (200, 1200)
    thinking: tuple[int, int] = (0, 0)
    longest: int = 28_000
    kept: bool = True
    sampled: bool = True


STYLES = {
    "chats": Style(),
    "edits": Style(moves=(5, 3, 5, 1, 1, 1, 0, 0.3)),
    "notebooks": Style(notebooks=3, moves=(7, 2, 1, 1, 0.7, 1, 3, 0.2)),
    "thinking kept": Style(thinking=(400, 3000), moves=(8, 2, 1.5, 1, 1, 2, 0, 0.1)),
    "thinking stripped": Style(
        thinking=(400, 3000), kept=False, moves=(8, 2, 1.5, 1, 1, 2, 0, 0.1)
    ),
    "same answers": Style(sampled=False, moves=(5, 2, 3, 1, 1, 2, 0, 0.6)),
    "documents": Style(notebooks=2, document=(4000, 14000, 0.25), moves=(6, 3, 1, 1.5, 1, 2, 1, 0)),
}


@dataclass
class _Turn:
    question: list[int]
    thinking: list[int]
    answer: list[int]


@dataclass
class _Chat:
    owner: int
    system: list[int]
    turns: list[_Turn] = field(default_factory=list)


def session(style: Style, seed: int) -> list[Step]:
    """A user's requests, in units."""
    return list(itertools.islice(_User(style, seed).requests(), style.requests))


class _User:
    def __init__(self, style: Style, seed: int) -> None:
        self._style, self._random = style, random.Random(seed)
        self._owners = itertools.count()
        self._notebooks: list[list[_Chat]] = []
        self._systems: list[list[int]] = []
        for _ in range(style.notebooks):
            self._systems.append(self._text(style.system))
            self._notebooks.append([_Chat(next(self._owners), self._systems[-1])])
        self._book, self._chat = 0, self._notebooks[0][0]

    def requests(self) -> Iterator[Step]:
        """Endless."""
        moves: list[Callable[[], Iterator[Step]]] = [
            self._append,
            self._retry,
            self._edit,
            self._new,
            self._fork,
            self._switch,
            self._turn_to,
            self._all,
        ]
        while True:
            (move,) = self._random.choices(moves, self._style.moves)
            yield from move()

    def _append(self) -> Iterator[Step]:
        if self._length() * UNIT > self._style.longest:
            self._chat = self._add(_Chat(next(self._owners), self._systems[self._book]))
        self._chat.turns.append(_Turn(self._question(), [], []))
        yield self._ask(len(self._chat.turns) - 1)

    def _retry(self) -> Iterator[Step]:
        for _ in range(self._random.choice([1, 1, 2, 3]) if self._chat.turns else 0):
            yield self._ask(len(self._chat.turns) - 1)

    def _edit(self) -> Iterator[Step]:
        turns = self._chat.turns
        if not turns:
            return
        back = min(int(self._random.expovariate(0.5)), len(turns) - 1)
        at = len(turns) - 1 - back
        old = turns[at].question
        cut = self._random.randrange(len(old) + 1)
        turns[at].question = old[:cut] + self._text((16, 100)) + old[cut + 2 :]
        below = len(turns) if self._random.random() < 0.7 else at + 1
        for i in range(at, below):
            yield self._ask(i)
        del turns[below:]

    def _new(self) -> Iterator[Step]:
        self._chat = self._add(_Chat(next(self._owners), self._systems[self._book]))
        yield from self._append()

    def _fork(self) -> Iterator[Step]:
        turns = self._chat.turns
        if len(turns) < 2:
            return
        kept = turns[: self._random.randrange(1, len(turns))]
        copies = [_Turn(t.question, t.thinking, t.answer) for t in kept]
        self._chat = self._add(_Chat(next(self._owners), self._chat.system, copies))
        yield from self._append()

    def _switch(self) -> Iterator[Step]:
        chats = self._notebooks[self._book]
        weights = [1.5**i for i in range(len(chats))]  # later ones are nearer to the mind
        (self._chat,) = self._random.choices(chats, weights)
        yield from self._append()

    def _turn_to(self) -> Iterator[Step]:
        self._book = self._random.randrange(len(self._notebooks))
        self._chat = self._notebooks[self._book][-1]
        yield from self._append()

    def _all(self) -> Iterator[Step]:
        for chat in self._notebooks[self._book][-3:]:
            self._chat = chat
            for i in range(len(chat.turns)):
                yield self._ask(i)

    def _add(self, chat: _Chat) -> _Chat:
        self._notebooks[self._book].append(chat)
        return chat

    def _length(self) -> int:
        parts = [p for t in self._chat.turns for p in (t.question, t.thinking, t.answer)]
        return len(self._chat.system) + sum(map(len, parts))

    def _ask(self, at: int) -> Step:
        """Run the cell of a turn again (or first): a new answer replaces the old one."""
        chat, style = self._chat, self._style
        ids = list(chat.system)
        marks: list[tuple[int, MarkKind]] = [(len(ids), "system")]
        for turn in chat.turns[:at]:
            ids += turn.question
            marks.append((len(ids), "turn"))
            ids += [*_TAIL, *(turn.thinking if style.kept else []), *turn.answer]
            marks.append((len(ids), "turn"))
        asked = chat.turns[at]
        ids += asked.question
        marks.append((len(ids), "prompt"))
        ids += _TAIL
        mind = self._random if style.sampled else random.Random(str(ids))
        asked.thinking = self._text(style.thinking, mind) if style.thinking[1] else []
        asked.answer = self._text(style.answer, mind)
        made = [*asked.thinking, *asked.answer]
        return Step(np.array(ids, np.int32), np.array(made, np.int32), chat.owner, tuple(marks))

    def _question(self) -> list[int]:
        low, high, often = self._style.document
        return self._text((low, high) if self._random.random() < often else self._style.question)

    def _text(self, tokens: tuple[int, int], dice: random.Random | None = None) -> list[int]:
        dice = dice or self._random
        low, high = (max(1, n // UNIT) for n in tokens)
        # Short texts are more frequent than long ones.
        n = round(low * (high / low) ** dice.random())
        return [dice.randrange(1, 1 << 20) for _ in range(n)]


_TAIL = [0]
"""What the template puts before an answer, one unit."""
