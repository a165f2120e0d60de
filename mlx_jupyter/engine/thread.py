"""The one thread that touches MLX: a queue of jobs, in order, until it is closed.

MLX's streams and random state are per thread, so that loading, cache creation and generation must
share one. A job never raises into the thread: it reports to whoever posted it. When nothing was
asked for a moment it does idle work, step by step, so that a job waits for one step at most; with
no idle work left it sleeps until the next job. A thread that is busy in MLX when the interpreter
exits aborts the process, so the engine closes it first. It doesn't survive a fork: in the child it
has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import weakref
from typing import TYPE_CHECKING, Protocol, TypeVar

from mlx_jupyter.errors import ComputeError, EngineClosed
from mlx_jupyter.latch import Latch, holding

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
T = TypeVar("T")

GRACE = 0.5
"""Seconds without a job before idle work begins: the cells of a Run All shouldn't pay for it."""

FORKED = (
    "MLX can't be used in a process forked from one that ran it. "
    "Start a fresh process, as multiprocessing's 'spawn' does."
)


class Job(Protocol):
    """One piece of work."""

    def run(self) -> None:
        """Do it; report success and failure to the one who waits for it."""

    def refuse(self, error: Exception) -> None:
        """It can't be done, or not to its end: report this, unless something was reported."""


class _Call:
    """A function to run there, with its outcome kept for the caller."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._done = Latch()
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        self._done.set()

    def refuse(self, error: Exception) -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def result(self) -> object:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


class EngineThread:
    """See the module.

    Args:
        at_end: called on the thread as its last work.
        name: of the thread.
        idle: does a piece of work of some milliseconds on the thread and says whether there is
            more. It is asked again after each job; when it raises, not before the next one.
        grace: seconds between the end of a job and the first piece of idle work.

    Attributes:
        ended: set when no job will run any more.

    Raises:
        EngineClosed: this process was forked from one that had such a thread.
    """

    def __init__(
        self,
        at_end: Callable[[], None],
        name: str = "mlx-engine",
        *,
        idle: Callable[[], bool] = lambda: False,
        grace: float = GRACE,
    ) -> None:
        if _threads.is_child:
            raise EngineClosed(FORKED)
        self.ended = Latch()
        self._at_end = at_end
        self._idle = idle
        self._grace = grace
        self._idle_fault = ""  # the last one that was told
        self._patience: float | None = None  # seconds until idle work; None: there is none
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._gate = threading.RLock()  # orders post against shut
        self._closed = False
        self._running: Job | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        _threads.known.add(self)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether it takes no more jobs."""
        return self._closed

    def post(self, job: Job) -> None:
        """Queue a job.

        Raises:
            EngineClosed: the thread takes no more jobs.
        """

        def put() -> None:
            if self._closed:
                raise EngineClosed(FORKED) if _threads.is_child else EngineClosed()
            self._jobs.put(job)

        holding(self._gate, put)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function there and give what it returns or raises.

        Waits behind what is queued. From the thread itself it runs at once.
        """
        if threading.current_thread() is self._thread:
            return function()
        call = _Call(function)
        self.post(call)
        return call.result()  # type: ignore[return-value]

    def shut(self) -> None:
        """Take no more jobs and refuse what is queued; returns at once. Idempotent."""

        def put() -> None:
            self._closed = True
            self._jobs.put(None)

        holding(self._gate, put)

    def close(self) -> None:
        """Shut, let the running job end, drain MLX, end. Idempotent; waits.

        On the thread itself (an engine's last reference may go there) it can't wait.
        """
        self.shut()
        if threading.current_thread() is not self._thread:
            self.ended.wait()
            # The thread is past its last statement; without this the interpreter's own teardown
            # could still find it running.
            self._thread.join()

    def forked(self) -> None:
        """In a forked child: the thread isn't there, whoever held the gate neither."""
        self._gate = threading.RLock()
        self._closed = True
        if self._running is not None:
            _refuse(self._running, EngineClosed(FORKED))
        self._refuse_rest(EngineClosed(FORKED))
        self.ended.set()

    def _loop(self) -> None:
        try:
            while (job := self._next()) is not None:
                if self._closed:
                    _refuse(job, EngineClosed())
                    continue
                self._running = job
                try:
                    job.run()
                except BaseException as error:
                    log.exception("a job let an error through")
                    _refuse(job, ComputeError(f"{type(error).__name__}: {error}"))
                self._running = job = None
                self._patience = self._grace
        finally:
            try:
                self.shut()
                self._refuse_rest(EngineClosed())
                self._drain()
            except BaseException:
                log.exception("the engine's thread didn't end in order")
            finally:
                self.ended.set()

    def _next(self) -> Job | None:
        """The next job, and idle work until it comes; None at the end."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=self._patience)
            self._patience = 0 if self._idle_step() else None

    def _idle_step(self) -> bool:
        """Do a piece of idle work; whether there is more."""
        if self._closed:  # the None that says so is on its way
            return False
        try:
            return self._idle()
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"
            if fault != self._idle_fault:
                self._idle_fault = fault
                log.exception("idle work failed; it is tried again after the next job")
            return False

    def _refuse_rest(self, error: EngineClosed) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                _refuse(job, error)

    def _drain(self) -> None:
        import mlx.core as mx

        try:
            self._at_end()
        finally:
            mx.synchronize()
            mx.clear_cache()
            mx.clear_streams()


def _refuse(job: Job, error: Exception) -> None:
    try:
        job.refuse(error)
    except BaseException:
        log.exception("a job can't be refused")


class _Threads:
    """All that there are in this process, for its exit and for a forked child."""

    def __init__(self) -> None:
        self.known: weakref.WeakSet[EngineThread] = weakref.WeakSet()
        self.is_child = False

    def at_exit(self) -> None:
        """Wait for those that are ending; an engine dropped on its own thread couldn't."""
        for thread in list(self.known):
            if thread.closed:
                thread.close()

    def in_child(self) -> None:
        """MLX's own threads are missing, and evaluating anything would wait for them for ever."""
        for thread in list(self.known):
            self.is_child = True
            thread.forked()


_threads = _Threads()
atexit.register(_threads.at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.in_child)
