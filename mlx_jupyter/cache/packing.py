"""Stored things as tensors of bytes and back: what leaves MLX's memory, and comes in again.

Rows keep their stacks: the tensor ``"2.1"`` is the second array of the third group of like layers.
A snapshot keeps the arrays of each state layer's object, ``"0.3"`` the fourth of the first layer,
and beside them a plan of the object in JSON, that is put on a fresh object of the same layer: no
class is ever named by a file.

Used on the engine thread. Packed tensors are views, whose arrays must never be written to; but
where the device has memory of its own they are copies in the host's.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx
import numpy as np

from mlx_jupyter.cache.arrays import arrays_in, compact
from mlx_jupyter.cache.dtypes import DTYPES, NUMPY
from mlx_jupyter.cache.store_format import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_jupyter.cache.layers import StateLayer
    from mlx_jupyter.cache.pages import Stacks

_PLAN = "plan"
_PLAIN = (bool, int, float, str, type(None))
_DEPTH = 8


T = TypeVar("T")

Packed = tuple[dict[str, Tensor], dict[str, str]]
"""Tensors, and what else belongs to them."""


def discrete() -> bool:
    """Whether the device has memory of its own (CUDA).

    A host's read of an array there moves its buffer into managed memory for good.
    """
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return on_gpu and not mx.metal.is_available()


def nbytes(packed: Packed) -> int:
    """Bytes of the tensors."""
    return sum(_numpy(tensor).nbytes for tensor in packed[0].values())


def cut(packed: Packed, start: int, end: int) -> Packed:
    """The rows ``[start, end)`` of packed rows, copied."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in packed[0].items():
        part = np.ascontiguousarray(_numpy(tensor)[..., start:end, :])
        tensors[name] = Tensor(tensor.dtype, part.shape, part)
    return tensors, packed[1]


class Unpackable(Exception):
    """This can't be packed, or isn't what was packed."""


def pack_rows(stacks: Stacks) -> dict[str, Tensor]:
    """The tensors of rows; views of evaluated arrays."""
    return {
        f"{group}.{place}": _pack(array)
        for group, arrays in enumerate(stacks)
        for place, array in enumerate(arrays)
    }


def row_stacks(arrays: Mapping[str, T]) -> tuple[tuple[T, ...], ...]:
    """Packed rows' arrays by their names, as stacks again."""
    groups: list[tuple[T, ...]] = []
    while f"{len(groups)}.0" in arrays:
        group: list[T] = []
        while (name := f"{len(groups)}.{len(group)}") in arrays:
            group.append(arrays[name])
        groups.append(tuple(group))
    return tuple(groups)


class HostRows:
    """Rows of the tokens ``[start, end)`` in the host's memory.

    Args:
        start: the first token.
        end: one past the last.
        tensors: as packed; maybe more rows than these.
        first: the token of the tensors' first row.

    Raises:
        Unpackable: the tensors aren't rows of these tokens.
    """

    def __init__(self, start: int, end: int, tensors: Mapping[str, Tensor], first: int) -> None:
        self.start = start
        self.end = end
        self._tensors = row_stacks(tensors)
        self._first = first
        for stack in self._tensors:
            for tensor in stack:
                if len(tensor.shape) != 4 or not first <= start < end <= first + tensor.shape[2]:
                    raise Unpackable(f"a tensor of shape {tensor.shape} isn't rows of {end} tokens")

    def arrays(self, start: int, end: int) -> list[list[tuple[str, np.ndarray]]]:
        """For each group of like layers its arrays' part within ``[start, end)``, with their types.

        Each has the shape (layers, heads, tokens, width).
        """
        return [[self._cut(tensor, start, end) for tensor in stack] for stack in self._tensors]

    def _cut(self, tensor: Tensor, start: int, end: int) -> tuple[str, np.ndarray]:
        a, b = max(start, self.start) - self._first, min(end, self.end) - self._first
        return tensor.dtype, _numpy(tensor)[..., a:b, :]

    def within(self, start: int, end: int) -> Stacks:
        """The stacks of the part within ``[start, end)``, in MLX's arrays."""
        return tuple(
            tuple(_array(host, dtype) for dtype, host in group) for group in self.arrays(start, end)
        )


def unpack_rows(tensors: Mapping[str, Tensor], start: int, end: int) -> Stacks:
    """Rows in arrays of their own, evaluated.

    Args:
        tensors: as packed.
        start: first token, counted from the tensors' first.
        end: one past the last token.

    Raises:
        Unpackable: they aren't rows of so many tokens.
    """
    stacks = HostRows(start, end, tensors, 0).within(start, end)
    mx.eval(stacks)
    return stacks


def pack_states(states: Sequence[Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the plan of a snapshot: one compact object for each state layer.

    Raises:
        Unpackable: an object holds something else than arrays, plain values and lists of them.
    """
    tensors: dict[str, Tensor] = {}
    plans = []
    for layer, state in enumerate(states):
        arrays: list[mx.array] = []
        plans.append({k: _plan(v, arrays, _DEPTH) for k, v in vars(state).items()})
        tensors |= {f"{layer}.{place}": _pack(array) for place, array in enumerate(arrays)}
    return tensors, {_PLAN: json.dumps(plans, separators=(",", ":"))}


def unpack_states(
    tensors: Mapping[str, Tensor], meta: Mapping[str, str], fresh: Sequence[StateLayer]
) -> list[Any]:
    """A snapshot in arrays of its own, evaluated.

    Args:
        tensors: as packed.
        meta: as packed.
        fresh: the state layers of an empty cache, which become what was packed.

    Raises:
        Unpackable: it isn't a snapshot of these layers.
    """
    try:
        plans = json.loads(meta[_PLAN])
        if not isinstance(plans, list) or len(plans) != len(fresh):
            raise Unpackable("a snapshot of other layers")
        for layer, (plan, state) in enumerate(zip(plans, fresh, strict=True)):
            if set(plan) != set(vars(state.cache)):
                raise Unpackable("a snapshot of other objects")
            for name, value in plan.items():
                setattr(state.cache, name, _made(value, tensors, layer, _DEPTH))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Unpackable(f"not a snapshot: {error}") from error
    states = [layer.cache for layer in fresh]
    mx.eval(arrays_in(states))
    return states


def _pack(array: mx.array) -> Tensor:
    name = DTYPES.get(array.dtype)
    if name is None:
        raise Unpackable(f"arrays of {array.dtype} aren't stored")
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    bits = mx.contiguous(bits)  # a copy keeps a transposed layout; what is in order isn't copied
    if discrete():
        bits = compact(bits)
        mx.eval(bits)
        return Tensor(name, tuple(array.shape), np.array(bits))
    mx.eval(bits)
    return Tensor(name, tuple(array.shape), memoryview(bits))  # type: ignore[arg-type]


def _numpy(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor.data, NUMPY[tensor.dtype]).reshape(tensor.shape)


def _array(host: np.ndarray, dtype: str) -> mx.array:
    array = mx.array(host)
    if dtype == "BF16":
        array = array.view(mx.bfloat16)
    return compact(array) if discrete() else array  # else it would stay in managed memory


def _plan(value: Any, arrays: list[mx.array], depth: int) -> Any:
    """A value in JSON: ``["a", n]`` the n-th array, ``["l", …]`` a list, ``["t", …]`` a tuple."""
    if not depth:
        raise Unpackable("nested too deeply")
    if isinstance(value, mx.array):
        arrays.append(value)
        return ["a", len(arrays) - 1]
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return ["l" if type(value) is list else "t", *(_plan(v, arrays, depth - 1) for v in value)]
    raise Unpackable(f"a {type(value).__name__} isn't stored")


def _made(plan: Any, tensors: Mapping[str, Tensor], layer: int, depth: int) -> Any:
    if not depth:
        raise Unpackable("nested too deeply")
    match plan:
        case ["a", int(place)]:
            tensor = tensors[f"{layer}.{place}"]
            return _array(_numpy(tensor), tensor.dtype)
        case ["l" | "t" as kind, *values]:
            made = [_made(value, tensors, layer, depth - 1) for value in values]
            return made if kind == "l" else tuple(made)
        case bool() | int() | float() | str() | None:
            return plan
    raise Unpackable("not a plan")
