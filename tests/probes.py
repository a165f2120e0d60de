"""Hooks for the fake model that make a moment of a request happen, or wait for it."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

from mlx_jupyter.engine.serve import Serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from fakes import FakeModel
    from mlx_jupyter.engine.engine import Engine

HANG = 60  # seconds; only ever reached when something is broken
PHASES = ("queue", "prefill", "decode", "teardown")


class Gate:
    """A model hook: blocks a forward pass until it is opened, and says that it was reached."""

    def __init__(self, when: Callable[[int], bool] = lambda n: True) -> None:
        self.when = when
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, n: int) -> None:
        if self.when(n):
            self.reached.set()
            assert self.open.wait(HANG)


class Probe:
    """Sends SIGINT to this process when a phase is reached, after a number of its steps.

    Attributes:
        hits: how many signals were sent in each phase.
    """

    def __init__(self, model: FakeModel) -> None:
        self.hits = dict.fromkeys(PHASES, 0)
        self.phase = ""
        self.left = 0
        self.sent = threading.Event()
        self._lock = threading.Lock()
        self.hook = model.before_call = lambda n: self.step("prefill" if n > 1 else "decode")
        self._original = original = Serve._made

        def teardown(job: Serve, *args: object) -> object:
            self.step("teardown")
            return original(job, *args)

        Serve._made = teardown

    def restore(self) -> None:
        """Leave the engine as it was."""
        Serve._made = self._original

    def arm(self, phase: str, left: int = 0) -> None:
        """Send one signal in this phase, when it has made ``left`` steps."""
        with self._lock:
            self.phase, self.left = phase, left
            self.sent.clear()

    def step(self, phase: str) -> None:
        """The phase was reached, or goes on."""
        with self._lock:
            if phase != self.phase:
                return
            self.left -= 1
            if self.left >= 0:
                return
            self.phase = ""
            self.hits[phase] += 1
        self.sent.set()
        os.kill(os.getpid(), signal.SIGINT)

    def when_queued(self, engine: Engine) -> None:
        """Send it as soon as a second request waits behind the first."""
        self.arm("queue")

        def watch() -> None:
            while engine.status().waiting < 2:
                pass
            self.step("queue")

        threading.Thread(target=watch, daemon=True).start()
