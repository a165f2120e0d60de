"""The engine thread's idle work: only when nothing else is to be done, and never in its way."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path

import pytest

from fakes import fake_engine
from mlx_jupyter import errors as err
from mlx_jupyter.engine.storage import STORE
from mlx_jupyter.engine.thread import EngineThread
from mlx_jupyter.engine.workshop import Workshop

HANG = 60
FOR_EVER = 100_000.0


class Steps:
    """Idle work of which each step begins when the test lets it, and tells what it sees."""

    def __init__(self, *more: bool | BaseException) -> None:
        self.more = list(more)
        self.done: list[object] = []
        self.begun = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        self.threads: set[int] = set()

    def __call__(self) -> bool:
        self.threads.add(threading.get_ident())
        self.begun.release()
        assert self.open.acquire(timeout=HANG)
        self.done.append("step")
        more = self.more.pop(0) if self.more else False
        if isinstance(more, BaseException):
            raise more
        return more

    def note(self, what: object):
        return lambda: self.done.append(what)


class Posted:
    """A job that says what it does and when it has ended."""

    def __init__(self, work) -> None:
        self.work = work
        self.ended = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        self.work()
        self.ended.set()

    def refuse(self, error: Exception) -> None:
        self.error = error
        self.ended.set()


@pytest.fixture
def thread_on():
    """Make a thread with this idle work; it is closed at the end, with every step let through."""
    made = []

    def make(steps, grace: float = 0.0, at_end=lambda: None) -> EngineThread:
        thread = EngineThread(at_end, idle=steps, grace=grace)
        made.append((thread, steps))
        return thread

    yield make
    for thread, steps in made:
        thread.shut()
        if isinstance(steps, Steps):
            steps.open.release(100)
        thread.close()


def begun(steps: Steps) -> bool:
    return steps.begun.acquire(timeout=HANG)


def nothing() -> None:
    pass


def test_idle_work_goes_on_until_there_is_no_more_and_begins_again_after_a_job(thread_on):
    steps = Steps(True, True, False, True, False)
    thread = thread_on(steps)
    assert not steps.begun.acquire(blocking=False)  # nothing was asked of it yet
    thread.call(nothing)
    for _ in range(3):
        assert begun(steps)
        steps.open.release()
    # Asleep now, or about to be: a job in between would have let it begin again.
    thread.call(steps.note("job"))
    for _ in range(2):
        assert begun(steps)
        steps.open.release()
    thread.call(steps.note("job"))
    assert steps.done == [*["step"] * 3, "job", *["step"] * 2, "job"]
    assert steps.threads == {thread._thread.ident}


def test_a_thread_without_idle_work_asks_once_a_job(thread_on):
    asked = threading.Semaphore(0)

    def idle() -> bool:
        asked.release()
        return False

    thread = thread_on(idle)
    for _ in range(3):
        thread.call(nothing)
        assert asked.acquire(timeout=HANG)
    assert not asked.acquire(blocking=False)


def test_jobs_that_are_queued_run_before_any_idle_work(thread_on):
    steps = Steps()
    thread = thread_on(steps)
    reached, gate = threading.Event(), threading.Event()

    def first() -> None:
        reached.set()
        assert gate.wait(HANG)
        steps.done.append(1)

    jobs = [Posted(first), *(Posted(steps.note(n)) for n in (2, 3))]
    for job in jobs:
        thread.post(job)
    assert reached.wait(HANG)
    gate.set()
    assert begun(steps)
    assert steps.done == [1, 2, 3]


def test_a_job_that_comes_during_a_step_runs_right_after_it(thread_on):
    steps = Steps(True, True, True)
    thread = thread_on(steps)
    thread.call(nothing)
    assert begun(steps)
    job = Posted(steps.note("job"))
    thread.post(job)
    steps.open.release()
    assert job.ended.wait(HANG)
    assert begun(steps)
    assert steps.done == ["step", "job"]


def test_a_step_may_call_the_thread_it_runs_on(thread_on):
    got = []
    told = threading.Event()

    def idle() -> bool:
        got.append(thread.call(lambda: 7))
        told.set()
        return False

    thread = thread_on(idle)
    thread.call(nothing)
    assert told.wait(HANG)
    assert got == [7]


# --- the grace ---------------------------------------------------------------------------------


class Waits:
    """Stands in for the thread's queue: a grace is over as soon as nothing is queued."""

    def __init__(self, queue) -> None:
        self.queue = queue
        self.asked: list[float | None] = []
        self.asks = threading.Semaphore(0)
        self.closing = threading.Event()
        self.end = threading.Semaphore(100)  # without it the end can't be queued
        self.get_nowait = queue.get_nowait

    def put(self, job) -> None:
        if job is None:
            self.closing.set()
            assert self.end.acquire(timeout=HANG)
        self.queue.put(job)

    def get(self, timeout: float | None = None):
        self.asked.append(timeout)
        self.asks.release()
        return self.queue.get(timeout=timeout if timeout is None else 0)


class WatchedThread(EngineThread):
    """A thread whose queue is a ``Waits`` from its first wait on."""

    waits: Waits

    def __init__(self, at_end, **options) -> None:
        self.ready = threading.Event()
        super().__init__(at_end, grace=options.pop("grace", 0), **options)
        assert self.ready.wait(HANG)

    def _loop(self) -> None:
        self._jobs = self.waits = Waits(self._jobs)
        self.ready.set()
        super()._loop()


def test_the_grace_is_waited_for_after_each_job_and_only_then():
    steps = Steps(True, True, False)
    thread = WatchedThread(nothing, idle=steps, grace=0.5)
    thread.call(nothing)
    for _ in range(3):
        assert begun(steps)
        steps.open.release()
    thread.call(nothing)
    assert begun(steps)
    thread.shut()
    steps.open.release()
    thread.close()
    #             asleep, grace, twice more work, asleep, grace, asleep: closed
    assert thread.waits.asked == [None, 0.5, 0, 0, None, 0.5, None]


def test_no_step_begins_between_closing_and_its_news():
    steps = Steps(True, True, True)
    thread = WatchedThread(steps.note("end"), idle=steps)
    thread.waits.end = threading.Semaphore(0)
    thread.call(nothing)
    assert begun(steps)
    closer = threading.Thread(target=thread.close, daemon=True)
    closer.start()
    assert thread.waits.closing.wait(HANG)
    steps.open.release(3)
    for _ in range(4):  # asleep, grace, more work, asleep
        assert thread.waits.asks.acquire(timeout=HANG)
    thread.waits.end.release(100)
    closer.join(HANG)
    assert steps.done == ["step", "end"]
    assert thread.waits.asked == [None, 0, 0, None]


def test_jobs_within_the_grace_wait_for_no_idle_work(thread_on):
    steps = Steps(True)
    thread = thread_on(steps, grace=FOR_EVER)
    for number in range(50):
        thread.call(steps.note(number))
    assert steps.done == list(range(50))
    assert not steps.begun.acquire(blocking=False)


def test_closing_within_the_grace_ends_at_once(thread_on):
    steps = Steps(True)
    ended = []
    thread = thread_on(steps, grace=FOR_EVER, at_end=lambda: ended.append(True))
    thread.call(nothing)
    thread.close()
    assert ended == [True]
    assert steps.done == []


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("a"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failing_step_is_told_and_ends_idle_work_until_the_next_job(caplog, error):
    steps = Steps(error, True, False)
    steps.open.release(100)
    thread = WatchedThread(nothing, idle=steps, grace=0.5)
    thread.call(nothing)
    assert begun(steps)
    thread.call(steps.note("job"))
    assert begun(steps)
    assert begun(steps)
    thread.close()
    assert steps.done == ["step", "job", "step", "step"]
    assert thread.waits.asked == [None, 0.5, None, 0.5, 0, None]
    assert [r.message for r in caplog.records] == [
        "idle work failed; it is tried again after the next job"
    ]


def test_the_same_failure_is_told_once_and_another_one_again(thread_on, caplog):
    faults = [ValueError("a"), ValueError("a"), ValueError("a"), ValueError("b")]
    steps = Steps(*faults)
    thread = thread_on(steps)
    for _ in faults:
        thread.call(nothing)
        assert begun(steps)
        steps.open.release()
    thread.call(nothing)
    assert [str(r.exc_info[1]) for r in caplog.records] == ["a", "b"]


# --- the end -----------------------------------------------------------------------------------


def test_closing_during_a_step_lets_it_end_and_begins_no_other(thread_on):
    steps = Steps(*[True] * 10)
    thread = thread_on(steps, at_end=steps.note("end"))
    thread.call(nothing)
    assert begun(steps)
    job = Posted(steps.note("job"))
    thread.post(job)
    thread.shut()
    steps.open.release(10)
    thread.close()
    assert steps.done == ["step", "end"]
    assert isinstance(job.error, err.EngineClosed)


def test_a_step_that_closes_its_own_thread_is_the_last(thread_on):
    done = []

    def idle() -> bool:
        done.append("step")
        thread.close()
        return True

    thread = thread_on(idle, at_end=lambda: done.append("end"))
    thread.call(nothing)
    assert thread.ended.wait(HANG)
    assert done == ["step", "end"]


def test_many_posters_wake_it_every_time(thread_on):
    """Posts race with steps, with falling asleep and with waking up."""
    turns = 0

    def idle() -> bool:
        nonlocal turns
        turns += 1
        return turns % 3 != 0

    thread = thread_on(idle)
    count = 300

    def ask(results: list[int]) -> None:
        results.extend(thread.call(lambda n=n: n) for n in range(count))

    results: list[list[int]] = [[], [], []]
    askers = [threading.Thread(target=ask, args=(r,), daemon=True) for r in results]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(HANG)
    assert results == [list(range(count))] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_does_no_idle_work():
    code = """
        import os, sys, threading
        from mlx_jupyter import blas
        blas.ensure()
        from mlx_jupyter.engine.thread import EngineThread
        from mlx_jupyter.errors import EngineClosed
        begun, gate = threading.Semaphore(0), threading.Semaphore(0)
        steps = []
        def idle():
            begun.release()
            gate.acquire()
            steps.append(os.getpid())
            return len(steps) < 3
        thread = EngineThread(lambda: None, idle=idle, grace=0)
        thread.call(lambda: None)
        begun.acquire()
        pid = os.fork()
        if pid == 0:
            gate.release(10)
            try:
                thread.call(lambda: None)
            except EngineClosed:
                thread.close()
                sys.exit(len(steps))
            os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        gate.release(10)
        begun.acquire()
        begun.acquire()
        thread.call(lambda: None)
        thread.close()
        assert set(steps) == {os.getpid()} and len(steps) >= 3, steps
    """
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=HANG,
        env={**os.environ, "PYTHONPATH": here},
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- the engine --------------------------------------------------------------------------------


def test_an_engine_asks_its_workshop(monkeypatch):
    asked = threading.Event()

    def idle(shop: Workshop) -> bool:
        asked.set()
        return False

    monkeypatch.setattr(Workshop, "idle", idle)
    monkeypatch.setattr("mlx_jupyter.engine.base.EngineThread", partial(EngineThread, grace=0))
    with fake_engine() as engine:
        engine.generate("x", max_tokens=2)
        assert asked.wait(HANG)
        engine.generate("y", max_tokens=2)


def test_the_store_is_where_it_was_asked_for(monkeypatch, tmp_path, isolated_home):
    monkeypatch.delenv(STORE, raising=False)
    monkeypatch.chdir(tmp_path)
    places = {
        None: isolated_home / "pages",
        True: isolated_home / "pages",
        False: None,
        "here": tmp_path / "here",
        tmp_path / "there": tmp_path / "there",
    }
    for store, place in places.items():
        with fake_engine(store=store, store_bytes=10) as engine:
            assert engine._shop.storage.place == place
            assert engine._shop.storage.nbytes == 10
    for off in ("off", " OFF ", "0", "false"):
        monkeypatch.setenv(STORE, off)
        with fake_engine(store="here") as engine:
            assert engine._shop.storage.place is None
    for wrong in ({"store": " "}, {"store_bytes": -1}):
        with pytest.raises(err.BadRequest):
            fake_engine(**wrong)


def test_a_given_model_touches_no_disk(monkeypatch, tmp_path, isolated_home):
    monkeypatch.delenv(STORE, raising=False)
    with fake_engine(store=tmp_path / "pages") as engine:
        assert engine._shop.find(None).identity is None
        engine.generate("x" * 600, max_tokens=2)
        engine.evict()
    assert not isolated_home.exists()
    assert not (tmp_path / "pages").exists()
