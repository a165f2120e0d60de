"""Looks ahead in a request's memory: what the next chunk and the growing cache take must be free.

What a chunk takes is measured, not guessed: MLX's peak during the last one, above what was held
before it. A longer chunk, and one further along, may take more in proportion (attention's scores
grow with what they look at), so the measured bytes are scaled by both; that is an upper bound, as
long as a part of them doesn't grow. Before anything was measured the estimate of
``models/admission.py`` stands in, and none at all for a model that was given as an object.

When it isn't free, in this order: MLX's freed buffers go back; the chunk is halved, so that chunks
still end at multiples of a power of two; pages are given up, other models' first; and at last
``OutOfMemory`` ends the request, with everything that was computed so far recorded.

An allocation that is refused all the same (Metal, CUDA) frees what can be and the request is tried
once more from what is stored of it (``serve.py``).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_jupyter.errors import OutOfMemory
from mlx_jupyter.models import memory
from mlx_jupyter.models.mlx_limits import trim_buffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_jupyter.cache.prefix_cache import PrefixCache

log = logging.getLogger(__name__)

MARGIN = 0.01
"""Share of the machine's memory that a running request leaves alone."""

SMALLEST = 16
"""Tokens below which a chunk isn't halved: its passes over the weights would take for ever."""

STEP = 256
"""Rows by which mlx-lm's caches grow."""


@dataclass(slots=True)
class Measured:
    """What a model's last chunk took: ``nbytes`` for ``tokens`` that ended at ``end``.

    ``tokens`` is 0 as long as nothing was measured; ``nbytes`` is then an estimate for a chunk of
    ``chunk`` tokens.
    """

    nbytes: int = 0
    chunk: int = 0
    tokens: int = 0
    end: int = 0

    def ahead(self, tokens: int, end: int) -> int:
        """Bytes that a chunk of ``tokens`` which ends at ``end`` may take."""
        if not self.tokens:
            return self.nbytes * tokens // self.chunk if self.chunk else 0
        scaled = self.nbytes * max(tokens / self.tokens, 0.0) * max(end / self.end, 1.0)
        return int(scaled)


class Pressure:
    """Watches one request; see the module.

    Args:
        cache: the prefix cache that it runs on.
        limit: the user's bound on MLX's arrays in bytes, or None.
        measured: what the model's last chunk took; kept up to date here.
        relieve: has the other caches give up at least so many bytes.
        total: tokens of the prompt.

    Attributes:
        peak: MLX's largest peak so far, in bytes.
        compute: the most that a chunk's activations took.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        limit: int | None,
        measured: Measured,
        relieve: Callable[[int], None],
        total: int,
    ) -> None:
        self._cache = cache
        self._limit = limit
        self._measured = measured
        self._relieve = relieve
        self._total = total
        self._before = 0
        self.peak = 0
        self.compute = 0

    # --- before ------------------------------------------------------------------------------

    def chunk_end(self, at: int, end: int, chunk: int) -> int:
        """Where the next chunk may end: ``end``, or earlier when memory is short.

        Args:
            at: where it begins.
            end: where it would end.
            chunk: tokens of a full one.

        Raises:
            OutOfMemory: not even the smallest has room.
        """
        found = self._fitting(at, end, chunk, self._free())
        if found is None:
            trim_buffers()
            found = self._fitting(at, end, chunk, self._free())
        if found is None:
            smallest = _end(at, end, SMALLEST)
            self._make_room(self._need(at, smallest))
            found = self._fitting(at, end, chunk, self._free())
        if found is None:
            raise OutOfMemory(self._need(at, smallest), self._free(), at, self._total)
        if found != end:
            log.debug("memory is short: a chunk ends at %d instead of %d", found, end)
        self._begin()
        return found

    def _fitting(self, at: int, end: int, chunk: int, free: int) -> int | None:
        """The furthest end whose chunk fits into so many free bytes."""
        size = chunk
        while True:
            tried = _end(at, end, size)
            if self._need(at, tried) <= free:
                return tried
            if size // 2 < SMALLEST:
                return None
            size //= 2

    def room_to_grow(self) -> None:
        """While generating: see that the live cache may grow as it is about to.

        Raises:
            OutOfMemory: it can't.
        """
        at = self._cache.live.offset
        need = self._growth(at + STEP)
        if need > self._free():
            trim_buffers()
        if need > self._free():
            self._make_room(need)
        if need > (free := self._free()):
            raise OutOfMemory(need, free, at, self._total)

    def _need(self, at: int, end: int) -> int:
        return self._measured.ahead(end - at, end) + self._growth(end)

    def _growth(self, end: int) -> int:
        """Bytes that the live cache grows by where its buffers end before ``end``."""
        growth = 0
        for layer in self._cache.live.leaves.rows:
            if layer.arrays and layer.capacity < end:
                row = sum(a.nbytes for a in layer.arrays) // layer.capacity
                growth += row * (-(-end // STEP) * STEP - layer.capacity)
        return growth

    def _free(self) -> int:
        return memory.free_within(self._limit, margin=MARGIN)

    def _make_room(self, need: int) -> None:
        """Have pages given up: other models' caches first, then this one's."""
        self._relieve(need - self._free())
        short = need - self._free()
        if short > 0:
            self._cache.spare(short)
        trim_buffers()

    # --- after -------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.peak = max(self.peak, mx.get_peak_memory())
        self._before = mx.get_active_memory()
        mx.reset_peak_memory()

    def computed(self, at: int, end: int) -> None:
        """A chunk is computed and evaluated: measure what it took."""
        peak = mx.get_peak_memory()
        self.peak = max(self.peak, peak)
        took = max(peak - self._before, 0)
        self.compute = max(self.compute, took)
        known = self._measured
        if end - at >= SMALLEST or not known.tokens:
            known.nbytes, known.tokens, known.end = took, end - at, end

    def torn(self) -> None:
        """Evaluating was refused: MLX's arrays are half made, and using them may end the process.

        What only the live cache held is computed again.
        """
        self._cache.drop_live()

    def exhausted(self, text: str) -> OutOfMemory:
        """The error for a request that can't go on: what was refused is in ``text``."""
        at = self._cache.live.offset
        need = self._need(at, at + SMALLEST)
        return OutOfMemory(need, self._free(), at, self._total, text)

    def refused(self) -> None:
        """An allocation was refused: free what can be, in this cache too."""
        self._relieve(1 << 62)
        # What the request itself goes on from was asked for last, so that the policy keeps it.
        self._cache.spare(self._cache.stored_bytes() // 2)
        trim_buffers()


def _end(at: int, end: int, size: int) -> int:
    return min((at // size + 1) * size, end)
