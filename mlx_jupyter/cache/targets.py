"""The buffers of a live cache as bytes, so that a file's rows can be read straight into them.

What ``direct.py`` says of its writes holds here too: the rows are beyond what the layers hold, and
nobody sees them before the layers' offsets say that they are there. Rows of a file that turns out
to be damaged are garbage in the spare room.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_jupyter.cache import layers as ly
from mlx_jupyter.cache.dtypes import DTYPES, TYPES
from mlx_jupyter.cache.packing import row_stacks
from mlx_jupyter.cache.store_format import TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mlx_jupyter.cache.store_file import Into
    from mlx_jupyter.models.tensors import Entry


class Targets:
    """See the module. Made and let go of on the engine thread; any thread may use what it gives.

    While it is held the layers' buffers may only be written through views: an operation of MLX
    would put a copy in their place, since something else refers to them.

    Args:
        layers: in the order of the stacks; evaluated, with buffers of their own.
    """

    def __init__(self, layers: Sequence[ly.RowsLayer]) -> None:
        self._layers = layers
        self._buffers = list(_buffers(layers))
        self._stacks: dict[str, _Stack] = {}
        alike = groupby(layers, key=lambda layer: ly.signature(layer.arrays))
        for group, (_, members) in enumerate(alike):
            for place, arrays in enumerate(zip(*(m.arrays for m in members), strict=True)):
                self._stacks[f"{group}.{place}"] = _Stack.of(arrays)

    @classmethod
    def of(cls, layers: Sequence[ly.RowsLayer], total: int) -> Targets | None:
        """Those of layers with room for ``total`` rows; None where they can't be written to."""
        if not layers or any(
            type(layer) is ly.ConcatenatedRows or layer.capacity < total for layer in layers
        ):
            return None
        return cls(layers)

    @staticmethod
    def prepare(layers: Sequence[ly.RowsLayer], tensors: Mapping[str, Entry], total: int) -> bool:
        """Give empty layers buffers for ``total`` rows like a file's, with any content.

        Args:
            layers: in the order of the stacks.
            tensors: the file's.
            total: rows to have room for.

        Returns:
            False when that can't be done, or the file's rows can't be theirs.
        """
        if any(type(layer) is ly.ConcatenatedRows for layer in layers):
            return False
        buffers = [
            [((1, e.shape[1], total, e.shape[3]), TYPES[e.dtype]) for e in stack]
            for stack in row_stacks(tensors)
            if all(len(e.shape) == 4 and e.dtype in TYPES for e in stack)
            for _ in range(stack[0].shape[0])
        ]
        if [len(some) for some in buffers] != [layer.count for layer in layers]:
            return False
        ly.allocate(layers, buffers)
        return True

    @property
    def valid(self) -> bool:
        """Whether the layers still have these buffers."""
        now = _buffers(self._layers)
        return all(a is b for a, b in zip(self._buffers, now, strict=True))

    def into(self, start: int, end: int) -> Into:
        """Where the tensors of a file with the rows ``[start, end)`` go; nowhere if they differ."""

        def places(tensors: Mapping[str, Entry]) -> Mapping[str, Sequence[memoryview]]:
            rows = {name: entry for name, entry in tensors.items() if name != TOKENS}
            if rows.keys() != self._stacks.keys() or not all(
                stack.takes(rows[name], end - start) for name, stack in self._stacks.items()
            ):
                return {}
            return {name: stack.parts(start, end) for name, stack in self._stacks.items()}

        return places


@dataclass(frozen=True, slots=True)
class _Stack:
    """One array each of some like layers.

    Attributes:
        dtype: safetensors' name of their type.
        heads: of each.
        capacity: rows of each head.
        width: values of a row.
        row: bytes of a row.
        views: the arrays' bytes.
    """

    dtype: str
    heads: int
    capacity: int
    width: int
    row: int
    views: tuple[memoryview, ...]

    @classmethod
    def of(cls, arrays: Sequence[mx.array]) -> _Stack:
        _, heads, capacity, width = arrays[0].shape
        return cls(
            DTYPES[arrays[0].dtype],
            heads,
            capacity,
            width,
            arrays[0].itemsize * width,
            tuple(map(_bytes, arrays)),
        )

    def takes(self, entry: Entry, tokens: int) -> bool:
        """Whether a stored tensor has these layers' rows of so many tokens."""
        shape = (len(self.views), self.heads, tokens, self.width)
        return (entry.dtype, tuple(entry.shape)) == (self.dtype, shape)

    def parts(self, start: int, end: int) -> list[memoryview]:
        """Where the rows ``[start, end)`` are, in the order of a stored tensor."""
        return [
            view[
                (head * self.capacity + start) * self.row : (head * self.capacity + end) * self.row
            ]
            for view in self.views
            for head in range(self.heads)
        ]


def _buffers(layers: Sequence[ly.RowsLayer]) -> Iterator[mx.array]:
    return (array for layer in layers for array in layer.arrays)


def _bytes(array: mx.array) -> memoryview:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)  # shares the buffer; NumPy has no such type
    view = np.array(array, copy=False)
    return view.reshape(-1).data.cast("B")
