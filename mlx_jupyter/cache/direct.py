"""Copies rows from the host's memory straight into a live cache's buffers, where both are the same.

MLX's arrays are meant to be changed by operations only. A buffer of the live cache is evaluated,
nothing else refers to it, and the rows written are beyond what the layer holds: so nobody can see
the write before the layer's offset says that the rows are there. No view of a buffer outlives a
call, else the next append would copy all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlx_jupyter.cache import layers as ly
from mlx_jupyter.cache.dtypes import DTYPES, TYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_jupyter.cache.packing import HostRows

_Like = list[tuple[str, np.ndarray]]
"""For each buffer of a layer safetensors' dtype name and rows, shape (1, heads, tokens, width)."""


def write(
    layers: Sequence[ly.RowsLayer],
    sources: Sequence[HostRows],
    start: int,
    end: int,
    total: int,
) -> bool:
    """Put the rows ``[start, end)`` behind those of the layers.

    Args:
        layers: in the order of the stacks; they stand at ``start``.
        sources: consecutive; they cover ``[start, end)``, maybe more.
        start: where the layers stand.
        end: where they will stand.
        total: rows to have room for.

    Returns:
        False when these rows can't be copied as they are; nothing was done then.
    """
    rows = [_by_layer(source, start, end) for source in sources]
    for source in rows:
        if not all(_fits(layer, like) for layer, like in zip(layers, source, strict=True)):
            return False
    _prepare(layers, rows[0], max(end, total))
    at = start
    for source in rows:
        until = at + int(source[0][0][1].shape[-2])
        for layer, arrays in zip(layers, source, strict=True):
            for buffer, (_, piece) in zip(layer.arrays, arrays, strict=True):
                np.array(buffer, copy=False)[..., at:until, :] = piece
        at = until
    for layer in layers:
        layer.advance(end)
    return True


def _by_layer(source: HostRows, start: int, end: int) -> list[_Like]:
    return [
        [(dtype, rows[n : n + 1]) for dtype, rows in group]
        for group in source.arrays(start, end)
        for n in range(len(group[0][1]))
    ]


def _fits(layer: ly.RowsLayer, like: _Like) -> bool:
    if type(layer) is ly.ConcatenatedRows or any(dtype == "BF16" for dtype, _ in like):
        return False  # NumPy has no bfloat16
    if not layer.arrays:
        return len(like) == layer.count
    return len(layer.arrays) == len(like) and all(
        (*buffer.shape[:-2], buffer.shape[-1]) == (*rows.shape[:-2], rows.shape[-1])
        and DTYPES[buffer.dtype] == dtype
        for buffer, (dtype, rows) in zip(layer.arrays, like, strict=True)
    )


def _prepare(layers: Sequence[ly.RowsLayer], like: Sequence[_Like], total: int) -> None:
    if layers[0].arrays:
        for layer in layers:
            layer.reserve(total)
        return
    ly.allocate(
        layers,
        [
            [((*rows.shape[:-2], total, rows.shape[-1]), TYPES[dtype]) for dtype, rows in each]
            for each in like
        ],
    )
