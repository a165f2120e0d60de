"""The one thread that touches MLX: a queue of jobs, in order, until it is closed.

MLX's streams and random state are per thread, so that loading, cache creation and generation must
share one. A job never raises into the thread: it reports to whoever posted it. A thread that is
busy in MLX when the interpreter exits aborts the process, so ``close`` (registered with atexit by
the engine) lets it drain its streams first.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Protocol, TypeVar

from mlx_jupyter.engine.latch import Latch
from mlx_jupyter.errors import EngineClosed

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
T = TypeVar("T")


class Job(Protocol):
    """One piece of work."""

    def run(self) -> None:
        """Do it; report success and failure to the one who waits for it."""

    def refuse(self, error: Exception) -> None:
        """The thread ended before the job's turn came."""


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
        self._error = error
        self._done.set()

    def result(self) -> object:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._value


class EngineThread:
    """See the module."""

    def __init__(self, name: str = "mlx-engine") -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._gate = threading.Lock()  # orders post against close
        self._closed = False
        self.ended = Latch()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def post(self, job: Job) -> None:
        """Queue a job.

        Raises:
            EngineClosed: the thread takes no more jobs.
        """
        with self._gate:
            if self._closed:
                raise EngineClosed
            self._jobs.put(job)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function there and give what it returns or raises.

        Waits behind what is queued. From the thread itself it runs at once.
        """
        if threading.current_thread() is self._thread:
            return function()
        call = _Call(function)
        self.post(call)
        return call.result()  # type: ignore[return-value]

    def close(self) -> None:
        """Refuse what is queued, let the running job end, drain MLX, end. Idempotent; waits."""
        with self._gate:
            first, self._closed = not self._closed, True
            if first:
                self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self.ended.wait()
            # The thread is past its last statement; without this the interpreter's own teardown
            # could still find it running.
            self._thread.join()

    def _loop(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                if self._closed:
                    job.refuse(EngineClosed())
                    continue
                try:
                    job.run()
                except BaseException:
                    log.exception("a job let an error through")
                del job
        finally:
            self._drain()
            self.ended.set()

    @staticmethod
    def _drain() -> None:
        import mlx.core as mx

        mx.synchronize()
        mx.clear_streams()
