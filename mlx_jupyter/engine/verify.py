"""Checks a hit of the prefix cache: the same tokens warm, and cold through the same passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_jupyter.cache import exact
from mlx_jupyter.errors import Interrupted

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from mlx_jupyter.cache.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Verification:
    """How much the logits after the last token differ, warm against cold.

    Attributes:
        tokens: tokens of the sampled sequence.
        cached: of which the warm run took from the cache.
        passes: forward passes of the cold run.
        largest: largest absolute difference of two logits.
        scale: largest absolute logit of the cold run.
        same_passes: the cold run repeated the very passes that computed what was cached
            (exactness mode); else it used the model's prefill chunks, and differences of a few
            roundings are expected.
    """

    tokens: int
    cached: int
    passes: int
    largest: float
    scale: float
    same_passes: bool

    @property
    def equal(self) -> bool:
        """Whether all bits agree."""
        return self.largest == 0.0

    def __str__(self) -> str:
        how = "the same passes" if self.same_passes else "prefill chunks"
        found = "bit-equal" if self.equal else f"off by at most {self.largest:.2g}"
        return (
            f"{self.cached:,} of {self.tokens:,} tokens from the cache: logits {found} "
            f"(largest logit {self.scale:.3g}) to a cold run of {how}"
        )


def sample(cache: PrefixCache, rng: random.Random) -> np.ndarray | None:
    """The ids, int32, of a stored sequence that would be a hit; None when nothing is cached."""
    nodes = list(cache.trie.nodes())
    rng.shuffle(nodes)
    for node in nodes:
        ids = np.concatenate([each.tokens for each in node.path()])
        if len(ids) > 1 and cache.plan(ids).cached:
            return ids
    return None


def verify(
    cache: PrefixCache,
    model: Any,
    ids: np.ndarray,
    chunk: int,
    cancelled: Callable[[], bool] = lambda: False,
) -> Verification:
    """Serve ``ids`` from the cache, then compute them again with an empty one, and compare.

    The second cache is held beside the first one meanwhile. Runs on the engine thread.

    Args:
        cache: the model's prefix cache.
        model: takes ids of shape (1, tokens) and a list of mlx-lm caches, gives logits.
        ids: int32, shape (tokens,), at least two.
        chunk: tokens of a full prefill step.
        cancelled: looked at between passes.

    Raises:
        Interrupted: cancelled; the prefix cache has recorded what was computed.
    """
    with cache.open(ids) as session:
        start = session.start
        stored = exact.flags(cache.path_to(ids[:start]), start)
        at, ends = start, []
        while at < len(ids):
            last = len(ids) - 1 if at < len(ids) - 1 else len(ids)
            end = min((at // chunk + 1) * chunk, session.next_cut(at), last)
            warm = _step(model, ids[at:end], session.layers, cancelled)
            session.advance(ids[at:end].tolist())
            session.settle()
            ends.append(end)
            at = end
    known = exact.places(stored).tolist() if cache.exact else range(chunk, start + 1, chunk)
    passes = sorted({*known, start, *ends} - {0})
    cold, at = warm, 0
    layers = cache.live.fresh()
    for end in passes:
        cold = _step(model, ids[at:end], layers, cancelled)
        at = end
    return Verification(
        tokens=len(ids),
        cached=start,
        passes=len(passes),
        largest=float(np.abs(warm - cold).max()),
        scale=float(np.abs(cold).max()),
        same_passes=cache.exact,
    )


def _step(
    model: Any, ids: Iterable[int], layers: list[Any], cancelled: Callable[[], bool]
) -> np.ndarray:
    """Logits after the last of the ids, float32, shape (vocabulary,)."""
    if cancelled():
        raise Interrupted
    logits = model(mx.array(np.asarray(ids)[None]), cache=layers)[0, -1].astype(mx.float32)
    mx.eval(logits, [layer.state for layer in layers])
    return np.array(logits)
