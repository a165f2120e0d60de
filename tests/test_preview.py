"""What another budget would give up: said before, and as it then is; the engine's history."""

import random
import threading

import mlx.core as mx
import numpy as np
import pytest

from fakes import FakeModel, fake_engine, letters
from mlx_jupyter.cache.prefix_cache import PrefixCache
from mlx_jupyter.cache.preview import preview
from mlx_jupyter.cache.store import Store
from mlx_jupyter.engine.history import History
from mlx_jupyter.engine.status import MemoryUse
from mlx_jupyter.errors import BadRequest, EngineClosed

LAYERS = {
    "rows": ("rows", "rows"),
    "windows": ("rows", "window"),
    "states": ("rows", "state"),
}


def residences(view):
    """Every page, strip and snapshot → where it is, token by token."""
    found = {}
    for node in view.nodes():
        for page in node.pages:
            for at in range(page.start, page.end):
                found[node.id, "rows", at] = page.residence
        for strip in node.strips:
            for at in range(strip.start, strip.end):
                found[node.id, "window", at] = strip.residence
        for mark in node.marks:
            if mark.nbytes or mark.residence == "disk":
                found[node.id, "state", mark.at] = mark.residence
    return found


def predicted(view, told):
    found = residences(view)
    for each in told.leaving:
        places = range(each.start, each.end) if each.kind != "state" else [each.start]
        for at in places:
            found[each.node, each.kind, at] = each.to
    return {key: where for key, where in found.items() if where != "gone"}


def talk(engine, seed):
    """A few conversations that share beginnings; some grow, one is pinned."""
    chance = random.Random(seed)
    trunk = letters(chance.randrange(40, 700), seed)
    for i in range(chance.randrange(3, 7)):
        cut = chance.choice([0, len(trunk) // 2, len(trunk)])
        tokens = (*trunk[:cut], *letters(chance.randrange(20, 600), 100 * seed + i))
        engine.generate(tokens=tokens, max_tokens=4, owner=f"@b{i % 4}")
    if chance.random() < 0.5:
        engine.pin("@b0")


@pytest.mark.parametrize("kinds", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("seed", range(8))
def test_what_is_told_is_what_happens(kinds, seed):
    with fake_engine(FakeModel(kinds)) as engine:
        talk(engine, seed)
        used = engine.tree().live_bytes + engine.tree().stored_bytes
        for share in (0.9, 0.6, 0.3, 0.05):
            budget = int(used * share)
            before = engine.tree()
            told = engine.preview(budget)
            assert residences(engine.tree()) == residences(before)
            freed = engine.set_budget(budget)
            engine.check()
            after = engine.tree()
            now = {key: where for key, where in residences(after).items() if where != "gone"}
            assert after.budget == budget
            if any(each.to == "device" for each in told.leaving):
                break  # copies of pinned rows: roughly right only
            assert now == predicted(before, told)
            assert told.after == after.live_bytes + after.stored_bytes
            assert told.before - told.after == freed


def test_room_enough_gives_up_nothing(engine):
    engine.generate(tokens=letters(300), max_tokens=2)
    told = engine.preview(1 << 40)
    assert (told.leaving, told.before) == ((), told.after)
    assert engine.set_budget(1 << 30) == 0
    assert engine.status().memory.budget == 1 << 30


def test_a_budget_is_a_number_of_bytes_of_a_loaded_model(engine):
    with pytest.raises(BadRequest, match="negative"):
        engine.preview(-1)
    with pytest.raises(BadRequest, match="negative"):
        engine.set_budget(-1)
    with pytest.raises(BadRequest, match="other is not loaded"):
        engine.set_budget(1, "other")
    assert engine.preview(1, "other").leaving == ()


def test_a_preview_waits_for_the_request_that_runs(model, engine):
    going, on = threading.Event(), threading.Event()

    def block(_tokens):
        going.set()
        on.wait(60)

    model.before_call = block
    ticket = engine.submit(engine.request(tokens=letters(50), max_tokens=1))
    assert going.wait(60)
    told = []
    asking = threading.Thread(target=lambda: told.append(engine.preview(0)))
    asking.start()
    assert not told
    on.set()
    asking.join(60)
    assert ticket.ended
    assert [each.kind for each in told[0].leaving] == ["rows"]


def test_watchers_are_told_of_each_change_until_they_stop(engine):
    seen = []
    stop = engine.watch(lambda: seen.append(engine.tree().version))
    engine.generate(tokens=letters(20), max_tokens=1)
    engine.evict()
    assert seen == sorted(set(seen))
    assert len(seen) == 3  # what was read in is in place, the request's end, the eviction
    stop()
    stop()
    engine.clear()
    assert len(seen) == 3


def test_a_watcher_that_fails_harms_no_request(engine, caplog):
    def fail():
        raise ValueError("no")

    engine.watch(fail)
    assert engine.generate(tokens=letters(20), max_tokens=1).tokens
    assert "couldn't be told" in caplog.text


def test_history_has_a_sample_for_each_change(engine):
    first = engine.history()
    engine.generate(tokens=letters(300), max_tokens=2)
    engine.generate(tokens=letters(300, 1), max_tokens=2)
    samples = engine.history()
    assert samples[: len(first)] == first
    assert [sample.number for sample in samples] == list(range(len(samples)))
    assert samples[-1].stored > samples[-2].stored == 0
    now = engine.status().memory
    assert (samples[-1].live, samples[-1].stored) == (now.live, now.stored)
    assert samples[-1].weights == now.weights > 0


def test_history_is_bounded_and_leaves_out_what_is_the_same():
    now = [0.0]
    history = History(lambda: now[0], kept=3)
    for live in (1, 1, 2, 3, 3, 4):
        now[0] += 1
        history.add(MemoryUse(live=live))
    assert [(s.number, s.at, s.live) for s in history.samples()] == [
        (1, 3.0, 2),
        (2, 4.0, 3),
        (3, 6.0, 4),
    ]


def test_after_the_end_there_is_no_preview(engine):
    engine.close()
    with pytest.raises(EngineClosed):
        engine.preview(0)


def test_what_has_a_file_stays_on_disk(tmp_path):
    store = Store(tmp_path / "pages", budget=1 << 30)
    model = FakeModel()
    cache = PrefixCache(model.make_cache, budget=1 << 30, shelf=store.shelf("fake"))
    for seed in range(2):
        with cache.open(np.array(letters(300, seed))) as session:
            model(mx.array([letters(300, seed)]), cache=session.layers)
            session.advance(letters(300, seed))
    cache.tiers.save_all(lambda: False)
    assert store.flush()
    cache.tiers.note()
    told = preview(cache, 0)
    assert {each.to for each in told.leaving} == {"disk"}
    before = cache.view()
    cache.budget = 0
    cache.fit_live()
    cache.enforce()
    after = {key: where for key, where in residences(cache.view()).items() if where != "gone"}
    assert after == predicted(before, told)
    store.close()
