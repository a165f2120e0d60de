"""Memory over time: one sample for each thing that was published, a bounded number of them.

Nothing polls: between two samples nothing happened that the engine knows of.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_jupyter.engine.status import MemoryUse

KEPT = 400
"""Samples that are remembered; the oldest go first."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes in use at one moment, as in ``MemoryUse``.

    Attributes:
        number: counts the samples of an engine from 0.
        at: seconds by the engine's clock.
        weights: of all loaded models.
        live: buffers of the live caches.
        stored: pages and snapshots outside them.
        free: buffers that MLX keeps for reuse.
        budget: what live and stored may take together.
        limit: MLX's memory limit.
    """

    number: int
    at: float
    weights: int
    live: int
    stored: int
    free: int
    budget: int
    limit: int


class History:
    """See the module. Added to by one thread, read by any.

    Args:
        clock: monotonic seconds.
        kept: how many samples are remembered.
    """

    def __init__(self, clock: Callable[[], float], kept: int = KEPT) -> None:
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=kept)
        self._next = 0

    def add(self, memory: MemoryUse) -> None:
        """Remember a moment, unless it is like the one before."""
        made = Sample(
            number=self._next,
            at=self._clock(),
            weights=memory.weights,
            live=memory.live,
            stored=memory.stored,
            free=memory.cache,
            budget=memory.budget,
            limit=memory.limit,
        )
        last = self._samples[-1] if self._samples else None
        if last is not None and replace(made, number=last.number, at=last.at) == last:
            return
        self._next += 1
        self._samples.append(made)

    def samples(self) -> tuple[Sample, ...]:
        """What is remembered, oldest first."""
        return tuple(self._samples.copy())
