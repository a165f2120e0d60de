"""The live cache: what the model itself reads and writes, and the ids that it holds."""

from __future__ import annotations

import json
from array import array
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_jupyter.cache import direct
from mlx_jupyter.cache import layers as ly
from mlx_jupyter.cache.arrays import arrays_in, buffer_bytes
from mlx_jupyter.cache.packing import HostRows
from mlx_jupyter.cache.pages import Placed, Stacks, Strip, group, joined_stacks, stack, unstack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_jupyter.cache.needs import Span
    from mlx_jupyter.cache.pages import RowSource


GROUP_BYTES = 1 << 30
"""Bytes of layers that are restored together on a GPU."""


class Live:
    """See the module.

    Args:
        make: makes an empty mlx-lm cache for the model.

    Attributes:
        layers: what the model is given as its cache.
        leaves: the adapters of its leaf caches.
        ids: the tokens that were fed to it.
        windowed: up to where its window rows have been stored.
        passes: for each of the ids whether a forward pass ended after it; in exactness mode only.
        computed_from: tokens that were there before the last request's first pass, likewise.
        gpu: whether it lies on a GPU, where launches cost more than copies.
    """

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self._make = make
        self.gpu = mx.default_device().type == mx.DeviceType.gpu
        self._order: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self.reset()

    def reset(self) -> None:
        """Become empty."""
        self.layers = self._make()
        self.leaves = ly.Leaves.of(self.layers)
        self.ids = array("i")
        self.passes = bytearray()
        self.computed_from = 0
        self.windowed = 0

    def fresh_states(self) -> tuple[ly.StateLayer, ...]:
        """The state layers of another, empty cache."""
        return ly.Leaves.of(self._make()).states

    def fresh(self) -> list[Any]:
        """Another, empty cache for the model."""
        return self._make()

    @property
    def offset(self) -> int:
        """Tokens that it holds."""
        return len(self.ids)

    def id_array(self) -> np.ndarray:
        """The ids, int32, a copy."""
        return np.array(self.ids, np.int32)

    def nbytes(self) -> int:
        """Bytes of its buffers, spare rows included."""
        return buffer_bytes(self.layers)

    def row_bytes(self) -> int:
        """Bytes of one token's rows over all full layers; 0 before the first token."""
        return sum(
            sum(a.nbytes for a in layer.arrays) // layer.capacity
            for layer in self.leaves.rows
            if layer.capacity
        )

    def state_bytes(self) -> int:
        """Bytes that a snapshot of the state layers takes."""
        return sum(a.nbytes for leaf in self.leaves.states for a in arrays_in(leaf.cache))

    # --- like layers together ----------------------------------------------------------------

    def learn_order(self) -> None:
        """Once there is content: the order of the layers in which like ones stand together."""
        if self._order is not None or not self.offset:
            return
        rows = [(i, layer.rows(0, 1)) for i, layer in enumerate(self.leaves.rows)]
        last = self.offset - 1
        windows = [(i, w.rows(last, last + 1)) for i, w in enumerate(self.leaves.windows)]
        self._order = _grouped(rows), _grouped(windows)

    @property
    def order(self) -> str:
        """The order of the full and of the window layers in the stacks, for other processes."""
        assert self._order is not None
        return json.dumps(self._order)

    def take_order(self, text: str) -> bool:
        """Take over another process's order; False when it isn't one of these layers."""
        try:
            rows, windows = json.loads(text)
            fits = sorted(rows) == list(range(len(self.leaves.rows))) and sorted(windows) == list(
                range(len(self.leaves.windows))
            )
        except (ValueError, TypeError):
            return False
        if fits and self._order is None:
            self._order = tuple(rows), tuple(windows)
        return fits and self._order == (tuple(rows), tuple(windows))

    def full_layers(self) -> list[ly.RowsLayer]:
        """The layers whose rows make up pages, in the order of the stacks."""
        assert self._order is not None
        return [self.leaves.rows[i] for i in self._order[0]]

    def window_layers(self) -> list[ly.WindowLayer]:
        """The layers whose rows make up strips, in the order of the stacks."""
        assert self._order is not None
        return [self.leaves.windows[i] for i in self._order[1]]

    def first_window_row(self) -> int:
        """The first position from which on every window layer has its rows."""
        return max((layer.first for layer in self.leaves.windows), default=self.offset)

    def window_rows(self, start: int, end: int) -> Stacks:
        """The window layers' rows ``[start, end)``, stacked and compact."""
        return stack(self.window_layers(), start, end)

    # --- moving ------------------------------------------------------------------------------

    def rewind(self, keep: int) -> None:
        """Cut the full layers to ``keep`` tokens; windows and states are the caller's to set."""
        for layer in self.leaves.rows:
            layer.rewind(keep)
        del self.ids[keep:], self.passes[keep:]

    def read_in(self, parts: Sequence[RowSource | Placed], ids: np.ndarray, total: int) -> None:
        """Append stored rows to the full layers.

        Args:
            parts: consecutive; they cover the positions of ``ids``, maybe more at either end. All
                of them or none are ``Placed``.
            ids: the tokens to append.
            total: rows to have room for.
        """
        end = self.offset + len(ids)
        sources = [part for part in parts if not isinstance(part, Placed)]
        if not sources:
            for layer in self.leaves.rows:
                layer.advance(end)
        elif self.leaves.rows and not self._write(sources, end, total):
            self._append(sources, end, total)
        self.ids.frombytes(ids.astype(np.int32).tobytes())

    def _append(self, parts: Sequence[RowSource], end: int, total: int) -> None:
        start = self.offset
        if self.gpu:
            # Launches dominate: few large copies first, then one a layer.
            rows = [list(unstack(joined_stacks(parts, start, end)))]
        else:
            rows = [list(unstack(part.within(start, end))) for part in parts]
        waiting: list[mx.array] = []
        for layer, pieces in zip(self.full_layers(), zip(*rows, strict=True), strict=True):
            layer.append(pieces, total)
            waiting.extend(layer.arrays)
            # Evaluated in groups, so that the peak is one group and not the whole cache.
            if not self.gpu or sum(a.nbytes for a in waiting) > GROUP_BYTES:
                mx.eval(waiting)
                waiting = []
        mx.eval(waiting)

    def _write(self, parts: Sequence[RowSource], end: int, total: int) -> bool:
        """Copy rows from the host's memory straight into the buffers; False where that can't be."""
        on_host = [part for part in parts if isinstance(part, HostRows)]
        if self.gpu or len(on_host) < len(parts):
            return False
        return direct.write(self.full_layers(), on_host, self.offset, end, total)

    def set_windows(self, at: int, strips: Sequence[Strip], since: int | None = None) -> None:
        """Put the window layers to position ``at``, from strips that cover what each needs.

        Args:
            at: tokens before them.
            strips: they cover what each layer needs.
            since: where the last pass of several tokens ended, to lay the rows out as in a buffer
                that has been used as a ring since; None: in order.
        """
        self.windowed = at
        if not self.leaves.windows:
            return
        if not at:
            for layer in self.leaves.windows:
                layer.restore(0, ())
            return
        for place, layer in enumerate(self.window_layers()):
            layer.restore(
                at,
                [r for span in layer.window.needs(at) for r in _rows_of(strips, span, place)],
                since,
            )

    def set_states(self, states: Sequence[Any]) -> None:
        """Put the state layers to a snapshot, or to their beginning when there is none."""
        if not self.leaves.states:
            return
        source = states or [leaf.cache for leaf in self.fresh_states()]
        for layer, twin in zip(self.leaves.states, source, strict=True):
            layer.restore(twin)

    def reserve(self, total: int) -> None:
        """Give every full layer room for ``total`` rows, layer by layer."""
        for layer in self.leaves.rows:
            layer.reserve(total)

    def fit(self, total: int) -> None:
        """Give back room for more than twice ``total`` rows: a short prompt after a long one."""
        for layer in self.leaves.rows:
            if layer.arrays and layer.capacity > 2 * total:
                layer.resize(max(total, layer.offset))

    def shrink(self) -> None:
        """Give all spare room back."""
        for layer in self.leaves.rows:
            if layer.arrays and layer.capacity > layer.offset:
                mx.clear_cache()  # else a larger buffer, free since a moment, would be used again
                layer.resize(layer.offset)

    def spare_bytes(self, total: int) -> int:
        """Bytes that ``fit(total)`` would give back."""
        return sum(
            sum(a.nbytes for a in layer.arrays) * (layer.capacity - total) // layer.capacity
            for layer in self.leaves.rows
            if layer.capacity > 2 * total
        )

    def evaluate(self) -> None:
        """Wait for everything that was dispatched; states then own no more than themselves."""
        mx.eval(arrays_in(self.layers))
        for leaf in self.leaves.states:
            leaf.compact()

    def mend_rows(self) -> bool:
        """After a failure: cut the full layers to the recorded ids; False if one is short."""
        if any(layer.offset < self.offset for layer in self.leaves.rows):
            return False
        for layer in self.leaves.rows:
            layer.rewind(self.offset)
        return True


def _grouped(rows: list[tuple[int, ly.Rows]]) -> tuple[int, ...]:
    return tuple(i for members in group(rows).values() for i, _ in members)


def _rows_of(strips: Sequence[Strip], span: Span, place: int) -> list[ly.Rows]:
    """The rows of the layer at ``place`` of the stacks within ``span``."""
    start, end = span
    inside = [s for s in strips if s.start < end and s.end > start]
    return [list(s.layer_rows(start, end))[place] for s in inside]
