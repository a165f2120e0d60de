"""MLX's own limits, set from the machine in this one place.

``Limits.for_machine`` is pure and says what each backend gets; ``set_limits`` puts it into force.

* The *memory limit* is what MLX tries to stay under. Metal waits for running work to free memory
  before it goes beyond, and raises where that doesn't help; CUDA gives freed buffers back first;
  the CPU backend knows no limit: there ``engine/pressure.py`` alone keeps it.
* The *cache limit* bounds the buffers that MLX keeps after they were freed. By default they may
  grow up to the memory limit, and prefix caches would never see that memory as free.
* The *wired limit* (Metal, macOS 15) is what stays resident while the GPU works; by default
  nothing does, and weights beyond what the system likes to keep are paged in at each token. More
  than the device recommends is refused by the system.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_jupyter.models import allocator, memory, precision

if TYPE_CHECKING:
    from mlx_jupyter.models.precision import Backend

LEAST_BUFFERS, MOST_BUFFERS = 64 << 20, 2 << 30
"""Bounds of the cache of freed buffers, which takes a sixteenth of the memory: enough for the
activations of one prefill chunk, which each chunk frees and the next one takes again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes; ``wired`` is None where there is no such limit."""

    memory: int
    cache: int
    wired: int | None = None

    @classmethod
    def for_machine(
        cls, where: Backend, total: int, user: int | None, working_set: int | None
    ) -> Limits:
        """What a backend gets.

        Args:
            where: the backend.
            total: bytes that this process may use.
            user: the user's own bound on MLX's arrays, or None.
            working_set: bytes that Metal recommends to keep wired at most, where it says so.
        """
        bound = total if user is None else min(user, total)
        cache = max(LEAST_BUFFERS, min(bound // 16, MOST_BUFFERS))
        if where == "metal" and working_set is not None:
            return cls(bound, cache, min(bound, working_set))
        return cls(bound, cache)


def set_limits(user: int | None) -> Limits:
    """Bound what MLX takes; call it once, before the first model is loaded.

    Args:
        user: the user's bound in bytes; the machine's when None.
    """
    import mlx.core as mx

    where = precision.backend()
    working_set = None
    if where == "metal":
        found = mx.device_info().get("max_recommended_working_set_size")
        working_set = found if isinstance(found, int) else None
    chosen = Limits.for_machine(where, memory.measured().limit, user, working_set)
    if where == "cpu":
        allocator.keep_freed()
    mx.set_memory_limit(chosen.memory)
    mx.set_cache_limit(chosen.cache)
    if chosen.wired is not None:
        mx.set_wired_limit(chosen.wired)
    return chosen


def trim_buffers() -> None:
    """Give the buffers that MLX has freed back to the system: after a prefill, and when idle."""
    import mlx.core as mx

    mx.clear_cache()
    allocator.trim()
