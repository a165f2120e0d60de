"""Content addresses of what is stored: equal content has one address in every kernel.

A sequence of token ids has a *chain key* at each multiple of ``PAGE``: that of offset 0 is the
``root``, made of the model's fingerprint; each full page leads to the next. A stored thing hangs on
the chain key at its *base*, the last multiple of ``PAGE`` before its end, and is named by what
follows from there. So a key stands for the model and for every token up to the thing's end.

Keys are 16 bytes of BLAKE2b: nobody finds two contents with one key, even on purpose.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import numpy as np

from mlx_jupyter.cache.trie import PAGE

SIZE = 16
"""Bytes of a key."""

Kind = Literal["rows", "window", "state"]
"""The full layers' rows (a page), the window layers' (a strip), the state layers' content."""


def root(fingerprint: str) -> bytes:
    """The chain key at offset 0 for a model whose fingerprint is this."""
    return blake2b(fingerprint.encode(), digest_size=SIZE, person=b"mlxj root").digest()


def chain(parent: bytes, tokens: np.ndarray) -> bytes:
    """The chain key after the full page ``tokens``, int32, shape (PAGE,)."""
    assert len(tokens) == PAGE, f"{len(tokens)} tokens are no full page"
    return blake2b(parent + _bytes(tokens), digest_size=SIZE, person=b"mlxj chain").digest()


def chains(first: bytes, ids: np.ndarray) -> list[bytes]:
    """The chain keys at 0, PAGE, 2 × PAGE … up to the last full page of ``ids``."""
    keys = [first]
    for at in range(0, len(ids) - PAGE + 1, PAGE):
        keys.append(chain(keys[-1], ids[at : at + PAGE]))
    return keys


def entry(parent: bytes, tokens: np.ndarray, kind: Kind, start: int) -> bytes:
    """The key of a stored thing.

    Args:
        parent: the chain key at its base.
        tokens: the ids from its base to its end, int32.
        kind: what it is.
        start: its first token; for a snapshot its end.
    """
    place = kind.encode().ljust(8, b"\0") + start.to_bytes(8, "little")
    whole = parent + place + _bytes(tokens)
    return blake2b(whole, digest_size=SIZE, person=b"mlxj entry").digest()


def base(end: int) -> int:
    """The offset of the chain key that a thing with this end hangs on."""
    return (end - 1) // PAGE * PAGE


def end(kind: Kind, start: int, count: int) -> int:
    """Where a thing ends that has ``count`` tokens from its base on.

    Raises:
        ValueError: there is no such thing.
    """
    at = base(start) if kind == "state" else start // PAGE * PAGE
    until = at + count
    if not 0 < count <= PAGE or at < 0 or (until != start if kind == "state" else until <= start):
        raise ValueError(f"No {kind} of {start} has {count} tokens from the page boundary on.")
    return until


def _bytes(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, "<i4").tobytes()
