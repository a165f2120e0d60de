"""One adapter for each kind of mlx-lm cache: how its content is stored and brought back.

A *rows* layer holds one row of K and V for each token and can be rewound to any position; what is
stored of it are rows. A *window* layer holds the last rows only; it can be restored at any
position whose window of rows is stored. A *state* layer (everything else) can be brought back only
to the exact offset of a snapshot; what is stored is the whole object, compacted. An unknown class
is a state: reuse is coarser, never wrong. Only the class itself counts, since a subclass may add
state of its own. Adapters work on the leaves of nested caches.

Nothing here keeps a view of a live buffer: a held view makes the next append copy the whole
buffer, and pins it. What is stored must be compact copies, evaluated before the next append.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_jupyter.cache.arrays import arrays_in, compact, mapped
from mlx_jupyter.cache.blank import blank
from mlx_jupyter.cache.needs import Needs, Window

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PINNED = 4096
"""Bytes that a live state may keep alive beside its own; a page of memory is not worth a copy."""

Rows = tuple[mx.array, ...]
"""Rows of some tokens, the token axis is the last but one: K and V of shape (batch, heads, tokens,
width), or the packed values, scales and biases of both when the cache is quantized."""


def cut(arrays: Rows, start: int, end: int) -> Rows:
    """The tokens ``[start, end)`` of each array, as views."""
    return tuple(a[..., start:end, :] for a in arrays)


def signature(arrays: Rows) -> tuple[Any, ...]:
    """Shapes and dtypes without the token axis; layers with equal ones are stored stacked."""
    return tuple((*a.shape[:-2], a.shape[-1], str(a.dtype)) for a in arrays)


class RowsLayer:
    """``KVCache``: rows of all tokens in a buffer that grows in steps.

    Attributes:
        count: how many buffers it has.
    """

    count = 2

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @property
    def offset(self) -> int:
        """Tokens that it holds."""
        return int(self.cache.offset)

    @property
    def arrays(self) -> Rows:
        """The buffers; empty before the first token."""
        return () if self.cache.keys is None else (self.cache.keys, self.cache.values)

    def _set(self, arrays: Rows) -> None:
        self.cache.keys, self.cache.values = arrays

    @property
    def capacity(self) -> int:
        """Rows that fit before the buffer must grow."""
        return int(self.arrays[0].shape[-2]) if self.arrays else 0

    def rows(self, start: int, end: int) -> Rows:
        """The rows ``[start, end)``, as lazy views."""
        assert 0 <= start < end <= self.offset, (start, end, self.offset)
        return cut(self.arrays, start, end)

    def rewind(self, at: int) -> None:
        """Forget the rows from ``at`` on; the buffer stays, for those that come next."""
        assert at <= self.offset, (at, self.offset)
        self.cache.offset = at

    def advance(self, at: int) -> None:
        """The rows up to ``at`` have been written into the buffer's spare room."""
        assert self.offset <= at <= self.capacity, (self.offset, at, self.capacity)
        self.cache.offset = at

    def resize(self, total: int) -> None:
        """Move the rows into buffers of ``total`` rows."""
        assert total >= self.offset
        moved = tuple(_joined([a[..., : self.offset, :]], total) for a in self.arrays)
        mx.eval(moved)  # while the old ones are held: else their buffers would be used again
        self._set(moved)

    def reserve(self, total: int) -> None:
        """Grow the buffers to ``total`` rows now, so that no append has to copy them later."""
        if self.arrays and self.capacity < total:
            self.resize(total)

    def append(self, parts: Sequence[Rows], total: int) -> None:
        """Put stored rows behind those that are there, in buffers of ``total`` rows, lazily.

        In place when they fit, piece by piece: one copy, and no new memory to map. Else by one
        concatenation into a new buffer of its own: views of one big array for all layers would be
        copied whole by the first append.
        """
        end = self.offset + sum(int(p[0].shape[-2]) for p in parts)
        if self.capacity >= max(end, total):
            at = self.offset
            for part in parts:
                after = at + int(part[0].shape[-2])
                for buffer, piece in zip(self.arrays, part, strict=True):
                    buffer[..., at:after, :] = piece
                at = after
        else:
            kept = [self.rows(0, self.offset)] if self.arrays and self.offset else []
            both = zip(*kept, *parts, strict=True)
            self._set(tuple(_joined(pieces, max(end, total)) for pieces in both))
        self.cache.offset = end

    def take(self, arrays: Rows) -> None:
        """Have these buffers, all of them spare room; it must hold nothing."""
        assert not self.offset
        self._set(arrays)

    def let_go(self) -> None:
        """Have no buffers; it must hold nothing."""
        assert not self.offset
        self.cache.keys = self.cache.values = None


class ConcatenatedRows(RowsLayer):
    """``ConcatenateKVCache``: rows of all tokens, copied at every append."""

    def rewind(self, at: int) -> None:
        """Forget the rows from ``at`` on; its own ``trim`` would leave them in the arrays."""
        if at == self.offset:
            return
        super().rewind(at)
        if at:
            # A lazy cut would keep the longer buffer.
            self._set(tuple(map(compact, cut(self.arrays, 0, at))))
            mx.eval(self.arrays)
        else:
            self.cache.keys = self.cache.values = None

    def resize(self, total: int) -> None:
        """Its arrays are always as long as the rows."""

    def append(self, parts: Sequence[Rows], total: int) -> None:
        """Put stored rows behind those that are there."""
        del total
        super().append(parts, 0)


class QuantizedRows(RowsLayer):
    """``QuantizedKVCache``: packed values, scales and biases of K and V."""

    count = 6

    @property
    def arrays(self) -> Rows:
        """The six buffers; empty before the first token."""
        return () if self.cache.keys is None else (*self.cache.keys, *self.cache.values)

    def _set(self, arrays: Rows) -> None:
        # Lists, as the class itself assigns to their elements.
        self.cache.keys, self.cache.values = list(arrays[:3]), list(arrays[3:])


class WindowLayer:
    """``RotatingKVCache``: the last rows in a ring, and the first ``keep`` ones."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.window = Window("sliding", int(cache.max_size), int(cache.keep))

    @property
    def offset(self) -> int:
        """Tokens that it has seen."""
        return int(self.cache.offset)

    @property
    def first(self) -> int:
        """The first of the positions up to its offset whose rows are all there."""
        return max(self.offset - (self.window.size - self.window.keep), 0)

    def rows(self, start: int, end: int) -> Rows:
        """The rows ``[start, end)``, as lazy views of a copy in temporal order.

        They must still be there: after a prefill chunk all its rows are, in decode the last
        ``max_size - 1`` tokens' are.
        """
        cache, keep = self.cache, self.window.keep
        arrays = [cache._temporal_order(a) for a in (cache.keys, cache.values)]  # noqa: SLF001
        first = self.offset - (int(arrays[0].shape[-2]) - keep)
        if start < keep:
            assert end <= keep or first == keep, (start, end, first)
            return cut(tuple(arrays), start, end)
        assert first <= start < end <= self.offset, (start, end, first, self.offset)
        return cut(tuple(arrays), start - first + keep, end - first + keep)

    def restore(self, at: int, parts: Sequence[Rows], since: int | None = None) -> None:
        """Stand at ``at`` with the rows that ``window.needs(at)`` names, in order; evaluated.

        With ``since`` they lie in the buffer as after single tokens from there on: the ring is
        turned, and sums over it add up in the same order.
        """
        cache = self.cache
        cache.offset = at
        if not parts:
            cache.keys = cache.values = None
            cache._idx = 0  # noqa: SLF001
            return
        cache.keys, cache.values = (_own(pieces) for pieces in zip(*parts, strict=True))
        cache._idx = int(cache.keys.shape[-2])  # noqa: SLF001
        size, keep = self.window.size, self.window.keep
        turned = 0 if since is None else max(at - max(since, size), 0) % (size - keep)
        if turned:
            cache.keys, cache.values = (
                mx.concatenate([a[..., :keep, :], mx.roll(a[..., keep:, :], turned, -2)], axis=-2)
                for a in (cache.keys, cache.values)
            )
            cache._idx = keep + turned  # noqa: SLF001
        mx.eval(cache.keys, cache.values)


class ChunkedLayer(WindowLayer):
    """``ChunkedKVCache``: the rows of the current chunk of the sequence, and some before it."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.window = Window("chunked", int(cache.chunk_size))

    @property
    def first(self) -> int:
        """The first of the positions up to its offset whose rows are all there."""
        return int(self.cache.start_position)

    def rows(self, start: int, end: int) -> Rows:
        """The rows ``[start, end)``, as lazy views."""
        first = int(self.cache.start_position)
        assert first <= start < end <= self.offset, (start, end, first, self.offset)
        return cut((self.cache.keys, self.cache.values), start - first, end - first)

    def restore(self, at: int, parts: Sequence[Rows], since: int | None = None) -> None:
        """Stand at ``at`` with the rows since the last chunk boundary; evaluated."""
        del since  # never a ring
        cache = self.cache
        cache.offset = at
        cache.start_position = at - sum(int(p[0].shape[-2]) for p in parts)
        if parts:
            cache.keys, cache.values = (_own(pieces) for pieces in zip(*parts, strict=True))
            mx.eval(cache.keys, cache.values)
        else:
            cache.keys = cache.values = None


class StateLayer:
    """Anything else: kept and brought back as a whole."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def snapshot(self) -> Any:
        """A compact copy that later changes can't reach, evaluated.

        Live states are views that pin whole activations.
        """
        twin = mapped(self.cache, compact)
        mx.eval(arrays_in(twin))
        return twin

    def compact(self) -> None:
        """Let go of the activations that the live arrays are views of, where that is much."""

        def own(array: mx.array) -> mx.array:
            pinned = mx.get_array_buffer_size(array) - array.nbytes
            return compact(array) if pinned > PINNED else array

        self.cache.__dict__.update(mapped(self.cache, own).__dict__)
        mx.eval(arrays_in(self.cache))

    def restore(self, twin: Any) -> None:
        """Become what the snapshot is; it stays as it is (buffers are shared until written)."""
        self.cache.__dict__.clear()
        self.cache.__dict__.update(mapped(twin, copy.copy).__dict__)


def _own(parts: Sequence[mx.array]) -> mx.array:
    """The parts in one buffer that nothing else holds."""
    return compact(parts[0]) if len(parts) == 1 else mx.concatenate(list(parts), axis=-2)


def _joined(parts: Sequence[mx.array], total: int) -> mx.array:
    """The parts in one new buffer of ``total`` rows, the spare ones zero."""
    count = sum(int(p.shape[-2]) for p in parts)
    if total <= count:
        return _own(parts)
    *front, _, width = parts[0].shape
    spare = mx.zeros((*front, total - count, width), parts[0].dtype)
    return mx.concatenate([*parts, spare], axis=-2)


def allocate(
    layers: Sequence[RowsLayer], buffers: Sequence[Sequence[tuple[tuple[int, ...], mx.Dtype]]]
) -> None:
    """Give each layer buffers of these shapes and types, all of them spare room."""
    made = iter(blank([each for some in buffers for each in some]))
    for layer, some in zip(layers, buffers, strict=True):
        layer.take(tuple(next(made) for _ in some))


# --- the whole cache --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaf caches of a model's cache, each in its adapter, in the order of the layers."""

    rows: tuple[RowsLayer, ...]
    windows: tuple[WindowLayer, ...]
    states: tuple[StateLayer, ...]

    @classmethod
    def of(cls, cache: Sequence[Any]) -> Leaves:
        """The leaves of a cache made by ``make_prompt_cache``."""
        from mlx_lm.models import cache as lm

        adapters: dict[type, type[RowsLayer] | type[WindowLayer]] = {
            lm.KVCache: RowsLayer,
            lm.ConcatenateKVCache: ConcatenatedRows,
            lm.QuantizedKVCache: QuantizedRows,
            lm.RotatingKVCache: WindowLayer,
            lm.ChunkedKVCache: ChunkedLayer,
        }
        made = [adapters.get(type(leaf), StateLayer)(leaf) for leaf in _leaves(cache)]
        return cls(
            tuple(a for a in made if isinstance(a, RowsLayer)),
            tuple(a for a in made if isinstance(a, WindowLayer)),
            tuple(a for a in made if isinstance(a, StateLayer)),
        )

    @property
    def needs(self) -> Needs:
        """What restoring these leaves takes."""
        return Needs(
            windows=tuple(dict.fromkeys(w.window for w in self.windows)),
            stateful=bool(self.states),
        )

    @property
    def counts(self) -> tuple[tuple[str, int], ...]:
        """(kind, number of leaves), kinds without leaves left out."""
        each = (("rows", self.rows), ("window", self.windows), ("state", self.states))
        return tuple((kind, len(leaves)) for kind, leaves in each if leaves)

    def offsets(self) -> Iterator[int]:
        """Where the leaves that know it stand."""
        yield from (leaf.offset for leaf in self.rows)
        yield from (leaf.offset for leaf in self.windows)
        for state in self.states:
            at = getattr(state.cache, "offset", None)
            if isinstance(at, int):
                yield at


def _leaves(cache: Sequence[Any]) -> Iterator[Any]:
    from mlx_lm.models.cache import CacheList

    for layer in cache:
        if type(layer) is CacheList:
            yield from _leaves(layer.caches)
        else:
            yield layer
