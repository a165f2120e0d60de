"""One adapter for each kind of mlx-lm cache: how its content is stored and brought back.

A ``rows`` layer holds one row of K and V for each token and can be rewound to any position; what
is stored of it are rows. A ``state`` layer (everything else) can be brought back only to the exact
offset of a snapshot; what is stored is the whole object, compacted. An unknown class is a state:
reuse is coarser, never wrong.

Nothing here keeps a view of a live buffer: a held view makes the next append copy the whole
buffer, and pins it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Kind = Literal["rows", "state"]
Rows = tuple[mx.array, mx.array]
"""K and V of some tokens: (batch, heads, tokens, width) each; the widths may differ."""


def kind_of(layer: Any) -> Kind:
    """The kind of a cache. Only the class itself counts: a subclass may add state of its own."""
    from mlx_lm.models.cache import KVCache

    return "rows" if type(layer) is KVCache else "state"


def rows_signature(layer: Any) -> tuple[Any, ...] | None:
    """Shapes and dtypes without the token axis; layers with equal ones are stored stacked."""
    if layer.keys is None:
        return None
    return tuple(
        (a.shape[0], a.shape[1], a.shape[3], str(a.dtype)) for a in (layer.keys, layer.values)
    )


def rows(layer: Any, start: int, end: int) -> Rows:
    """The rows ``[start, end)``, as lazy views: evaluate a compact copy before the next append."""
    assert 0 <= start < end <= layer.offset, (start, end, layer.offset)
    return layer.keys[..., start:end, :], layer.values[..., start:end, :]


def capacity(layer: Any) -> int:
    """Rows that fit before the buffer must grow."""
    return 0 if layer.keys is None else int(layer.keys.shape[2])


def rewind(layer: Any, at: int) -> None:
    """Forget the rows from ``at`` on; they stay in the buffer until they are overwritten."""
    assert at <= layer.offset, (at, layer.offset)
    layer.offset = at
    if at == 0:
        layer.keys = layer.values = None


def reserve(layer: Any, total: int) -> None:
    """Grow the buffers to ``total`` rows now, so that no append has to copy them later."""
    if layer.keys is None or capacity(layer) >= total:
        return
    layer.keys, layer.values = (
        _joined([a[..., : layer.offset, :]], total) for a in (layer.keys, layer.values)
    )
    mx.eval(layer.keys, layer.values)


def shrink(layer: Any, total: int) -> None:
    """Move the rows into buffers of ``total`` rows and give the larger ones up."""
    if layer.keys is None or capacity(layer) <= total:
        return
    layer.keys, layer.values = (
        _joined([a[..., : layer.offset, :]], total) for a in (layer.keys, layer.values)
    )
    mx.eval(layer.keys, layer.values)


def append_rows(layer: Any, parts: Sequence[Rows], total: int) -> None:
    """Put stored rows behind those that are there; evaluated, in buffers of ``total`` rows.

    In place when they fit, else by one copy into a new buffer of its own (one concatenation a
    layer is what is fastest on CPU; never views of one big array, whose first append copies all).
    """
    count = sum(int(k.shape[2]) for k, _ in parts)
    end = layer.offset + count
    if capacity(layer) >= max(end, total):
        layer.keys[..., layer.offset : end, :] = _cat([k for k, _ in parts])
        layer.values[..., layer.offset : end, :] = _cat([v for _, v in parts])
    else:
        kept = [] if layer.keys is None else [rows(layer, 0, layer.offset)] if layer.offset else []
        both = [*kept, *parts]
        room = max(end, total)
        layer.keys = _joined([k for k, _ in both], room)
        layer.values = _joined([v for _, v in both], room)
    layer.offset = end
    mx.eval(layer.keys, layer.values)


def compact(array: mx.array) -> mx.array:
    """A copy in a buffer of its own size, lazily.

    ``mx.contiguous`` keeps a parent that is less than about 16 KB larger.
    """
    return mx.full(array.shape, array)


def _cat(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=2)


def _joined(parts: Sequence[mx.array], total: int) -> mx.array:
    """The parts in one new buffer of ``total`` rows, the spare ones zero."""
    count = sum(int(p.shape[2]) for p in parts)
    batch, heads, _, width = parts[0].shape
    spare = (
        [mx.zeros((batch, heads, total - count, width), parts[0].dtype)] if total > count else []
    )
    return (
        mx.concatenate([*parts, *spare], axis=2)
        if len(parts) + len(spare) > 1
        else (compact(parts[0]))
    )


# --- states -----------------------------------------------------------------------------------


def _mapped(value: Any, array: Callable[[mx.array], mx.array]) -> Any:
    """A copy of a cache object, nested ones included, with its arrays put through ``array``."""
    if isinstance(value, mx.array):
        return array(value)
    if isinstance(value, list):
        return [_mapped(v, array) for v in value]
    if isinstance(value, tuple):
        return tuple(_mapped(v, array) for v in value)
    if isinstance(value, dict):
        return {k: _mapped(v, array) for k, v in value.items()}
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        twin = copy.copy(value)
        for name, attribute in vars(value).items():
            setattr(twin, name, _mapped(attribute, array))
        return twin
    return value


def arrays_in(value: Any) -> list[mx.array]:
    """Every array of a cache object, nested ones included."""
    found: list[mx.array] = []

    def note(a: mx.array) -> mx.array:
        found.append(a)
        return a

    _mapped(value, note)
    return found


def snapshot(layer: Any) -> Any:
    """A compact copy of a state layer that later changes of the layer can't reach.

    Live states are views that pin whole activations; the copy is evaluated here.
    """
    twin = _mapped(layer, compact)
    mx.eval(arrays_in(twin))
    return twin


def restored(twin: Any) -> Any:
    """A live layer from a snapshot, which stays as it is (its buffers are shared until written)."""
    return _mapped(twin, copy.copy)


def nbytes(values: Any) -> int:
    """Bytes of the buffers behind every array in ``values`` (spare room and pinned parents too)."""
    return sum(mx.get_array_buffer_size(a) for a in arrays_in(values))


@dataclass(frozen=True, slots=True)
class Layout:
    """Which layers of a model's cache are of which kind, by index."""

    rows: tuple[int, ...]
    states: tuple[int, ...]

    @classmethod
    def of(cls, cache: Sequence[Any]) -> Layout:
        """The layout of a cache made by ``make_prompt_cache``."""
        kinds = [kind_of(layer) for layer in cache]
        return cls(
            tuple(i for i, k in enumerate(kinds) if k == "rows"),
            tuple(i for i, k in enumerate(kinds) if k == "state"),
        )

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """(kind, number of layers), kinds without layers left out."""
        both = (("rows", len(self.rows)), ("state", len(self.states)))
        return tuple((kind, n) for kind, n in both if n)
