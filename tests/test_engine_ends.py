"""Every way in which a request or an engine can end: nobody waits for ever, nothing is left."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_jupyter.errors as err
from fakes import FakeModel, fake_engine, letters
from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.request import Failed
from mlx_jupyter.engine.serve import Serve
from mlx_jupyter.engine.thread import EngineThread
from mlx_jupyter.engine.workshop import Workshop
from probes import HANG, Gate


def script(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


class TestWhateverIsRaised:
    @pytest.mark.parametrize(
        "error", [SystemExit("x"), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()]
    )
    def test_in_the_model_ends_the_request(self, engine, model, error: BaseException) -> None:
        def boom(n: int) -> None:
            raise error

        model.before_call = boom
        ticket = engine.submit(engine.request("hi", max_tokens=3))
        assert ticket.wait(HANG)
        assert isinstance(ticket.outcome.error, err.ComputeError)
        assert str(ticket.outcome.error).startswith(type(error).__name__)
        assert engine.status().waiting == 0
        model.before_call = None
        assert engine.generate("hi", max_tokens=2).tokens

    def test_in_a_load_ends_the_load(self, engine, monkeypatch) -> None:
        def boom(*_: object) -> None:
            raise SystemExit("no")

        monkeypatch.setattr(Workshop, "load", boom)
        with pytest.raises(err.ComputeError, match="SystemExit: no"):
            engine.load("x")

    @pytest.mark.filterwarnings("ignore")
    def test_what_a_job_lets_through_ends_it_too(self, engine, monkeypatch, caplog) -> None:
        def boom(job: Serve) -> None:
            raise SystemExit("bug")

        with monkeypatch.context() as patch:
            patch.setattr(Serve, "run", boom)
            ticket = engine.submit(engine.request("hi"))
            assert ticket.wait(HANG)
        assert isinstance(ticket.outcome.error, err.ComputeError)
        assert engine.generate("hi", max_tokens=2).tokens

    def test_an_error_can_be_raised_any_number_of_times(self, engine, model) -> None:
        ticket = engine.submit(engine.request("hi", model="no-such-model"))

        def length() -> int:
            with pytest.raises(err.ModelNotFound) as caught:
                ticket.result(HANG)
            return len(caught.traceback)

        assert length() == length() == length()


class TestInterruptedWhilePosted:
    """A signal can arrive in the caller's thread just after its job was queued."""

    @pytest.fixture
    def late(self, engine, model, monkeypatch):
        model.before_call = lambda n: time.sleep(0.005)
        queue = engine._thread._jobs
        left = [True]

        class Queue:
            get, get_nowait = queue.get, queue.get_nowait

            @staticmethod
            def put(job: object) -> None:
                queue.put(job)
                if left:
                    left.pop()
                    raise KeyboardInterrupt

        monkeypatch.setattr(engine._thread, "_jobs", Queue)
        return engine

    @pytest.mark.parametrize("ask", ["generate", "stream", "submit", "load"])
    def test_the_request_is_cancelled_and_forgotten(self, late, ask: str) -> None:
        given = {"submit": late.request("x"), "load": "no-such-model"}.get(ask, "x")
        with pytest.raises(KeyboardInterrupt) as caught:
            getattr(late, ask)(given)
        if ask in ("generate", "stream"):
            assert caught.value.answer.finish == "cancelled"
        late.check()  # waits behind the job
        assert late.status().waiting == 0


class TestStreams:
    @pytest.mark.parametrize("how", ["close", "drop", "with"])
    @pytest.mark.parametrize("started", [False, True])
    def test_end_their_request(self, engine, model, how: str, started: bool) -> None:
        gate = model.before_call = Gate()
        stream = engine.stream("x", max_tokens=2000)
        (ticket,) = engine._tickets.values()
        if started:
            next(stream)
        if how == "close":
            stream.close()
            assert list(stream) == []
        elif how == "with":
            with stream:
                pass
        del stream
        assert ticket.cancelled
        gate.open.set()
        assert ticket.result(HANG).finish == "cancelled"

    def test_keep_their_engine(self) -> None:
        assert [*fake_engine().stream("x", max_tokens=300)][-1].answer.finish == "length"

    def test_raise_a_failure_once(self, engine) -> None:
        stream = engine.stream("x", model="no-such-model")
        with pytest.raises(err.ModelNotFound):
            list(stream)
        assert list(stream) == []


class TestClosing:
    def test_takes_no_request_that_nobody_cancels(self, model) -> None:
        engine = fake_engine(model)
        model.before_call = Gate()
        running = engine.submit(engine.request("x"))
        assert model.before_call.reached.wait(HANG)

        def late() -> None:  # a cancel is the first thing that close does after the gate
            with pytest.raises(err.EngineClosed):
                engine.submit(engine.request("late"))
            refused.append(True)
            model.before_call.open.set()

        refused: list[bool] = []
        running.cancel = late
        engine.close()
        assert refused
        assert engine.status().waiting == 0

    def test_ends_a_load_of_another_thread_with_an_error(self, engine, monkeypatch) -> None:
        begun = threading.Event()

        def slow(shop: object, name: str, progress: object, cancelled) -> None:
            begun.set()
            while not cancelled():
                time.sleep(0.001)
            raise err.Interrupted

        monkeypatch.setattr(Workshop, "load", slow)
        raised: list[BaseException] = []

        def load() -> None:
            try:
                engine.load("x")
            except BaseException as error:
                raised.append(error)

        loader = threading.Thread(target=load)
        loader.start()
        assert begun.wait(HANG)
        engine.close()
        loader.join(HANG)
        assert [type(error) for error in raised] == [err.EngineClosed]

    def test_frees_the_memory(self) -> None:
        mx.clear_cache()
        gc.collect()
        before = mx.get_active_memory()
        engine = fake_engine()
        engine.generate("x" * 3000, max_tokens=3)
        assert mx.get_active_memory() > before + 50_000
        engine.close()
        gc.collect()
        assert mx.get_active_memory() <= before
        assert mx.get_cache_memory() == 0
        with pytest.raises(err.EngineClosed):
            engine.plan("x")

    def test_ends_even_when_the_clearing_up_fails(self, monkeypatch, caplog) -> None:
        def boom(shop: Workshop) -> None:
            raise RuntimeError("no")

        monkeypatch.setattr(Workshop, "abandon", boom)
        engine = fake_engine()
        engine.close()
        assert engine.status().closed
        assert "didn't end in order" in caplog.text

    def test_a_failing_construction_leaves_no_thread(self, monkeypatch) -> None:
        made: list[EngineThread] = []

        class Kept(EngineThread):
            def __init__(self, at_end, **options) -> None:
                super().__init__(at_end, **options)
                made.append(self)

        monkeypatch.setattr("mlx_jupyter.engine.base.EngineThread", Kept)
        monkeypatch.setattr(FakeModel, "make_cache", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fake_engine()
        assert made[0].ended.wait(0)

    @pytest.mark.parametrize("how", ["idle", "running", "in a cycle"])
    def test_an_engine_that_nobody_holds_ends(self, model, how: str) -> None:
        engine = fake_engine(model)
        thread = engine._thread
        engine.generate("x", max_tokens=2)
        if how == "in a cycle":
            engine.own = engine
        ticket = engine.submit(engine.request("y", max_tokens=300)) if how == "running" else None
        del engine
        gc.collect()
        if ticket is not None:
            assert ticket.result(HANG).finish == "length"  # someone may still want it
        assert thread.ended.wait(HANG)

    def test_an_interrupt_of_close_leaves_no_busy_thread_at_exit(self) -> None:
        done = script("""
            import os, signal, threading
            from fakes import FakeModel, fake_engine, letters
            import mlx.core as mx
            model, big = FakeModel(), mx.random.normal((1500, 1500))
            mx.eval(big)
            reached = threading.Event()
            def busy(n):
                reached.set()
                mx.eval(big @ big @ big @ big @ big)
            model.before_call = busy
            engine = fake_engine(model)
            engine.submit(engine.request("x", max_tokens=3000))
            reached.wait()
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                engine.close()
            except KeyboardInterrupt:
                pass
        """)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
class TestFork:
    def test_a_child_is_told_and_can_end(self) -> None:
        done = script("""
            import os, sys, threading
            from fakes import FakeModel, fake_engine, letters
            from mlx_jupyter.errors import EngineClosed
            model = FakeModel()
            engine = fake_engine(model)
            engine.generate("x", max_tokens=2)
            reached, open_ = threading.Event(), threading.Event()
            def gate(n):
                reached.set()
                open_.wait()
            model.before_call = gate
            tickets = [engine.submit(engine.request(t, max_tokens=2)) for t in "yz"]
            reached.wait()
            pid = os.fork()
            if pid == 0:
                for attempt in (
                    lambda: engine.generate("y"), lambda: engine.load("y"), engine.clear,
                    fake_engine, *(ticket.result for ticket in tickets),
                ):
                    try:
                        attempt()
                    except EngineClosed as error:
                        assert "spawn" in str(error)
                    else:
                        os._exit(9)
                engine.close()
                sys.exit(0)  # runs what is registered for the exit
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            open_.set()
            assert all(ticket.result().tokens for ticket in tickets)
            assert engine.generate("x", max_tokens=2).tokens
        """)
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_child_of_multiprocessing_is_told(self, engine) -> None:
        context = multiprocessing.get_context("fork")
        told = context.Queue()

        def ask() -> None:
            signal.alarm(HANG)
            try:
                engine.generate("y")
            except err.EngineClosed as error:
                told.put(str(error))

        child = context.Process(target=ask)
        child.start()
        assert "spawn" in told.get(timeout=HANG)
        child.join(HANG)
        assert child.exitcode == 0


class TestModelsBuiltElsewhere:
    """Lazy arrays belong to the thread that made them, wherever in the model they are."""

    class Deep(FakeModel):
        def __init__(self) -> None:
            super().__init__()
            lazy = mx.arange(4) + 1
            self._private = lazy * 2
            self._nested = [{"a": (lazy * 3,)}]
            self.plain = type("Plain", (), {})()
            self.plain.array = lazy * 4
            self.slotted = type("Slotted", (), {"__slots__": ("array", "empty")})()
            self.slotted.array = lazy * 5
            closed = lazy * 6
            self.closure = lambda: closed
            self.itself = self.plain

        def __call__(self, inputs: mx.array, cache: list | None = None) -> mx.array:
            mx.eval(
                self._private, self._nested, self.plain.array, self.slotted.array, self.closure()
            )
            return super().__call__(inputs, cache)

    def test_arrays_that_are_no_parameters(self) -> None:
        with fake_engine(self.Deep()) as engine:
            assert len(engine.generate("x", max_tokens=3).tokens) == 3

    @pytest.mark.parametrize("family", ["llama3 rope", "gpt_oss"])
    def test_real_families(self, family: str) -> None:
        import importlib

        arch, config = {
            "llama3 rope": ("llama", {"num_hidden_layers": 2, "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 512}}),
            "gpt_oss": ("gpt_oss", {"num_hidden_layers": 2, "num_local_experts": 4,
                "num_experts_per_tok": 2, "sliding_window": 32, "rope_theta": 1e4,
                "layer_types": ["sliding_attention", "full_attention"]}),
        }[family]  # fmt: skip
        base = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
                "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}  # fmt: skip
        module = importlib.import_module(f"mlx_lm.models.{arch}")
        made = module.Model(module.ModelArgs.from_dict({**base, **config, "model_type": arch}))
        with Engine(made) as engine:
            assert len(engine.generate(tokens=range(1, 50), max_tokens=3).tokens) == 3
            with pytest.raises(err.BadRequest, match="256"):
                engine.generate(tokens=[256])


class TestUnloadedMeanwhile:
    """Another thread unloads the model just after this one found it."""

    @pytest.fixture
    def found(self, engine, monkeypatch):
        engine.generate("x", max_tokens=2)
        find = engine._shop.find

        def late(*named: object) -> object:
            loaded = find(*named)
            monkeypatch.setattr(engine._shop, "find", find)
            engine.unload()
            return loaded

        monkeypatch.setattr(engine._shop, "find", late)
        return engine

    def test_plan(self, found) -> None:
        with pytest.raises(err.BadRequest, match="not loaded"):
            found.plan("x")

    def test_tree(self, found) -> None:
        assert not list(found.tree().root.children)

    def test_tree_by_name(self, found) -> None:
        with pytest.raises(err.ModelNotFound):
            found.tree("model")


def test_events_after_a_refusal_are_refused(model) -> None:
    engine = fake_engine(model)
    gate = model.before_call = Gate()
    engine.submit(engine.request("x"))
    waiting = engine.submit(engine.request("y"))
    assert gate.reached.wait(HANG)
    threading.Timer(0.1, gate.open.set).start()
    engine.close()
    assert [type(e) for e in waiting.events()] == [Failed]
    assert waiting.outcome.answer.timing.total > 0


def test_with_its_owner_a_pin_ends_and_the_budget_holds() -> None:
    with fake_engine() as engine:
        engine.generate(tokens=letters(15), owner="@a", max_tokens=3)
        engine.pin("@a")
        engine.set_budget(0)
        held = engine.status().memory
        assert held.stored + held.live > 0
        engine.release("@a")
        engine.check()
        held = engine.status().memory
        assert held.stored + held.live == 0
        with pytest.raises(err.BadRequest, match="not pinned"):
            engine.unpin("@a")
