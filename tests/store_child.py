"""Processes that use a store, for ``test_store``: what they do, and how its files are made.

Run as a script it is a parent of such processes (``nursery.py``): ``{"task": name, …}`` does one of
``TASKS``. It imports no MLX and has one thread.

What a page holds follows from its key alone, so that anyone can tell whether it is right.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mlx_jupyter.cache import keys
from mlx_jupyter.cache.store import Content, Entry, Shelf, Store, Tensor
from nursery import serve

PAGE = 256
SIZE = 40_000
"""Bytes of a page's one tensor."""


def ids_of(seed: int, pages: int = 4) -> np.ndarray:
    """The ids of a conversation; those of equal seeds ÷ 4 begin with the same page."""
    shared = np.random.default_rng(seed // 4).integers(0, 50_000, PAGE, np.int32)
    own = np.random.default_rng(1000 + seed).integers(0, 50_000, PAGE * (pages - 1), np.int32)
    return np.concatenate([shared, own])


def bytes_of(key: bytes, size: int = SIZE) -> np.ndarray:
    """What belongs under a key."""
    return np.random.default_rng(int.from_bytes(key)).integers(0, 256, size, np.uint8)


def put(
    shelf: Shelf, ids: np.ndarray, start: int, end: int, kind: keys.Kind = "rows", size: int = SIZE
) -> bool:
    """Put the part ``[start, end)`` of a conversation, or its state at ``end``."""
    base = keys.base(end)
    parent = keys.chains(shelf.root, ids[:base])[-1]
    start = end if kind == "state" else start
    data = bytes_of(keys.entry(parent, ids[base:end], kind, start), size)
    return shelf.put(kind, parent, ids[base:end], start, {"x": Tensor("U8", data.shape, data)})


def is_right(entry: Entry, content: Content) -> bool:
    """Whether a file holds what belongs under its key."""
    (size,) = content.tensors["x"].shape
    return bool((content.tensors["x"].data == bytes_of(entry.key, size)).all())


def everything(shelf: Shelf) -> list[Entry]:
    """All of a shelf's entries."""
    return list(shelf._listing.entries())


def churn(directory: str, budget: int, seed: int, rounds: int = 0) -> None:
    """Write, read, touch and evict at random; without end, or for some rounds and then close."""
    dice = random.Random(seed)
    store = Store(Path(directory), budget=budget)
    shelf = store.shelf("model", "a model")
    done = 0
    while not rounds or done < rounds:
        done += 1
        ids = ids_of(dice.randrange(40))
        for at in range(0, len(ids), PAGE):
            put(shelf, ids, at, at + PAGE)
        put(shelf, ids, 0, dice.randint(1, len(ids)), "state")
        if dice.random() < 0.3:
            store.flush(10)
        known = everything(shelf)
        for entry in dice.sample(known, min(3, len(known))):
            content = shelf.read(entry)
            if content is not None and not is_right(entry, content):
                os._exit(3)
        shelf.touch(dice.sample(known, min(2, len(known))))
    if not store.close(20) or store.faults.count:
        print(store.faults, file=sys.stderr)
        os._exit(4)


def limited(directory: str) -> None:
    """Write a small page, then a large one with files limited to less; then a small one again."""
    import resource

    clock = [1000.0]
    store = Store(Path(directory), budget=1 << 30, now=lambda: clock[0])
    shelf = store.shelf("model")
    ids = ids_of(0)
    put(shelf, ids, 0, PAGE, size=1000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    put(shelf, ids, PAGE, 2 * PAGE, size=300_000)
    assert store.flush(10)
    assert store.faults.count == 1, store.faults
    assert not put(shelf, ids, 2 * PAGE, 3 * PAGE, size=1000), "it pauses"
    clock[0] += 61
    assert put(shelf, ids, 2 * PAGE, 3 * PAGE, size=1000)
    assert store.close(10)
    assert store.faults.count == 1, store.faults


def threadless(directory: str) -> None:
    """End while a store waits for nothing and nobody closed it."""
    store = Store(Path(directory), budget=1 << 30)
    put(store.shelf("model"), ids_of(0), 0, PAGE)
    store.flush(10)


TASKS = {"churn": churn, "limited": limited, "threadless": threadless}


def _do(task: str, **arguments: Any) -> None:
    TASKS[task](**arguments)


if __name__ == "__main__":
    serve(_do)
