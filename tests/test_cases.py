"""Faults that users of this kind of software reported, each as the behaviour that is right.

Those that other files test on every family aren't repeated here: prompts around the sliding window
and a rewind after its ring has wrapped (``test_families.py::TestWindows``), a conversation of
twenty turns within a budget (``TestConversations``), snapshots no larger than their states
(``TestBytes``).
"""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from driver import Bench, prompt, uncompiled  # noqa: F401 - one is a fixture
from fake_tokenizer import chatml_tokenizer
from fakes import FakeModel
from mlx_jupyter.cache import layers as ly
from mlx_jupyter.cache.arrays import arrays_in
from mlx_jupyter.conversation.answer import Message
from mlx_jupyter.engine.budgets import Budgets, divided
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.request import Request, Ticket
from mlx_jupyter.models import memory
from mlx_jupyter.models.template import render
from tiny_models import FAMILIES, build

GIB = 1 << 30

THINKING = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content.split('</think>')[-1]"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""Asks for thinking, and shows an earlier answer without it."""


@pytest.mark.parametrize("kinds", [("rows", "state"), ("state",), ("window", "state", "rows")])
def test_a_second_turn_on_a_hybrid_model_recomputes_little(kinds: tuple[str, ...]) -> None:
    """The sentinel at the end of the generation prompt is replaced by the answer in turn 2.

    The state after the sentinel is of no use then; the one before it must have been kept. At most
    16 tokens beyond the new text are computed.
    """
    tokenizer = chatml_tokenizer(THINKING, ("<think>", "</think>", "<|im_start|>", "<|im_end|>"))
    with Engine(FakeModel(kinds), tokenizer) as engine:
        talk = [Message("system", "You answer in letters. " * 4), Message("user", "x" * 60)]
        for turn in range(3):
            before = render(tokenizer, talk)
            (end,) = [at for at, kind in before.marks if kind == "prompt"]
            answer = engine.generate(talk, max_tokens=20)
            talk += [Message("assistant", answer.text), Message("user", f"And {turn}?")]
            ids = render(tokenizer, talk).ids
            assert ids[:end] == before.ids[:end]
            assert ids[end + 12 :] != before.ids[end + 12 :]
            plan = engine.plan(talk)
            assert plan.recomputed <= len(ids) - end + 16
        engine.check()


@pytest.mark.parametrize("name", FAMILIES)
def test_editing_the_last_cell_keeps_the_earlier_places(name: str) -> None:
    """The last turn of a long conversation is edited again and again.

    Each time only that turn is computed, and every earlier turn can be gone back to at its end.
    """
    bench = Bench(name)
    history, ends = prompt(20, 99), []
    for turn in range(8):
        ends.append(len(history))
        question = [*history, *prompt(10, turn)]
        marks = [(at, "turn") for at in ends if at]
        run = bench.ask(question, 3, marks=[*marks, (len(question) - 2, "prompt")], verify=False)
        history = [*question, *run.tokens]
    last = ends[-1]
    for edit in range(6):
        edited = [*history[:last], *prompt(12, 50 + edit)]
        run = bench.ask(edited, 3, marks=[(last, "turn")], owner="cell", verify=edit == 5)
        assert run.computed <= 12 + 1
    for end in ends:
        other = [*history[:end], *prompt(8, 77)]
        assert bench.cache.plan(np.array(other, np.int32)).cached >= end
    bench.ask([*history[: ends[2]], *prompt(8, 77)], 3)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prefill_that_is_cancelled_over_and_over_adds_up_to_one(name: str) -> None:
    """Interrupted three times at 40 % of what was left, then finished: hardly a token twice."""
    bench = Bench(name)
    ids = prompt(200)
    spent = 0
    for _ in range(3):
        ticket = Ticket(Request(tokens=tuple(ids)))
        goal, fed = spent + 0.4 * (len(ids) - spent), spent

        def count(n: int, ticket: Ticket = ticket, goal: float = goal) -> None:
            nonlocal fed
            fed += n
            if fed >= goal:
                ticket.cancel()

        bench.model.before_call = count
        run = bench.ask(ids, 1, ticket=ticket)
        bench.model.before_call = None
        assert run.finish == "cancelled"
        spent += run.computed
    run = bench.ask(ids, 3)
    assert spent + run.computed <= 1.05 * len(ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_live_state_keeps_no_activations(name: str) -> None:
    """A recurrent state that is a view of a whole step's activations would pin them."""
    bench = Bench(name)
    bench.ask(prompt(130), 1, chunk=130 if not bench.model.family.chunk else 1, verify=False)
    for leaf in bench.cache.live.leaves.states:
        for array in arrays_in(leaf.cache):
            assert mx.get_array_buffer_size(array) <= array.nbytes + ly.PINNED


@pytest.mark.parametrize("name", ["llama", "gear"])
def test_five_hundred_requests_stay_in_memory(name: str) -> None:
    """Nothing grows beyond weights and budget, whatever was asked: measured, not counted."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    model = build(name)
    weights = memory.weights_bytes(model)
    budget = 2 << 20
    most = most_stored = 0
    with Engine(model, cache_bytes=budget) as engine:
        for i in range(500):
            ids = [*prompt(30, i % 5), *prompt(10 + i % 60, i)]
            engine.generate(tokens=ids, max_tokens=2, owner=f"cell {i % 50}")
            if i % 10 == 9:
                most = max(most, mx.get_active_memory() + mx.get_cache_memory() - before)
                most_stored = max(most_stored, engine.status().memory.stored)
        engine.check()
    assert budget / 4 < most_stored < most  # else there was nothing to bound, or to measure
    assert most <= (weights + budget) * 1.05


def default_budget() -> int:
    """What a single model's cache may take when the user set nothing."""
    return divided(["one"], {}, None, Budgets(None, None).room({}, 0))["one"]


@pytest.mark.parametrize("machine", [8, 16, 64, 512])
@pytest.mark.parametrize("taken", [0.0, 0.3, 0.6, 0.9])
def test_the_default_budget_fits_the_machine(
    machine: int, taken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of what is free beside the weights and the reserve, not a fixed size."""
    limit = machine * GIB
    free = int(limit * (1 - taken))
    now = memory.Memory(limit - free, limit - free, 0, limit, free, "cpu")
    monkeypatch.setattr(memory, "measured", lambda: now)
    budget = default_budget()
    assert budget <= max(memory.LEAST_CACHE, (free - memory.RESERVE * limit) / 2)
    assert budget >= memory.LEAST_CACHE
    if taken <= 0.6:
        assert budget >= 0.2 * free


def test_a_full_machine_still_gets_the_least_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of some pages must fit even when nothing seems to be free."""
    now = memory.Memory(0, 0, 0, 8 * GIB, 0, "cpu")
    monkeypatch.setattr(memory, "measured", lambda: now)
    assert default_budget() == memory.LEAST_CACHE
