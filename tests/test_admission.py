"""Who comes in, who goes for it, and what a failed load leaves behind."""

from __future__ import annotations

import gc
import json
import weakref
from typing import TYPE_CHECKING

import mlx.core as mx
import pytest

from fakes import FakeModel, fake_engine
from mlx_jupyter.engine.budgets import divided
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.request import Loading
from mlx_jupyter.errors import BadRequest, Interrupted, ModelDoesNotFit
from mlx_jupyter.models import eviction, memory, precision, tensors
from mlx_jupyter.models.admission import LEAST_TOKENS, Need, cache_bytes, chunk_bytes
from mlx_jupyter.models.mlx_limits import LEAST_BUFFERS, MOST_BUFFERS, Limits
from mlx_jupyter.models.pool import ModelPool
from mlx_jupyter.models.shortage import is_shortage
from test_pool import model_dir

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
IDS = [1, 2, 3, 4, 5, 6]


def need_of(directory: Path) -> Need:
    config = json.loads((directory / "config.json").read_text())
    return Need.of(precision.backend(), tensors.model_entries(directory), config)


def taken() -> int:
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two models whose weights are most of what they need."""
    kinds = {"kind": "F32", "hidden": 512}
    return model_dir(tmp_path, "first", **kinds), model_dir(tmp_path, "second", **kinds)


# --- what is needed ---------------------------------------------------------------------------


def test_a_need_is_weights_and_reserves_or_the_peak_of_loading():
    assert Need(weights=100, loading=150, chunk=20, cache=10).total == 150
    assert Need(weights=100, loading=110, chunk=20, cache=10).total == 130


def test_the_reserves_follow_from_the_config():
    config = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    }  # fmt: skip
    row = 2 * 30 * 3 * 64
    assert cache_bytes("cpu", config) == row * 4 * LEAST_TOKENS
    assert cache_bytes("metal", config) == row * 2 * LEAST_TOKENS
    assert chunk_bytes("cpu", config, 128) > chunk_bytes("metal", config, 128) > 128 * 576
    assert cache_bytes("cpu", {"text_config": config}) == cache_bytes("cpu", config)
    assert chunk_bytes("cpu", {"hidden_size": "many"}, 128) == 0


# --- limits -----------------------------------------------------------------------------------


def test_each_backend_gets_its_limits():
    assert Limits.for_machine("cpu", 16 * GIB, None, None) == Limits(16 * GIB, GIB)
    assert Limits.for_machine("cuda", 140 * GIB, None, None) == Limits(140 * GIB, MOST_BUFFERS)
    metal = Limits.for_machine("metal", 16 * GIB, None, 11 * GIB)
    assert metal == Limits(16 * GIB, GIB, 11 * GIB)
    small = Limits.for_machine("metal", 16 * GIB, 100 << 20, 11 * GIB)
    assert small == Limits(100 << 20, LEAST_BUFFERS, 100 << 20)
    assert Limits.for_machine("cpu", GIB, 8 * GIB, None).memory == GIB


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (MemoryError(), True),
        (RuntimeError("[metal::malloc] Resource limit (499000) exceeded."), True),
        (RuntimeError("[malloc] Unable to allocate 10 bytes."), True),
        (RuntimeError("cudaMallocAsync failed: out of memory."), True),
        (RuntimeError("shapes don't match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_a_refused_allocation_is_told_from_other_errors(error, answer):
    assert is_shortage(error) is answer


# --- budgets ----------------------------------------------------------------------------------


def test_budgets_are_parts_of_one_figure():
    assert divided([], {}, None, GIB) == {}
    one, two = divided(["a"], {}, None, GIB), divided(["a", "b"], {}, None, GIB)
    assert one["a"] == int(GIB * memory.CACHE_SHARE)
    assert two["a"] == two["b"] == one["a"] // 2


def test_a_users_own_budget_is_kept_as_far_as_it_fits():
    assert divided(["a", "b"], {"a": 100}, None, GIB)["a"] == 100
    assert divided(["a", "b"], {}, 300, GIB) == {"a": 300, "b": 300}
    assert divided(["a", "b"], {"a": 300, "b": 100}, None, 200) == {"a": 150, "b": 50}
    for room in (10, 1000, GIB):
        assert sum(divided(["a", "b", "c"], {"a": 700}, None, room).values()) <= room


def test_two_models_budgets_fit_what_is_there_and_grow_again(two):
    with Engine() as engine:
        engine.load(str(two[0]))
        alone = engine.status().memory.budget
        engine.load(str(two[1]))
        both = [each.budget for each in engine.status().holdings]
        assert len(both) == 2
        assert sum(both) <= memory.free_within(None) + (1 << 20)
        assert max(both) < 0.6 * alone
        engine.set_budget(1 << 20, "first")
        assert {each.name: each.budget for each in engine.status().holdings}["first"] == 1 << 20
        engine.unload("first")
        assert engine.status().memory.budget > 0.8 * alone


# --- coming and going -------------------------------------------------------------------------


def test_the_second_sends_the_first_away_and_it_comes_back(two):
    limit = taken() + int(1.2 * need_of(two[0]).total)
    with Engine(memory_limit=limit) as engine:
        engine.load(str(two[0]))
        alone = engine.generate(tokens=IDS, max_tokens=5)
        ticket = engine.submit_load(str(two[1]))
        told = [event.text for event in ticket.events() if isinstance(event, Loading)]
        assert told == ["Unloaded first to make room for second", "Loading second"]
        assert [info.name for info in engine.models()] == ["second"]
        ticket = engine.submit(engine.request(tokens=IDS, model="first", max_tokens=5))
        back = ticket.result()
        assert "Unloaded second to make room for first" in [
            event.text for event in ticket.events() if isinstance(event, Loading)
        ]
        assert back.tokens == alone.tokens
        assert back.logprobs == alone.logprobs
        assert [info.name for info in engine.models()] == ["first"]
        engine.check()


def test_with_the_first_pinned_the_second_is_refused_and_nothing_changed(two):
    limit = taken() + int(1.2 * need_of(two[0]).total)
    with Engine(memory_limit=limit) as engine:
        engine.load(str(two[0]))
        engine.generate(tokens=IDS, max_tokens=2)
        assert engine.pin("first") == engine.models()[0].weight_bytes
        before = engine.status()
        with pytest.raises(ModelDoesNotFit) as caught:
            engine.load(str(two[1]))
        error = caught.value
        assert error.needed == need_of(two[1]).total > error.free
        assert dict(error.holders)["first (pinned)"] == before.holdings[0].weights
        for part in ("needs", "are free", "held:", "Unload a model"):
            assert part in str(error)
        after = engine.status()
        assert after.models == before.models
        assert after.holdings == before.holdings
        assert after.memory.budget == before.memory.budget
        assert engine.generate(tokens=IDS, max_tokens=2).usage.prefilled == 1
        engine.unpin("first")
        assert engine.load(str(two[1])).name == "second"


def test_what_is_pinned_must_be_there_and_what_is_unpinned_pinned(two):
    with Engine() as engine:
        engine.load(str(two[0]))
        with pytest.raises(BadRequest, match="nothing to pin"):
            engine.pin("nobody")
        with pytest.raises(BadRequest, match="not pinned"):
            engine.unpin("first")


def test_who_was_used_longest_ago_goes_first_and_no_more_than_needed(tmp_path, monkeypatch):
    names = ("a", "b", "c", "d")
    places = {name: model_dir(tmp_path, name) for name in names}
    pool = ModelPool()
    for name in "abc":
        pool.load(str(places[name]))
    pool.touch(pool.find("a"))
    assert [m.info.name for m in eviction.in_order(pool.models())] == ["b", "c", "a"]
    pool.pin("b")
    gone: list[str] = []
    pool.on_unload = lambda loaded: gone.append(loaded.info.name)
    short = need_of(places["d"]).total - 1
    monkeypatch.setattr(eviction, "free_bytes", lambda pool: 10**9 if gone else short)
    pool.load(str(places["d"]))
    assert gone == ["c"]
    assert sorted(info.name for info in pool.infos()) == ["a", "b", "d"]


def test_requests_count_as_use(two):
    with Engine() as engine:
        for place in two:
            engine.load(str(place))
        assert engine.status().next_out.name == "first"
        engine.generate(tokens=IDS, model="first", max_tokens=1)
        status = engine.status()
        assert status.next_out.name == "second"
        assert all(status.now - each.used_at >= 0 for each in status.holdings)


def test_a_model_given_as_an_object_is_never_sent_away(tmp_path, monkeypatch):
    place = model_dir(tmp_path)
    pool = ModelPool()
    given = pool.adopt(FakeModel())
    monkeypatch.setattr(eviction, "free_bytes", lambda pool: 1000)
    with pytest.raises(ModelDoesNotFit):
        pool.load(str(place))
    assert pool.current is given


def test_caches_give_up_bytes_when_no_model_can_go(tmp_path, monkeypatch):
    place = model_dir(tmp_path)
    total = need_of(place).total
    with fake_engine() as engine:
        engine.generate(tokens=[*b"abcdefgh" * 40], max_tokens=2)
        held = engine.status().holdings[0].cached
        assert held > 0
        monkeypatch.setattr(
            eviction,
            "free_bytes",
            lambda pool: total - (1 if any(pool.held(m) for m in pool.models()) else 0),
        )
        engine.load(str(place))
        assert {each.name: each.cached for each in engine.status().holdings}["model"] == 0
        engine.check()


def test_an_evicted_models_arrays_are_gone_before_the_load_starts(two, monkeypatch):
    pool = ModelPool(memory_limit=taken() + int(1.2 * need_of(two[0]).total))
    before = taken()
    first = pool.load(str(two[0]))
    model, size = weakref.ref(first.model), first.info.weight_bytes
    seen: list[int] = []
    resolve = precision.settle

    def settle(*how):
        seen.append(mx.get_active_memory() - before)
        return resolve(*how)

    monkeypatch.setattr(precision, "settle", settle)
    pool.load(str(two[1]))
    assert model() is None
    assert seen[0] < 0.1 * size


@pytest.mark.parametrize("error", [RuntimeError("broken"), Interrupted(), KeyboardInterrupt()])
def test_a_failed_load_leaves_nothing_and_the_old_model_stays(two, error, monkeypatch):
    pool = ModelPool()
    first = pool.load(str(two[0]))
    before = taken()

    def fail(model):
        raise error

    monkeypatch.setattr("mlx_jupyter.models.pool.warm_up", fail)
    with pytest.raises(type(error)):
        pool.load(str(two[1]))
    assert pool.current is first
    assert [m.info.name for m in pool.models()] == ["first"]
    assert abs(taken() - before) < 0.02 * first.info.weight_bytes
    first.model(mx.array([IDS]))


def test_memory_refused_while_loading_is_the_same_error(two, monkeypatch):
    pool = ModelPool()

    def fail(model):
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    monkeypatch.setattr("mlx_jupyter.models.pool.warm_up", fail)
    with pytest.raises(ModelDoesNotFit):
        pool.load(str(two[0]))


def test_the_current_model_comes_back_after_a_load_that_failed(two, monkeypatch):
    limit = taken() + int(1.2 * need_of(two[0]).total)
    with Engine(memory_limit=limit) as engine:
        engine.load(str(two[0]))
        wanted = engine.generate(tokens=IDS, max_tokens=3).tokens
        (two[1] / "tokenizer.json").write_text("{}")
        with pytest.raises(Exception, match="second"):
            engine.load(str(two[1]))
        assert engine.models() == ()
        assert engine.generate(tokens=IDS, max_tokens=3).tokens == wanted
        assert engine.models()[0].name == "first"


def test_there_and_back_fifty_times_ends_where_it_began(tmp_path):
    kinds = {"kind": "F32", "hidden": 256}
    two = model_dir(tmp_path, "first", **kinds), model_dir(tmp_path, "second", **kinds)
    limit = taken() + int(1.2 * need_of(two[0]).total)
    with Engine(memory_limit=limit) as engine:
        solo = {}
        for _ in range(2):
            for place in two:
                engine.load(str(place))
                solo[place] = engine.generate(tokens=IDS, max_tokens=4)
        baseline = engine._thread.call(taken)
        for _ in range(50):
            for place in two:
                answer = engine.generate(tokens=IDS, model=str(place), max_tokens=4)
                assert answer.tokens == solo[place].tokens
                assert answer.logprobs == solo[place].logprobs
        assert len(engine.models()) == 1
        assert engine._thread.call(taken) == pytest.approx(baseline, rel=0.02)


# --- what is said -----------------------------------------------------------------------------


def test_ps_says_what_each_model_holds_and_what_goes_next(two):
    from mlx_jupyter.notebook.memory_reports import ps

    with Engine() as engine:
        assert "No model is loaded" in repr(ps(engine.status()))
        for place in two:
            engine.load(str(place))
        engine.pin("second")
        engine.generate(tokens=[3 + i % 50 for i in range(200)], model="first", max_tokens=2)
        engine.generate(tokens=[5 + i % 40 for i in range(200)], model="first", max_tokens=2)
        status = engine.status()
        told = repr(ps(status))
        for part in ("first", "second (current)", "pinned", "just now", "last used"):
            assert part in told
        assert "Next to go for another model: first" in told
        assert "Next to go from the cache of first: rows" in told
        first = {each.name: each for each in status.holdings}["first"]
        assert first.live > 0
        assert first.pages > 0
        assert first.snapshots == 0
        assert "<table>" in ps(status)._repr_html_()


def test_memory_is_told_as_it_is_measured(two):
    from mlx_jupyter.notebook.reports import status

    with Engine() as engine:
        engine.load(str(two[0]))
        engine.generate(tokens=IDS * 40, max_tokens=2)
        used = engine.status().memory
        assert used.weights + used.live + used.stored <= used.active * 1.02
        assert used.compute > 0
        assert 0 < used.free <= used.limit
        assert 0 < used.system_free < used.system_limit
        assert used.resident > used.active
        told = repr(status(engine.status()))
        for part in ("MLX memory", "free buffers", "activations at the peak", "system"):
            assert part in told


def test_a_name_without_an_at_sign_pins_a_model():
    from mlx_jupyter.notebook import commands
    from mlx_jupyter.notebook.grammar import parse_line

    assert parse_line("ps") == commands.Ps()
    assert parse_line("pin tiny") == commands.PinModel("tiny")
    assert parse_line("unpin tiny") == commands.PinModel("tiny", on=False)
    assert parse_line("pin @chat") == commands.Pin("chat")
    assert isinstance(parse_line("pin the tail on the donkey"), commands.Ask)
    assert isinstance(parse_line("ps what else?"), commands.Ask)
