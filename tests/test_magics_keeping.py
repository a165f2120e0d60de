"""``%llm save``, ``restore``, ``forget`` and ``store`` in a shell of this process."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest

from fakes import FakeModel, fake_engine
from mlx_jupyter import runtime
from mlx_jupyter.cache import bundle
from mlx_jupyter.conversation.conversation import turns_of
from mlx_jupyter.engine.thread import EngineThread
from mlx_jupyter.errors import Cancelled
from mlx_jupyter.notebook import options
from test_keeping import home, known_as
from test_magics import fails, notes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlx_jupyter.engine.engine import Engine

__all__ = ["fails", "home", "notes"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path) -> Iterator[Engine]:
    """On a store; its model has an identity."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.delenv("MLX_JUPYTER_STORE", raising=False)
    monkeypatch.setattr("mlx_jupyter.engine.base.EngineThread", partial(EngineThread, grace=0))
    known_as(monkeypatch, {"is": "a fake"})
    with fake_engine(FakeModel(), store=tmp_path / "pages", store_bytes=50_000_000) as made:
        before = runtime.current()
        runtime.set_engine(made)
        yield made
        runtime.set_engine(before)


ASKED = "%llm @demo -s 'Be brief.' --max 6 what is rain, and why does it fall on us all the time?"


def test_save_and_restore_by_name(run, shell, capsys) -> None:
    run(ASKED)
    run("%llm @demo --max 6 and snow?")
    capsys.readouterr()
    run("%llm save @demo")
    told = capsys.readouterr().out
    assert told.startswith("@demo is saved: 2 turns, ")
    assert " cached tokens, " in told
    assert told.count("\n") == 1
    assert shell.user_ns["_"].turns == 2
    run("%llm drop @demo")
    capsys.readouterr()
    run("%llm restore @demo")
    assert capsys.readouterr().out.startswith("@demo is back: 2 turns, ")
    run("r = %llm @demo --max 6 then?")
    assert len(shell.user_ns["r"].messages) == 7
    assert shell.user_ns["r"].usage.cached > 100


def test_save_and_restore_with_a_file(run, shell, engine, capsys, tmp_path) -> None:
    run(ASKED)
    run("receipt = %llm save @demo 'my talk'")
    assert shell.user_ns["receipt"].path == tmp_path / "my talk.llm.safetensors"
    run("%llm forget @demo")
    engine.clear_store()
    capsys.readouterr()
    run("%llm restore @other 'my talk'")
    told = capsys.readouterr().out
    assert told.startswith("@other is back: 1 turn, ")
    assert told.endswith(" tokens cached, for this conversation alone.\n")
    run("%llm restore @third 'my talk.llm.safetensors'")
    assert set(turns_of(engine).branches) == {"other", "third"}


def test_a_restored_model_that_differs_is_told(run, capsys, monkeypatch) -> None:
    run(ASKED)
    run("%llm save @demo")
    known_as(monkeypatch, {"is": "another fake"})
    with fake_engine(FakeModel()) as other:
        runtime.set_engine(other)
        capsys.readouterr()
        run("%llm restore @demo")
        told = capsys.readouterr().out
        assert told.startswith(
            "@demo is back: 1 turn. Its tokens will be computed again: its pages"
        )


ERRORS = [
    ("%llm save @nope", "There is no branch @nope."),
    ("%llm restore @nope", "There is no saved conversation @nope: give its file."),
    ("%llm restore @nope nowhere", "There is no file "),
    ("%llm restore @nope plain.txt", "no saved conversation: it is another kind of file"),
    ("%llm restore @demo", "Branch @demo exists already. Drop it first (%llm drop @demo)"),
    ("%llm save @demo plain.safetensors", "is there already and no saved conversation"),
    ("%llm save @demo no/such/place", "can't be written: No such file or directory."),
]


@pytest.mark.parametrize(("line", "told"), ERRORS)
def test_what_goes_wrong_is_one_line(run, fails, tmp_path, line, told) -> None:
    run(ASKED)
    for name in ("plain.txt.llm.safetensors", "plain.safetensors"):
        (tmp_path / name).write_text("nothing of the kind")
    error, printed = fails(line)
    assert told in str(error)
    assert printed.count("\n") == 1
    assert "Traceback" not in printed


def test_forget_says_what_is_gone(run, engine, capsys) -> None:
    run(ASKED)
    run("%llm save @demo")
    assert engine.settle_store(timeout=30)
    capsys.readouterr()
    run("%llm forget @demo")
    told = capsys.readouterr().out
    assert told.startswith("@demo is removed for good: ")
    assert " in memory, " in told
    assert told.endswith(" on disk.\n")
    assert engine.status().store.files == 0
    assert not turns_of(engine).branches
    run("%llm forget @demo")  # again: nothing is left, and that isn't wrong
    assert "0 tokens" in capsys.readouterr().out


def test_drop_keeps_the_cache(run, engine) -> None:
    run(ASKED)
    held = engine.status().memory.live
    run("%llm drop @demo")
    assert engine.status().memory.live == held


def test_store_and_status(run, engine, capsys, tmp_path) -> None:
    run("%llm --max 4 " + "a long prompt " * 20)
    assert engine.settle_store(timeout=30)
    report = run("%llm store")
    text = repr(report)
    assert str(tmp_path / "pages") in text
    assert "of 50.0 MB" in text
    assert "model model" in text
    assert "last fault   none" in text
    assert "%llm store clear removes all of it" in text
    assert "<table>" in report._repr_html_()
    assert report.data.files > 0
    status = repr(run("%llm status"))
    assert f"of 50.0 MB in {tmp_path / 'pages'}" in status
    freed = run("%llm store clear")
    assert repr(freed).endswith(f" are removed from {tmp_path / 'pages'}.")
    assert freed.data == report.data.nbytes
    assert "files       0" in repr(run("%llm store"))


def test_a_store_that_is_off(run, capsys) -> None:
    with fake_engine(FakeModel(), store=False) as off:
        runtime.set_engine(off)
        assert "Nothing is kept on disk" in repr(run("%llm store"))
        assert "nothing to remove" in repr(run("%llm store clear"))
        assert "off: cached tokens end with the kernel" in repr(run("%llm status"))


def test_a_markup_in_a_fault_stays_text(engine) -> None:
    from dataclasses import replace

    from mlx_jupyter.notebook import reports

    use = replace(engine.status().store, fault="<img src=x>", models={"<b>": 1})
    assert "<img" not in reports.store(use)._repr_html_()
    assert "<b>" not in reports.store(use)._repr_html_()


def test_an_interrupted_save_leaves_nothing(run, shell, fails, monkeypatch, tmp_path) -> None:
    run(ASKED)
    write = bundle.write

    def interrupted(*given: object) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        stopped = given[4]
        while not stopped():
            pass
        return write(*given)

    monkeypatch.setattr(bundle, "write", interrupted)
    error, _ = fails("%llm save @demo here")
    assert isinstance(error, Cancelled)
    assert str(error) == "Interrupted; @demo isn't saved."
    assert not list(tmp_path.glob("*here*"))
    monkeypatch.undo()


def test_completion_knows_kept_conversations(run, shell) -> None:
    run(ASKED)
    run("%llm save @demo")
    run("%llm drop @demo")
    run("%llm @chat --max 1 hello")
    completer = shell.magics_manager.registry["LLMMagics"].completer
    assert completer.candidates("%llm save @") == ["@chat"]
    assert completer.candidates("%llm restore @") == ["@demo"]
    assert completer.candidates("%llm forget @") == ["@chat", "@demo"]
    assert completer.candidates("%llm store ") == ["clear"]
    assert set(completer.candidates("%llm ")) >= {"save", "restore", "forget", "store"}
    assert "keeping" in completer.candidates("%llm help ")


@pytest.mark.parametrize("word", ["save", "restore", "forget", "store", "keeping"])
def test_help_tells_of_it(run, word) -> None:
    assert word in repr(run(f"%llm help {word}")) or word == "keeping"
    assert word in options.help_text()
