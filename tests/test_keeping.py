"""Conversations as files: saved, restored, lent, refused and forgotten."""

from __future__ import annotations

import json
import os
import random
import stat
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driver import Bench, new_cache, prompt, uncompiled
from fake_tokenizer import chatml_tokenizer
from fakes import VOCAB, FakeModel, fake_engine
from mlx_jupyter import Conversation
from mlx_jupyter.cache import bundle, export, luggage
from mlx_jupyter.cache.bundle import SUFFIX, Bundle
from mlx_jupyter.cache.store import Store
from mlx_jupyter.conversation import keeping
from mlx_jupyter.conversation.conversation import turns_of
from mlx_jupyter.conversation.saved import Malformed, Saved, SavedTurn, dumped, parsed
from mlx_jupyter.conversation.turn import Call
from mlx_jupyter.engine import spot_check
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.private import names, place
from mlx_jupyter.engine.thread import EngineThread
from mlx_jupyter.engine.workshop import Workshop
from mlx_jupyter.errors import BadRequest, Cancelled, ModelNotFound
from mlx_jupyter.models.pool import ModelPool
from mlx_jupyter.models.sources import DEFAULT_MODEL
from tiny_models import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mlx_jupyter.engine.keeping import Restored

__all__ = ["uncompiled"]

LAYOUTS = [
    ("rows", "rows"),
    ("rows", "window"),
    ("rows", "state"),
    ("rows", "window", "state"),
    ("window",),
    ("state",),
]
SYSTEM = "Say it in few words. " * 20
HOW = {"max_tokens": 20}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MLX_JUPYTER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def known_as(patch: pytest.MonkeyPatch, now: dict[str, str]) -> None:
    """Give the fake models an identity, and a vocabulary."""
    adopt = ModelPool.adopt

    def known(self: ModelPool, model: Any, tokenizer: Any) -> Any:
        loaded = adopt(self, model, tokenizer)
        loaded.identity = now["is"] or None
        loaded.vocabulary = VOCAB
        return loaded

    patch.setattr(ModelPool, "adopt", known)


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Fake models have this identity."""
    now = {"is": "a fake"}
    known_as(monkeypatch, now)
    return now


@pytest.fixture
def kernel(identity: dict[str, str]) -> Callable[..., Engine]:
    """Makes engines as fresh kernels have them, without a store."""
    return lambda kinds=("rows", "rows"), **options: fake_engine(FakeModel(kinds), **options)


@pytest.fixture
def stored(
    kernel: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Engine]:
    """Makes engines on one store."""
    monkeypatch.delenv("MLX_JUPYTER_STORE", raising=False)
    monkeypatch.setattr("mlx_jupyter.engine.base.EngineThread", partial(EngineThread, grace=0))
    return partial(kernel, store=tmp_path / "pages")


def talk(engine: Engine, name: str = "demo") -> Conversation:
    made = Conversation(engine, name, system=SYSTEM)
    made.ask("What is rain? " * 5, **HOW)
    made.ask("And snow?", **HOW)
    return made


def restore(engine: Engine, name: str | None, path: Any = None) -> Restored:
    return keeping.wait(keeping.restore(engine, name, path), "nothing")


def next_answer(kernel: Callable[..., Engine], kinds: tuple[str, ...]) -> Any:
    with kernel(kinds) as engine:
        return talk(engine).ask("Then?", **HOW)


# --- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", LAYOUTS)
def test_a_kept_conversation_goes_on_in_another_kernel(
    kernel: Callable[..., Engine], kinds: tuple[str, ...]
) -> None:
    wanted = next_answer(kernel, kinds)
    with kernel(kinds) as engine:
        receipt = talk(engine).save()
        engine.check()
    assert receipt.turns == 2
    assert receipt.tokens == wanted.usage.cached
    with kernel(kinds) as engine:
        back = Conversation.restore(engine, name="demo")
        engine.check()
        assert [turn.question.content for turn in back.turns] == ["What is rain? " * 5, "And snow?"]
        answer = back.ask("Then?", **HOW)
        engine.check()
        assert answer.prompt_ids == wanted.prompt_ids
        assert answer.tokens == wanted.tokens
        assert answer.usage == wanted.usage


@pytest.mark.parametrize("kinds", [("rows", "rows"), ("rows", "window"), ("window",)])
def test_a_file_of_someone_elses_goes_on_too(
    kernel: Callable[..., Engine], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    wanted = next_answer(kernel, kinds)
    with kernel(kinds) as engine:
        receipt = talk(engine).save(tmp_path / "mine")
    assert receipt.path == tmp_path / f"mine{SUFFIX}"
    with kernel(kinds) as engine:
        found = restore(engine, "yours", tmp_path / "mine")
        assert (found.lent, found.why) == (True, "")
        assert found.cached == receipt.tokens
        answer = Conversation(engine, "yours").ask("Then?", **HOW)
        engine.check()
        assert answer.tokens == wanted.tokens
        assert answer.usage == wanted.usage


def test_snapshots_of_whole_numbers_are_not_taken_from_outside(
    kernel: Callable[..., Engine], tmp_path: Path
) -> None:
    kinds = ("rows", "state")
    with kernel(kinds) as engine:
        talk(engine).save(tmp_path / "mine")
    with kernel(kinds) as engine:
        found = restore(engine, "demo", tmp_path / "mine")
        assert found.cached == 0
        assert "nothing in its pages can be compared" in found.why
        assert Conversation(engine, "demo").ask("Then?", **HOW).usage.cached == 0
        engine.check()


def test_what_lies_on_disk_is_saved_too(stored: Callable[..., Engine], tmp_path: Path) -> None:
    for kinds in LAYOUTS:
        with stored(kinds) as engine:
            engine.clear_store()
            chat = talk(engine)
            assert engine.settle_store(timeout=30)
            engine.evict()
            receipt = chat.save()
            engine.check()
            assert receipt.tokens > 500
            engine.clear_store()
        with stored(kinds) as engine:
            engine.clear_store()  # the end of the first one has saved again
            assert restore(engine, "demo").cached == receipt.tokens
            engine.check()


def test_what_is_here_already_is_not_replaced(
    stored: Callable[..., Engine], tmp_path: Path
) -> None:
    with stored() as engine:
        talk(engine).save(tmp_path / "mine")
    with stored() as engine:
        found = restore(engine, "demo", tmp_path / "mine")
        assert found.cached > 500
        assert {p.lent for n in engine.tree().nodes() for p in n.pages} == {None}
        assert not found.lent


def test_a_conversation_of_several_systems_keeps_them(kernel: Callable[..., Engine]) -> None:
    with kernel() as engine:
        chat = talk(engine)
        chat.ask("In verse?", system="Rhyme.", **HOW)
        messages = turns_of(engine).messages(chat.turns[-1].id)
        chat.save()
    with kernel() as engine:
        back = Conversation.restore(engine, name="demo")
        assert back.messages == messages
        assert back.turns[0].answer.prompt_ids == ()  # not the beginning of the last one's
        again = keeping.wait(keeping.save(engine, "demo"), "").path
        assert restore(engine, "again", again).turns == 3


def test_an_interrupted_answer_stays_one(kernel: Callable[..., Engine]) -> None:
    with kernel() as engine:
        ticket = engine.submit(engine.request("Tell me.", max_tokens=500))
        next(iter(ticket.events()))
        ticket.cancel()
        answer = ticket.result()
        turns = turns_of(engine)
        place_ = turns.start("demo")
        turns.commit(place_, answer.messages[0], answer)
        keeping.wait(keeping.save(engine, "demo"), "")
    with kernel() as engine:
        (turn,) = Conversation.restore(engine, name="demo").turns
        assert turn.answer.finish == "cancelled"
        assert turn.answer.text == answer.text
        assert turn.answer.tokens == answer.tokens


def test_a_restored_one_is_saved_with_its_tokens_again(
    kernel: Callable[..., Engine], tmp_path: Path
) -> None:
    with kernel() as engine:
        first = talk(engine).save()
    with kernel() as engine:
        again = Conversation.restore(engine, name="demo").save(tmp_path / "b")
        assert (again.tokens, again.nbytes) == (first.tokens, first.nbytes)


def test_lent_pages_are_not_saved_where_they_would_be_believed(
    kernel: Callable[..., Engine], tmp_path: Path
) -> None:
    with kernel() as engine:
        talk(engine).save(tmp_path / "mine")
    with kernel() as engine:
        back = Conversation.restore(engine, tmp_path / "mine")
        back.ask("Then?", **HOW)
        assert back.save().tokens == 0
        assert back.save(tmp_path / "on").tokens > 500


def test_a_cell_replaces_the_turn_that_it_made(kernel: Callable[..., Engine]) -> None:
    with kernel() as engine:
        turns, call = turns_of(engine), None
        turns.caller = lambda: call
        chat = Conversation(engine, "demo")
        for cell in "abc":
            call = Call("before", cell, 0, cell)
            chat.ask(f"{cell}?", max_tokens=3)
        chat.save()
    with kernel() as engine:
        turns = turns_of(engine)
        turns.caller = lambda: Call("now", "x", 0, "1")
        chat = Conversation.restore(engine, name="demo")
        turns.caller = lambda: Call("now", "b", 0, "2")
        chat.ask("b again?", max_tokens=3)
        assert [t.question.content for t in chat.turns] == ["a?", "b again?"]
        turns.caller = lambda: Call("now", "c", 0, "3")
        chat.ask("c again?", max_tokens=3)
        assert [t.question.content for t in chat.turns] == ["a?", "b again?", "c again?"]


# --- lent ---------------------------------------------------------------------------------------


@pytest.fixture(params=[("rows", "rows"), ("rows", "window"), ("window",)], ids="-".join)
def lent(
    stored: Callable[..., Engine], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    """An engine where @demo came from outside; its store has nothing."""
    with stored(request.param) as engine:
        talk(engine).save(tmp_path / "mine")
    with stored(request.param) as engine:
        engine.clear_store()
        assert restore(engine, "demo", tmp_path / "mine").lent
        yield engine


def test_nobody_else_goes_on_from_lent_pages(lent: Engine) -> None:
    chat = Conversation(lent, "demo")
    answer = chat.ask("Then?", **HOW)
    assert answer.usage.cached > 500
    messages = answer.messages[:-1]
    assert lent.plan(messages).cached == 0
    assert lent.plan(messages, owner="@demo").cached > 500
    stranger = lent.generate(messages, **HOW)
    assert (stranger.usage.cached, stranger.tokens) == (0, answer.tokens)
    lent.check()
    # Now they were computed here, and serve everyone.
    assert lent.generate(messages, **HOW).usage.prefilled == 1
    assert lent.plan(messages, owner="@demo").recomputed == 1


def test_a_branch_from_a_lent_one_computes_for_itself(lent: Engine) -> None:
    chat = Conversation(lent, "demo")
    assert chat.fork("other", 1).ask("And hail?", **HOW).usage.cached == 0
    lent.check()
    assert chat.ask("Then?", **HOW).usage.cached > 500
    lent.check()


def test_nothing_lent_reaches_the_store(lent: Engine) -> None:
    chat = Conversation(lent, "demo")
    chat.ask("Then? " * 100, **HOW)
    assert lent.settle_store(timeout=30)
    assert lent.status().store.files == 0
    lent.generate("Something else. " * 30, **HOW)
    lent.evict()
    assert lent.settle_store(timeout=30)
    lost = [p for n in lent.tree().nodes() for p in n.pages if p.lent]
    assert lost
    assert not sum(page.nbytes for page in lost)
    assert "disk" not in {page.residence for page in lost}
    lent.check()


def test_a_dropped_name_takes_its_loan_along(lent: Engine) -> None:
    turns_of(lent).drop("demo")
    lent.release("@demo")
    chat = Conversation(lent, "demo", system=SYSTEM)
    assert chat.ask("What is rain? " * 5, **HOW).usage.cached == 0
    lent.check()


# --- not used -----------------------------------------------------------------------------------


def test_the_model_that_a_prompt_would_load_is_loaded(
    kernel: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never one that the file names."""
    with kernel() as engine:
        receipt = talk(engine).save()
    asked = []

    def load(self: Workshop, name: str, *_: Any) -> Any:
        asked.append(name)
        if len(asked) == 1:
            raise ModelNotFound(name, ["nothing"])
        self.adopt(FakeModel(), chatml_tokenizer())
        return self.find(None)

    monkeypatch.setattr(Workshop, "load", load)
    with Engine() as engine:
        found = restore(engine, "demo")
        assert (found.turns, found.cached) == (2, 0)
        assert "isn't loaded" in found.why
        turns_of(engine).drop("demo")
        ticket = keeping.restore(engine, "demo", None, "mine")
        assert keeping.wait(ticket, "").cached == receipt.tokens
        assert asked == [DEFAULT_MODEL, "mine"]
        engine.check()


def test_another_model_gets_the_turns_alone(
    kernel: Callable[..., Engine], identity: dict[str, str]
) -> None:
    wanted = next_answer(kernel, ("rows", "rows"))
    with kernel() as engine:
        talk(engine).save()
    identity["is"] = "another fake"
    with kernel() as engine:
        found = restore(engine, "demo")
        assert found.cached == 0
        assert "another model" in found.why
        answer = Conversation(engine, "demo").ask("Then?", **HOW)
        assert answer.prompt_ids == wanted.prompt_ids
        assert answer.usage.cached == 0


def test_a_model_without_an_identity_keeps_no_pages(
    kernel: Callable[..., Engine], identity: dict[str, str]
) -> None:
    identity["is"] = ""
    with kernel() as engine:
        receipt = talk(engine).save()
        assert receipt.tokens == 0
        assert "no identity" in receipt.why
    with kernel() as engine:
        assert restore(engine, "demo").why == "the file has no pages"


def test_exactness_mode_computes_them_again(kernel: Callable[..., Engine]) -> None:
    with kernel() as engine:
        talk(engine).save()
    with kernel(exact=True) as engine:
        found = restore(engine, "demo")
        assert found.cached == 0
        assert "exactness" in found.why
        Conversation(engine, "demo").ask("Then?", **HOW)
        engine.check()


def test_ids_that_another_model_lacks_are_left_out(
    kernel: Callable[..., Engine], identity: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with kernel() as engine:
        talk(engine).save()
    identity["is"] = "another fake"
    adopt = ModelPool.adopt

    def smaller(self: ModelPool, model: Any, tokenizer: Any) -> Any:
        loaded = adopt(self, model, tokenizer)
        loaded.vocabulary = 100
        return loaded

    monkeypatch.setattr(ModelPool, "adopt", smaller)
    with kernel() as engine:
        turns = Conversation.restore(engine, name="demo").turns
        assert [turn.answer.tokens for turn in turns] == [(), ()]
        assert all(turn.answer.text for turn in turns)


def test_without_a_known_vocabulary_no_pages_are_used(
    kernel: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with kernel() as engine:
        talk(engine).save()
    adopt = ModelPool.adopt

    def unknown(self: ModelPool, model: Any, tokenizer: Any) -> Any:
        loaded = adopt(self, model, tokenizer)
        loaded.vocabulary = 0
        return loaded

    monkeypatch.setattr(ModelPool, "adopt", unknown)
    with kernel() as engine:
        found = restore(engine, "demo")
        assert (found.turns, found.cached) == (2, 0)
        assert "vocabulary" in found.why


def test_only_what_fits_into_the_budget_is_read(kernel: Callable[..., Engine]) -> None:
    with kernel() as engine:
        whole = talk(engine).save()
    with kernel(cache_bytes=10_000) as engine:
        found = restore(engine, "demo")
        assert found.cached < whole.tokens
        engine.check()
        Conversation(engine, "demo").ask("Then?", **HOW)
        engine.check()


def altered(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Write a file's tensors anew, so that its checksum is right again."""
    with Bundle(path) as file:
        meta = {k: v for k, v in file.meta.items() if k not in ("checksum", "format", "version")}
        data = {name: np.array(file.read(name).data) for name in file.tensors}
        entries = list(file.tensors.values())
    change(data)
    pieces = [bundle.Piece((e,), partial(list, [data[e.name]])) for e in entries]
    bundle.write(path, meta, pieces)


@pytest.mark.parametrize("number", [1e9, float("nan"), float("inf")])
def test_pages_that_the_model_would_not_compute_are_not_used(
    kernel: Callable[..., Engine], tmp_path: Path, number: float
) -> None:
    wanted = next_answer(kernel, ("rows", "rows"))
    with kernel() as engine:
        path = talk(engine).save(tmp_path / "mine").path

    def change(data: dict[str, np.ndarray]) -> None:
        for name, raw in data.items():
            if name.startswith("rows."):
                raw.view(np.float32)[:] = number

    altered(path, change)
    with kernel() as engine:
        found = restore(engine, "demo", path)
        assert found.cached == 0
        assert "its pages" in found.why
        assert engine.tree().root.children == ()
        assert Conversation(engine, "demo").ask("Then?", **HOW).tokens == wanted.tokens
        engine.check()


def test_pages_of_other_tokens_are_found_out_wherever_one_looks(
    kernel: Callable[..., Engine], tmp_path: Path
) -> None:
    with kernel() as engine:
        path = talk(engine).save(tmp_path / "mine").path

    def change(data: dict[str, np.ndarray]) -> None:
        ids = data["tokens"].view("<i4")
        ids[:] = np.roll(ids, 1)

    altered(path, change)
    with kernel() as engine:
        assert restore(engine, "demo", path).cached == 0


# --- refused ------------------------------------------------------------------------------------


def test_a_name_that_is_taken(kernel: Callable[..., Engine], tmp_path: Path) -> None:
    with kernel() as engine:
        chat = talk(engine)
        path = chat.save(tmp_path / "mine").path
        chat.save()
        for where in (None, path):
            with pytest.raises(
                BadRequest, match=r"@demo exists already. Drop it first \(%llm drop"
            ):
                restore(engine, "demo", where)
        assert restore(engine, "other", path).turns == 2
        with pytest.raises(BadRequest, match="exists already"):
            restore(engine, None, path)


def test_there_is_nothing_to_save_or_restore(kernel: Callable[..., Engine], tmp_path: Path) -> None:
    with kernel() as engine:
        with pytest.raises(BadRequest, match="There is no branch @demo"):
            keeping.save(engine, "demo")
        Conversation(engine, "demo")
        with pytest.raises(BadRequest, match="no turns yet"):
            keeping.save(engine, "demo")
        with pytest.raises(BadRequest, match="There is no saved conversation @demo: give its file"):
            restore(engine, "demo")
        with pytest.raises(BadRequest, match="There is no file"):
            restore(engine, "demo", tmp_path / "nowhere")
        with pytest.raises(BadRequest, match="its name, or its file"):
            keeping.restore(engine, None)
        with pytest.raises(BadRequest, match="no branch name"):
            keeping.restore(engine, "../demo")


def test_only_our_own_files_are_replaced(kernel: Callable[..., Engine], tmp_path: Path) -> None:
    with kernel() as engine:
        chat = talk(engine)
        path = chat.save(tmp_path / "a").path
        assert chat.save(path).path == path
        other = tmp_path / "weights.safetensors"
        mx.save_safetensors(str(other), {"a": mx.zeros(3)})
        before = other.read_bytes()
        (tmp_path / f"dir{SUFFIX}").mkdir()
        (tmp_path / f"link{SUFFIX}").symlink_to(path)
        for name in ("weights.safetensors", "dir", "link"):
            with pytest.raises(BadRequest, match="is there already and no saved conversation"):
                chat.save(tmp_path / name)
        assert other.read_bytes() == before
        with pytest.raises(BadRequest, match="can't be written"):
            chat.save(tmp_path / "no such place" / "a")
        assert not [p for p in tmp_path.iterdir() if p.name.endswith(".part")]


def test_files_are_for_their_user_alone(kernel: Callable[..., Engine], tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with kernel() as engine:
            chat = talk(engine)
            for receipt in (chat.save(), chat.save(tmp_path / "a")):
                assert stat.S_IMODE(receipt.path.stat().st_mode) == 0o600
            assert stat.S_IMODE(place("demo", make=False).parent.stat().st_mode) == 0o700
    finally:
        os.umask(old)


def test_a_private_place_that_others_may_write_to_is_not_believed(
    kernel: Callable[..., Engine],
) -> None:
    with kernel() as engine:
        talk(engine).save()
    place("demo", make=False).parent.chmod(0o777)
    with kernel() as engine:
        with pytest.raises(BadRequest, match="others may write"):
            restore(engine, "demo")
        with pytest.raises(BadRequest, match="others may write"):
            talk(engine).save()


@pytest.mark.parametrize("name", ["demo", "Demo", "ärger", "a" * 300, "..x"[2:], "x-1.2_3"])
def test_every_name_has_a_private_file_of_its_own(kernel: Callable[..., Engine], name: str) -> None:
    path = place(name, make=True)
    assert len(path.name) < 100
    assert path.parent.name == "conversations"
    with kernel() as engine:
        talk(engine, name).save()
    assert path.exists()
    assert names() == ([name] if name.isascii() and len(name) < 40 else [])
    with kernel() as engine:
        assert restore(engine, name).name == name


def resealed(raw: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with its header changed, and its checksum right again."""
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    change(table)
    table["__metadata__"]["checksum"] = "0" * 16
    text = json.dumps(table, separators=(",", ":")).encode()
    data = raw[8 + length :]
    digits = xxhash.xxh3_64(text + data).hexdigest()
    text = text.replace(b'"checksum":"' + b"0" * 16, f'"checksum":"{digits}'.encode(), 1)
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file."""
    with pytest.MonkeyPatch.context() as patch:
        known_as(patch, {"is": "a fake"})
        with fake_engine(FakeModel(("rows", "window"))) as engine:
            chat = Conversation(engine, "demo", system="Hm.")
            chat.ask("What?", max_tokens=4)
            chat.ask("Why?", max_tokens=4)
            return chat.save(tmp_path_factory.mktemp("sample") / "a").path.read_bytes()


def _meta(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table["__metadata__"].__setitem__(key, value)


def _in(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def changed(table: dict[str, Any]) -> None:
        inner = json.loads(table["__metadata__"][key])
        change(inner)
        table["__metadata__"][key] = json.dumps(inner)

    return changed


def _tensor(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table[name].update(fields)


HOSTILE: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("version", _meta("version", "2"), "no saved conversation: its format is '2'"),
    ("format", _meta("format", "mlx-jupyter page"), "no saved conversation"),
    ("no meta", lambda t: t["__metadata__"].pop("conversation"), "is damaged"),
    ("not texts", _meta("conversation", 3), "aren't texts"),
    ("no json", _meta("conversation", "{"), "is damaged"),
    ("deep", _meta("conversation", "[" * 100_000), "is damaged"),
    ("long number", _meta("conversation", "9" * 10_000), "is damaged"),
    ("a path as name", _in("conversation", lambda c: c.update(name="../../x")), "no branch name"),
    ("a list as name", _in("conversation", lambda c: c.update(name=[])), "isn't one"),
    ("more fields", _in("conversation", lambda c: c.update(code="1")), "isn't what it should"),
    ("turns", _in("conversation", lambda c: c.update(turns={})), "too many turns"),
    ("seed", _in("conversation", lambda c: c["turns"][0].update(seed=-1)), "out of range"),
    ("finish", _in("conversation", lambda c: c["turns"][0].update(finish="")), "no known way"),
    ("prompt", _in("conversation", lambda c: c["turns"][0].update(prompt=10**9)), "out of range"),
    ("bool", _in("conversation", lambda c: c["turns"][0].update(prompt=True)), "out of range"),
    ("cell", _in("conversation", lambda c: c["turns"][0].update(cell=["a"])), "a cell isn't"),
    (
        "role",
        _in("conversation", lambda c: c["turns"][0]["messages"][0].update(role="system")),
        "a question and an answer",
    ),
    (
        "id",
        _in("conversation", lambda c: c["turns"][0]["messages"][1].update(ids=[2**40])),
        "out of range",
    ),
    (
        "vocabulary",
        _in("conversation", lambda c: c["turns"][0]["messages"][1].update(ids=[260])),
        "outside the vocabulary",
    ),
    (
        "surrogate",
        _in("conversation", lambda c: c["turns"][0].update(system="\ud800")),
        "surrogate",
    ),
    ("tokens", lambda t: t.pop("tokens"), "is damaged"),
    ("token type", _tensor("tokens", dtype="F32"), "no tokens"),
    ("pages", _meta("pages", "[]"), "aren't described"),
    ("rows", _in("pages", lambda p: p["rows"].append([0, 10**12])), "leave gaps"),
    ("row type", _in("pages", lambda p: p["rows"].__setitem__(0, ["0", "9"])), "aren't described"),
    ("windows", _in("pages", lambda p: p["windows"].append([0, 1])), "overlap"),
    ("marks", _in("pages", lambda p: p["marks"].append([10**9, "turn", None])), "nowhere"),
    ("mark kind", _in("pages", lambda p: p["marks"].append([99, "code", None])), "nowhere"),
    ("many marks", _in("pages", lambda p: p.update(marks=[[1, "turn", None]] * 99_999)), "many"),
    ("order", _in("pages", lambda p: p.update(order="[[1],[0]]")), "other layers"),
    ("dtype", _tensor("rows.0.0.0", dtype="U32"), "this model's"),
    ("missing", _in("pages", lambda p: p["rows"].append([p["rows"][-1][1], 300])), "is damaged"),
    ("overlap", _tensor("rows.0.0.1", data_offsets=[0, 8]), "is damaged"),
    ("giant", _tensor("rows.0.0.0", shape=[1 << 62, 1 << 62]), "is damaged"),
    ("negative", _tensor("rows.0.0.0", shape=[-1]), "is damaged"),
]


@pytest.mark.parametrize(("change", "told"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE])
def test_a_file_that_lies_is_refused_in_one_line(
    kernel: Callable[..., Engine],
    sample: bytes,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    told: str,
) -> None:
    path = tmp_path / f"a{SUFFIX}"
    path.write_bytes(resealed(sample, change))
    with kernel(("rows", "window")) as engine:
        with pytest.raises(BadRequest, match=told) as caught:
            restore(engine, "demo", path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        assert not turns_of(engine).branches
        assert engine.tree().root.children == ()


def test_the_sample_itself_is_sound(
    kernel: Callable[..., Engine], sample: bytes, tmp_path: Path
) -> None:
    path = tmp_path / f"a{SUFFIX}"
    path.write_bytes(resealed(sample, lambda _: None))
    with kernel(("rows", "window")) as engine:
        assert restore(engine, "demo", path).cached > 50
        engine.check()


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"", "no saved conversation"),
        (b"\0" * 7, "no saved conversation"),
        (b"\xff" * 4096, "no saved conversation"),
        (b"plain text", "no saved conversation"),
    ],
)
def test_what_is_no_file_of_ours(
    kernel: Callable[..., Engine], tmp_path: Path, raw: bytes, told: str
) -> None:
    path = tmp_path / f"a{SUFFIX}"
    path.write_bytes(raw)
    with kernel() as engine, pytest.raises(BadRequest, match=told):
        restore(engine, "demo", path)


def test_a_header_that_is_too_large(
    kernel: Callable[..., Engine], sample: bytes, tmp_path: Path
) -> None:
    path = tmp_path / f"a{SUFFIX}"
    path.write_bytes((1 << 40).to_bytes(8, "little") + sample[8:])
    with kernel() as engine, pytest.raises(BadRequest, match="too large"):
        restore(engine, "demo", path)


class Kept:
    """One engine for many hostile files, and what must not change in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engine = fake_engine(FakeModel(("rows", "window")))
        talk(self.engine, "here")
        self.before = self.seen()

    def seen(self) -> Any:
        view = self.engine.tree()
        nodes = [(n.start, n.end, n.tokens.tobytes(), n.pages, n.marks) for n in view.nodes()]
        return nodes, turns_of(self.engine).branches, view.stored_bytes

    def attempt(self, raw: bytes) -> None:
        self.path.write_bytes(raw)
        try:
            found = restore(self.engine, "demo", self.path)
        except BadRequest:
            assert self.seen() == self.before
        else:
            try:
                answer = Conversation(self.engine, "demo").ask("Then?", max_tokens=2)
                assert answer.prompt_ids
                assert 0 <= found.cached <= found.tokens
            finally:
                keeping.wait(keeping.forget(self.engine, "demo"), "")
                keeping.forgotten(self.engine, "demo")
            self.before = self.seen()
        self.engine.check()


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_JUPYTER_HOME", str(tmp_path_factory.mktemp("home")))
        known_as(patch, {"is": "a fake"})
        kept = Kept(tmp_path_factory.mktemp("victim") / f"a{SUFFIX}")
        yield kept
        kept.engine.close()


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(dice=st.randoms(use_true_random=False))
def test_bytes_changed_at_random(victim: Kept, sample: bytes, dice: random.Random) -> None:
    raw = bytearray(sample)
    for _ in range(dice.choice([1, 1, 2, 8])):
        if not raw:
            break  # all of it was cut away
        at = dice.randrange(len(raw) if dice.random() < 0.5 else min(2000, len(raw)))
        match dice.randrange(4):
            case 0:
                raw[at] ^= 1 << dice.randrange(8)
            case 1:
                del raw[at:]
                raw += b"\0"
            case 2:
                raw[at:at] = dice.randbytes(dice.randrange(1, 9))
            case _:
                raw[at : at + dice.randrange(1, 40)] = b""
    victim.attempt(bytes(raw))


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(dice=st.randoms(use_true_random=False), value=_JSON)
def test_headers_changed_at_random(
    victim: Kept, sample: bytes, dice: random.Random, value: Any
) -> None:
    """The checksum is right: only the checks themselves stand in the way."""

    def somewhere(table: Any) -> None:
        places: list[tuple[Any, Any]] = []
        waiting = [table]
        while waiting:
            at = waiting.pop()
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            places += [(at, key) for key in keys]
            waiting += [at[key] for key in keys if isinstance(at[key], dict | list)]
        where, key = dice.choice(places)
        if dice.random() < 0.2:
            del where[key]
        elif dice.random() < 0.3 and type(where[key]) is int:
            where[key] += dice.choice([-1, 1, 255, 1 << 31, -(1 << 40), 1 << 62])
        else:
            where[key] = value

    def change(table: dict[str, Any]) -> None:
        inner = dice.choice(["", "", "conversation", "pages"])
        if inner:
            _in(inner, somewhere)(table)
        else:
            somewhere(table)
        table.setdefault("__metadata__", {})
        if type(table["__metadata__"]) is not dict:
            table["__metadata__"] = {}
        # In the order that is looked for, so that what comes behind it is reached.
        meta = {k: v for k, v in table["__metadata__"].items() if k != "checksum"}
        table["__metadata__"] = {"checksum": "", **meta}

    victim.attempt(resealed(sample, change))


# --- the turns' JSON ----------------------------------------------------------------------------

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_TURN = st.builds(
    SavedTurn,
    question=_TEXT,
    answer=_TEXT,
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple),
    prompt=st.integers(0, 3),
    finish=st.sampled_from(["stop", "length", "cancelled"]),
    model=_TEXT,
    seed=st.integers(0, 2**64 - 1),
    stopped_by=st.none() | _TEXT,
    system=st.none() | _TEXT,
    cell=st.none() | st.tuples(_TEXT, st.integers(0, 9)),
)


@given(st.builds(Saved, name=st.just("a.b-c"), turns=st.lists(_TURN, max_size=4).map(tuple)))
def test_turns_survive_as_json(saved: Saved) -> None:
    path = (1, 2, 3)
    assert parsed(dumped(saved), path) == Saved(saved.name, saved.turns, path)


@given(_JSON)
def test_any_other_json_is_refused(value: Any) -> None:
    with pytest.raises(Malformed):
        parsed(json.dumps(value))
    with pytest.raises(Malformed):
        parsed(json.dumps({"name": "a", "turns": [value]}))


def test_half_a_character_cannot_be_saved() -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        dumped(Saved("a", (SavedTurn("\ud800", ""),)))


# --- every family -------------------------------------------------------------------------------

_NO_SNAPSHOTS = {"deepseek_v41", "longcat_flash_ngram"}
"""Families whose snapshots change their form, or hold ids: from outside they aren't taken."""

_OTHER_PASSES = {"llama_keep"}
"""A family in which what a token computes depends on the tokens in its pass."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_of_every_family_moves_to_another_cache(name: str, tmp_path: Path) -> None:
    first = Bench(name)
    ids = prompt(300, 7)
    marks = [(40, "system"), (150, "turn"), (290, "turn")]
    run = first.ask(ids, 5, marks=marks, owner="@a")
    whole = np.array([*ids, *run.tokens], np.int32)
    tokens, description, pieces = export.packed(first.cache, whole)
    path = tmp_path / "a"
    bundle.write(path, {}, pieces)
    for strict in (False, True):
        second = Bench(name)
        with Bundle(path) as file:
            file.verify()
            things = luggage.unpacked(
                file,
                description,
                whole,
                spot_check.likeness(second.cache, second.model.model, whole),
                second.cache,
                room=1 << 40,
                strict=strict,
                stopped=lambda: None,
            )
        assert luggage.finite(things)
        if name not in _OTHER_PASSES | _NO_SNAPSHOTS:
            for seed in range(3):
                dice = random.Random(seed)
                assert spot_check.agrees(
                    second.cache, second.model.model, things, second.chunk, dice
                )
        luggage.put_in(second.cache, things, "@b", "@b" if strict else None)
        second.cache.check()
        again = second.ask([*whole.tolist(), *prompt(9, 8)], 4, owner="@b")
        if not strict or name not in _NO_SNAPSHOTS:
            assert again.cached == tokens
        assert again.cached <= tokens


def test_a_spot_check_sees_one_wrong_layer(tmp_path: Path) -> None:
    for name in ("llama", "gemma3_text", "qwen3_next"):
        bench = Bench(name)
        ids = prompt(120, 3)
        bench.ask(ids, 3, owner="@a", marks=[(60, "turn")])
        path_ids = np.array(ids, np.int32)
        _, description, pieces = export.packed(bench.cache, path_ids)
        bundle.write(tmp_path / "a", {}, pieces)
        with Bundle(tmp_path / "a") as file:
            like = spot_check.likeness(bench.cache, bench.model.model, path_ids)
            read = partial(
                luggage.unpacked,
                file,
                description,
                path_ids,
                like,
                bench.cache,
                room=1 << 40,
                strict=True,
                stopped=lambda: None,
            )
            for seed in range(4):
                things = read()
                page = things.pages[0]
                stack = [list(arrays) for arrays in page.stacks]
                layer = mx.arange(stack[0][0].shape[0]) == stack[0][0].shape[0] - 1
                stack[0][0] = mx.where(layer.reshape(-1, 1, 1, 1), 1.05, 1.0) * stack[0][0]
                page.stacks = tuple(tuple(arrays) for arrays in stack)
                assert not spot_check.agrees(
                    bench.cache, bench.model.model, things, 16, random.Random(seed)
                )


# --- forget -------------------------------------------------------------------------------------


def forget(engine: Engine, name: str) -> Any:
    gone = keeping.wait(keeping.forget(engine, name), "")
    keeping.forgotten(engine, name)
    engine.check()
    return gone


def texts(engine: Engine) -> str:
    return "|".join(node.text for node in engine.tree().nodes())


@pytest.mark.parametrize("kinds", LAYOUTS)
def test_nothing_of_a_forgotten_conversation_is_left(
    stored: Callable[..., Engine], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    with stored(kinds) as engine:
        chat = talk(engine)
        receipt = chat.save()
        assert engine.settle_store(timeout=30)
        before = engine.status()
        assert before.store.files
        gone = forget(engine, "demo")
        assert engine.tree().root.children == ()
        assert engine.status().store.files == 0
        assert not receipt.path.exists()
        assert gone.disk == before.store.nbytes + receipt.nbytes
        assert gone.memory == before.memory.live + before.memory.stored
        assert gone.tokens >= receipt.tokens
        assert "demo" not in turns_of(engine).branches
        assert talk(engine).turns[-1].answer.usage.prefilled < 60
    assert not [p for p in (tmp_path / "home").rglob("*") if p.is_file()]


@pytest.mark.parametrize("kinds", LAYOUTS)
@pytest.mark.parametrize("on_disk", [False, True])
def test_what_others_reach_stays(
    stored: Callable[..., Engine], kinds: tuple[str, ...], on_disk: bool
) -> None:
    with stored(kinds) as engine:
        chat = talk(engine)
        other = Conversation(engine, "other", system=SYSTEM)
        other.ask("What is hail, pray?", **HOW)
        chat.ask("Secret words?", **HOW)
        assert engine.settle_store(timeout=30)
        if on_disk:
            engine.evict()
        before = engine.plan([*other.messages, {"role": "user", "content": "x"}], owner="@other")
        forget(engine, "demo")
        assert "Secret" not in texts(engine)
        assert "rain" not in texts(engine)
        after = engine.plan([*other.messages, {"role": "user", "content": "x"}], owner="@other")
        assert after.cached == before.cached
        answer = other.ask("x", **HOW)
        assert answer.usage.cached == before.cached
        engine.check()
        # A second kernel finds the same on disk.
        assert engine.settle_store(timeout=30)
        with stored(kinds) as second:
            assert second.generate(answer.messages[:-1], **HOW).tokens == answer.tokens
            assert "Secret" not in texts(second)
    held = b"".join(p.read_bytes() for p in engine._shop.storage.place.rglob("*.safetensors"))
    assert np.frombuffer(b"Secret", np.uint8).astype("<i4").tobytes() not in held
    assert np.frombuffer(b"hail", np.uint8).astype("<i4").tobytes() in held


def test_a_fork_keeps_its_part(stored: Callable[..., Engine]) -> None:
    with stored() as engine:
        chat = talk(engine)
        fork = chat.fork("fork", 1)  # it never asked
        assert engine.settle_store(timeout=30)
        forget(engine, "demo")
        assert "snow" not in texts(engine)
        assert "rain" in texts(engine)
        plan = engine.plan([*fork.messages, {"role": "user", "content": "x"}])
        assert plan.cached >= len(fork.turns[-1].answer.prompt_ids)


def test_earlier_versions_of_its_cells_go_too(stored: Callable[..., Engine]) -> None:
    with stored() as engine:
        turns = turns_of(engine)
        chat = Conversation(engine, "demo", system=SYSTEM)
        for run, word in enumerate(["tulips", "roses", "lilies"]):
            turns.caller = lambda run=run: Call("s", "a", 0, str(run))
            chat.ask(f"Say something about {word}. " * 20, **HOW)
        assert len(chat.turns) == 1
        assert engine.settle_store(timeout=30)
        engine.evict()
        forget(engine, "demo")
        assert engine.tree().root.children == ()
        assert engine.status().store.files == 0


def test_a_kept_conversation_is_forgotten_by_its_file_alone(stored: Callable[..., Engine]) -> None:
    with stored() as engine:
        talk(engine).save()
    with stored() as engine:
        assert engine.status().store.files
        gone = forget(engine, "demo")
        assert engine.status().store.files == 0
        assert gone.disk > 0
        assert names() == []
        assert forget(engine, "neverwas").disk == 0


def test_a_pinned_conversation_is_forgotten(kernel: Callable[..., Engine]) -> None:
    with kernel() as engine:
        talk(engine)
        engine.pin("@demo")
        forget(engine, "demo")
        with pytest.raises(BadRequest):
            engine.unpin("@demo")


def test_a_model_that_is_gone_leaves_its_files_to_forget(stored: Callable[..., Engine]) -> None:
    with stored() as engine:
        talk(engine)
        assert engine.settle_store(timeout=30)
        engine.unload()
        assert engine.status().store.files
        keeping.wait(keeping.forget(engine, "demo"), "")
        assert engine.status().store.files == 0


def test_dropping_keeps_what_is_cached(stored: Callable[..., Engine]) -> None:
    with stored() as engine:
        chat = talk(engine)
        held = engine.status().memory.live
        turns_of(engine).drop("demo")
        engine.release("@demo")
        assert engine.status().memory.live == held
        assert chat.turns == ()
        forget(engine, "demo")  # and can be forgotten after it all the same
        assert engine.tree().root.children == ()


# --- interrupts ---------------------------------------------------------------------------------


def test_a_cancelled_save_changes_nothing(kernel: Callable[..., Engine], tmp_path: Path) -> None:
    with kernel() as engine:
        chat = talk(engine)
        path = chat.save(tmp_path / "a").path
        before = path.read_bytes()
        chat.ask("More? " * 100, **HOW)
        ticket = keeping.save(engine, "demo", path)
        ticket.cancel()
        with pytest.raises(Cancelled, match="isn't saved"):
            keeping.wait(ticket, "@demo isn't saved")
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [path.name]


@pytest.mark.parametrize("after", range(6))
def test_a_cancelled_restore_changes_nothing(
    kernel: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    with kernel() as engine:
        path = talk(engine).save(tmp_path / "a").path
    with kernel() as engine:
        calls = 0
        reads = Bundle._at

        def stopping(self: Bundle, start: int, count: int) -> np.ndarray:
            nonlocal calls
            calls += 1
            if calls == after + 3:
                ticket.cancel()
            return reads(self, start, count)

        held: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(engine._thread, "post", held.append)
            ticket = keeping.restore(engine, "demo", path)
        monkeypatch.setattr(Bundle, "_at", stopping)
        engine._thread.post(held[0])
        with pytest.raises(Cancelled, match="nothing"):
            keeping.wait(ticket, "nothing")
        assert not turns_of(engine).branches
        assert engine.tree().root.children == ()
        engine.check()


def test_a_full_disk_leaves_the_old_file(
    kernel: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kernel() as engine:
        chat = talk(engine)
        path = chat.save(tmp_path / "a").path
        before = path.read_bytes()

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(bundle.os, "fsync", full)
        with pytest.raises(BadRequest, match="can't be written: No space left"):
            chat.save(path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir() if p.is_file()] == [path.name]


def test_a_page_whose_file_goes_meanwhile(stored: Callable[..., Engine]) -> None:
    with stored() as engine:
        chat = talk(engine)
        assert engine.settle_store(timeout=30)
        engine.evict()
        files = sorted(engine._shop.storage.place.rglob("*rows-256*.safetensors"))
        files[0].write_bytes(b"")
        receipt = chat.save()
        assert receipt.tokens == 256
        engine.check()


def test_stores_and_caches_know_of_no_file_format_of_each_other(tmp_path: Path) -> None:
    """A page of the store is no conversation, and a cache without an order packs nothing."""
    store = Store(tmp_path / "pages", budget=1 << 20)
    cache = new_cache(FakeModel(), 1 << 20, store.shelf("fake"))
    assert export.packed(cache, np.array([1, 2, 3], np.int32)) == (0, "", [])
    store.close()
