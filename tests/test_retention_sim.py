"""The simulator of ``benchmarks/`` against the real cache: the same requests, the same restores."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from driver import ask, new_cache
from fakes import LETTERS, FakeModel
from mlx_jupyter.cache.trace import Step

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

BALLAST = 1 << 10
"""Numbers in a state: it weighs as much as some hundred tokens' rows, as in a hybrid model."""

CHUNK = 64


@pytest.fixture(scope="module")
def sim():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import retention_policies
        import retention_sim

        yield retention_sim, retention_policies
    finally:
        sys.path.remove(str(BENCHMARKS))


class Hybrid(FakeModel):
    """Rows and a heavy state."""

    def make_cache(self) -> list[object]:
        return [KVCache() if kind == "rows" else ArraysCache(3) for kind in self.kinds]

    def _state(self, inputs: mx.array, layer: ArraysCache, index: int) -> mx.array:
        if layer[2] is None:
            layer[2] = mx.zeros((1, 1, BALLAST))
        return super()._state(inputs, layer, index)


class User:
    """Works with a few chats: appends, asks again, edits, forks, turns to another one."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.system = self.text(100, 300)
        self.chats: list[list[tuple[list[int], list[int]]]] = [[]]
        self.now = 0

    def text(self, least: int, most: int) -> list[int]:
        return self.dice.choices(LETTERS, k=self.dice.randint(least, most))

    def next(self) -> tuple[list[int], tuple[tuple[int, str], ...], str]:
        """A prompt, its marks, its owner."""
        chat = self.chats[self.now]
        what = self.dice.choices(
            ["append", "again", "edit", "fork", "switch", "new"], [6, 2, 2, 1, 3, 1]
        )
        if what == ["new"]:
            self.chats.append([])
            self.now = len(self.chats) - 1
        elif what == ["switch"]:
            self.now = self.dice.randrange(len(self.chats))
        elif what == ["fork"] and chat:
            self.chats.append(chat[: self.dice.randint(1, len(chat))])
            self.now = len(self.chats) - 1
        chat = self.chats[self.now]
        if what == ["again"] and chat:
            question = chat.pop()[0]
        elif what == ["edit"] and chat:
            at = self.dice.randrange(len(chat))
            question = chat[at][0][: self.dice.randint(0, 40)] + self.text(5, 40)
            del chat[at:]
        else:
            question = self.text(20, 250)
        ids, marks = [*self.system], [(len(self.system), "system")]
        for asked, answer in chat:
            ids += [*asked, *answer]
            marks.append((len(ids), "turn"))
        self.question = question
        return [*ids, *question], tuple(marks), f"chat {self.now}"

    def answered(self, answer: list[int]) -> None:
        self.chats[self.now].append((self.question, answer))


@pytest.fixture
def exact_sizes(monkeypatch) -> None:
    """The allocator rounds up the buffers of so small a model, in which the two differ."""

    def nbytes(arrays) -> int:
        return arrays.nbytes if isinstance(arrays, mx.array) else sum(map(nbytes, arrays))

    monkeypatch.setattr("mlx_jupyter.cache.pages.mx.get_array_buffer_size", nbytes)


@pytest.mark.usefixtures("exact_sizes")
@pytest.mark.parametrize("kinds", [("rows", "rows"), ("rows", "state")])
@pytest.mark.parametrize("tokens", [600, 1600, math.inf])
@pytest.mark.parametrize("seed", range(2))
def test_it_restores_where_the_cache_does(sim, kinds, tokens: float, seed: int) -> None:
    """``tokens``: the budget, in rows."""
    retention_sim, policies = sim
    model = Hybrid(kinds)
    row_bytes = 16 * kinds.count("rows")
    state_bytes = (4 * BALLAST + 16) * kinds.count("state")
    budget = tokens * row_bytes + 6 * state_bytes
    cache = new_cache(model, budget=int(min(budget, 1 << 40)))
    twin = retention_sim.SimCache(
        retention_sim.Model(row_bytes, state_bytes), budget, policies.Ours(), chunk=CHUNK
    )
    user = User(seed)
    for number in range(30):
        ids, marks, owner = user.next()
        run = ask(cache, model, ids, 24, chunk=CHUNK, owner=owner, marks=marks)
        step = Step(np.array(ids, np.int32), np.array(run.tokens, np.int32), owner, marks)
        simulated = len(ids) - twin.request(step)
        assert simulated == run.cached, (number, len(ids))
        assert twin.nbytes() == cache.nbytes(), number
        user.answered(run.tokens)
