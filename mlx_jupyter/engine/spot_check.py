"""Pages from a file against the model itself: a stretch of them, drawn at random, computed again.

The model starts from what the file has before the stretch and computes the stretch; what it gets
must be what the file has there, but for roundings. Pages of another model, of another precision or
of other tokens are found out by any stretch. Somebody who changes a few numbers on purpose isn't:
the stretch is one of many, and what lies before it is taken as it is. That is why such pages are
lent (``cache/lending.py``).

Used on the engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_jupyter.cache.arrays import arrays_in
from mlx_jupyter.cache.live import Live
from mlx_jupyter.cache.luggage import Likeness
from mlx_jupyter.cache.needs import joined
from mlx_jupyter.cache.pages import stack

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    import numpy as np

    from mlx_jupyter.cache.luggage import Luggage
    from mlx_jupyter.cache.pages import Stacks
    from mlx_jupyter.cache.prefix_cache import PrefixCache

STRETCH = 64
"""Tokens of a stretch, where it need not reach to a snapshot."""

FARTHEST = 1024
"""Tokens to the next snapshot beyond which that isn't computed."""

CLOSE, CLOSE_16 = 1e-3, 1e-1
"""By how much of a layer's largest number another may be off: with 32 bits, with 16."""

ALIKE = 0.9
"""The share of whole numbers (quantized rows) that must be equal: a rounding moves some."""


def likeness(cache: PrefixCache, model: Any, ids: np.ndarray) -> Likeness:
    """What the things of a model look like, from a pass over one token; the cache stays empty."""
    probe = Live(cache.live.fresh)
    _feed(model, probe, ids[:1], 1)
    like = Likeness.of(probe)
    cache.live.take_order(like.order)
    return like


def agrees(
    cache: PrefixCache,
    model: Any,
    luggage: Luggage,
    chunk: int,
    dice: random.Random,
    stopped: Callable[[], None] = lambda: None,
) -> bool:
    """Whether a stretch of what a file has is what the model computes from what comes before it.

    A second cache is held meanwhile.

    Args:
        cache: the model's; stays as it is.
        model: takes ids of shape (1, tokens) and a list of mlx-lm caches.
        luggage: what the file has.
        chunk: tokens of a full prefill step.
        dice: draws the stretch.
        stopped: called between passes; may raise.
    """
    places = stretches(cache, luggage)
    if not places:
        return False
    start, end = dice.choice(places)
    if not cache.needs.windows and not cache.needs.stateful:
        start = dice.randrange(start, end)
        end = min(start + STRETCH, end)
    probe = _standing(cache, luggage, start, end)
    at = start
    while at < end:
        stopped()
        fed = luggage.ids[at : min((at // chunk + 1) * chunk, end)]
        _feed(model, probe, fed, end)
        at += len(fed)
    return _same_rows(probe, luggage, start, end) and _same_states(probe, luggage, end)


def stretches(cache: PrefixCache, luggage: Luggage) -> list[tuple[int, int]]:
    """The stretches that can be computed and compared; for full layers alone one that holds all."""
    covered = luggage.pages[-1].end if luggage.pages else 0
    needs = cache.needs
    if not needs.windows and not needs.stateful:
        return [(0, covered)] if covered else []
    held = joined((strip.start, strip.end) for strip in luggage.strips)
    marks = [m.at for m in luggage.marks if needs.windows_held(m.at, held)]
    places = [0, *marks]
    found = [(a, b) for a, b in zip(places, marks, strict=False) if b - a <= FARTHEST]
    if luggage.pages:
        nexts = [*marks, covered]
        found += [
            (a, min(a + STRETCH, covered))
            for a, b in zip(places, nexts, strict=True)
            if b - a > FARTHEST
        ]
    return found


def _standing(cache: PrefixCache, luggage: Luggage, at: int, total: int) -> Live:
    """A live cache of its own that stands in the luggage's sequence."""
    probe = Live(cache.live.fresh)
    probe.take_order(cache.live.order)
    if at:
        pages = [page for page in luggage.pages if page.start < at]
        probe.read_in(pages, luggage.ids[:at], total)
        probe.set_windows(at, luggage.strips)
        probe.set_states(next((m.states for m in luggage.marks if m.at == at), ()))
    return probe


def _feed(model: Any, probe: Live, ids: np.ndarray, total: int) -> None:
    probe.reserve(total)
    logits = model(mx.array([ids.tolist()]), cache=probe.layers)
    mx.eval(logits)
    probe.ids.extend(ids.tolist())
    probe.evaluate()


def _same_rows(probe: Live, luggage: Luggage, start: int, end: int) -> bool:
    for page in luggage.pages:
        a, b = max(page.start, start), min(page.end, end)
        if a < b and not _close(page.within(a, b), stack(probe.full_layers(), a, b)):
            return False
    if not probe.leaves.windows:
        return True
    first = max(start, probe.first_window_row())
    for strip in luggage.strips:
        a, b = max(strip.start, first), min(strip.end, end)
        if a < b and not _close(strip.within(a, b), probe.window_rows(a, b)):
            return False
    return True


def _same_states(probe: Live, luggage: Luggage, at: int) -> bool:
    theirs = next((m.states for m in luggage.marks if m.at == at), ())
    if not theirs or not probe.leaves.states:
        return True
    ours = [layer.snapshot() for layer in probe.leaves.states]
    return all(
        _close(((mine,),), ((yours,),))
        for mine, yours in zip(arrays_in(ours), arrays_in(list(theirs)), strict=True)
    )


def _close(theirs: Stacks, ours: Stacks) -> bool:
    """Whether each layer's numbers are the same, but for roundings."""
    return all(
        _near(their, our)
        for some, own in zip(theirs, ours, strict=True)
        for their, our in zip(some, own, strict=True)
    )


def _near(their: mx.array, our: mx.array) -> bool:
    if their.shape != our.shape or their.dtype != our.dtype:
        return False
    if not our.size:
        return True
    if not mx.issubdtype(our.dtype, mx.floating):
        return bool((mx.mean(their == our) >= ALIKE).item())
    close = CLOSE if our.dtype == mx.float32 else CLOSE_16
    layers = our.shape[0] if our.ndim > 1 else 1
    theirs, ours = (a.astype(mx.float32).reshape(layers, -1) for a in (their, our))
    off, largest = mx.abs(theirs - ours).max(axis=1), mx.abs(ours).max(axis=1)
    return bool((off <= close * largest + 1e-6).all().item())  # false for what is no number
