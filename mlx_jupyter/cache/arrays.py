"""The arrays of cache objects, whatever their class: found, copied, counted."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable


def compact(array: mx.array) -> mx.array:
    """A copy in a buffer of its own size, lazily.

    ``mx.contiguous`` keeps a parent that is less than about 16 KB larger.
    """
    return mx.full(array.shape, array)


def mapped(value: Any, array: Callable[[mx.array], mx.array]) -> Any:
    """A copy of a cache object, nested ones included, with its arrays put through ``array``."""
    if isinstance(value, mx.array):
        return array(value)
    if isinstance(value, list):
        return [mapped(v, array) for v in value]
    if isinstance(value, tuple):
        return tuple(mapped(v, array) for v in value)
    if isinstance(value, dict):
        return {k: mapped(v, array) for k, v in value.items()}
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        twin = copy.copy(value)
        for name, attribute in vars(value).items():
            setattr(twin, name, mapped(attribute, array))
        return twin
    return value


def arrays_in(value: Any) -> list[mx.array]:
    """Every array of a cache object, nested ones included."""
    found: list[mx.array] = []

    def note(a: mx.array) -> mx.array:
        found.append(a)
        return a

    mapped(value, note)
    return found


def buffer_bytes(values: Any) -> int:
    """Bytes of the buffers behind every array in ``values`` (spare room and pinned parents too)."""
    return sum(mx.get_array_buffer_size(a) for a in arrays_in(values))
