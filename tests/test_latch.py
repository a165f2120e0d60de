"""Waiting and excluding under a rain of interrupts."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from mlx_jupyter.engine.request import Done, Prefill, Request, Ticket
from mlx_jupyter.latch import Latch, holding
from probes import HANG


@pytest.fixture
def rain():
    """Makes a context in which SIGINT arrives about once a millisecond."""
    before = signal.getsignal(signal.SIGINT)
    state = {"on": False, "stop": False}

    def handler(*_: object) -> None:
        if state["on"]:
            state["on"] = False
            raise KeyboardInterrupt

    def send() -> None:
        dice = random.Random(1)
        while not state["stop"]:
            time.sleep(dice.random() * 0.002)
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, handler)
    sender = threading.Thread(target=send, daemon=True)
    sender.start()

    def under(work, seconds: float) -> int:
        """Run ``work`` again and again; how often it was interrupted."""
        hits, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                state["on"] = True
                while time.monotonic() < end:
                    work()
                state["on"] = False
            except KeyboardInterrupt:
                hits += 1
        return hits

    yield under
    state["stop"] = True
    sender.join(HANG)
    signal.signal(signal.SIGINT, before)


def test_a_latch_wakes_everyone_and_stays_set() -> None:
    latch = Latch()
    assert not latch.wait(0.01)
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda: woken.append(latch.wait(HANG))) for _ in range(20)]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join(HANG)
    assert woken == [True] * 20
    assert latch.wait(0)
    assert not latch._waiters


def test_setting_races_with_waiting() -> None:
    for _ in range(500):
        latch = Latch()
        waiter = threading.Thread(target=latch.wait)
        waiter.start()
        latch.set()
        waiter.join(HANG)
        assert not waiter.is_alive()


def test_interrupted_readers_never_hold_up_the_engine(rain) -> None:
    ticket = Ticket(Request(text="x"))
    ticket.emit(Prefill(0, 1, 0))

    def read() -> None:
        ticket.wait(0.0001)
        events = ticket.batches(0.0)
        next(events)
        events.close()

    assert rain(read, 1.0) > 10
    writer = threading.Thread(target=lambda: ticket.emit(Done(ticket.partial())))
    writer.start()
    writer.join(HANG)
    assert ticket.ended
    assert len(list(ticket.events())) == 2


def test_an_interrupt_leaves_a_held_lock_free(rain) -> None:
    lock = threading.RLock()
    assert rain(lambda: holding(lock, lambda: None), 1.0) > 10
    taken: list[bool] = []
    other = threading.Thread(target=lambda: taken.append(lock.acquire(timeout=1)))
    other.start()
    other.join(HANG)
    assert taken == [True]


def test_what_the_work_raises_frees_the_lock_too() -> None:
    lock = threading.RLock()
    with pytest.raises(ZeroDivisionError):
        holding(lock, lambda: 1 // 0)
    assert not lock._is_owned()
    assert holding(lock, lambda: 5) == 5


@pytest.mark.parametrize("wait", ["latch", "result", "events"])
def test_a_signal_that_doesnt_end_a_wait_in_c_is_seen_all_the_same(wait: str) -> None:
    """As one that lands just before the wait: here another thread is the one it disturbs."""
    latch, ticket = Latch(), Ticket(Request(tokens=(1,)))
    raised, waiting = threading.Event(), threading.Event()
    in_time = []

    def disturb() -> None:
        waiting.wait(HANG)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        in_time.append(raised.wait(10))
        latch.set()
        ticket.emit(Done(ticket.partial()))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come at once
            waiting.set()
            {"latch": latch.wait, "result": ticket.result, "events": lambda: list(ticket.events())}[
                wait
            ]()
    finally:
        raised.set()
        thread.join(HANG)
        signal.signal(signal.SIGINT, before)
    assert in_time == [True]
