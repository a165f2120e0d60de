"""In what precision a model computes on each backend, and how long its prefill chunks are.

On Metal and CUDA the files decide. MLX's CPU backend is fast in float32 only: with 16-bit scales
its quantized product is up to forty times slower, and 16-bit floats have no BLAS. There floats
become float32, and packed weights are unpacked while that stays small, since a float32 product
through a real BLAS beats a packed one.
"""

from __future__ import annotations

import importlib
from math import prod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mlx_jupyter.models.tensors import Entry

Backend = Literal["cpu", "metal", "cuda"]

UNPACK_LIMIT = 2 << 30
"""Bytes in float32 up to which packed weights are unpacked on the CPU backend."""


def backend() -> Backend:
    """The backend that MLX computes on now."""
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def prefill_chunk(where: Backend, parameters: int) -> int:
    """Tokens of a prefill step: the same for the same model and backend, whatever the moment.

    A chunk is also how long a cancel may have to wait, so it shrinks where a token is dear.

    Args:
        where: the backend.
        parameters: number of the model's weights.
    """
    if where == "cuda":
        return 2048  # 16–31 ms at a billion weights; shorter ones are bound by launches
    if where == "metal":
        # Laptops prefill some 500 tokens/s at 7 billion weights, ten times that below a billion.
        return 2048 if parameters <= 2_000_000_000 else 512
    # CPU: at 135 M weights 128 is fastest at long prompts (82 tokens/s against 74 with 512) and
    # needs the least memory. Beyond, keep a chunk at about a second.
    if parameters <= 500_000_000:
        return 128
    return 64 if parameters <= 1_500_000_000 else 32


def loaded_bytes(where: Backend, entries: Sequence[Entry], config: Mapping[str, Any]) -> int:
    """Bytes that the weights in ``entries`` will take once loaded by ``settle``'s rules."""
    return sum(_sizes(where, entries, config))


def needed_bytes(where: Backend, entries: Sequence[Entry], config: Mapping[str, Any]) -> int:
    """Bytes that loading takes at its peak: the weights and one more of the largest."""
    sizes = _sizes(where, entries, config)
    return sum(sizes) + max(sizes, default=0)


def _sizes(where: Backend, entries: Sequence[Entry], config: Mapping[str, Any]) -> list[int]:
    if where != "cpu":
        return [entry.nbytes for entry in entries]
    scales = {e.name.removesuffix("scales"): e for e in entries if e.name.endswith(".scales")}
    unpacked, packed = [], []
    for entry in entries:
        stem, _, leaf = entry.name.rpartition(".")
        own = scales.get(stem + ".")
        size = entry.size * 4 if _is_float(entry) else entry.nbytes
        packed.append(size)
        if own is None:
            unpacked.append(size)
        elif leaf == "weight":
            unpacked.append(prod(own.shape) * _group(config, stem) * 4)
        elif leaf not in ("scales", "biases"):
            unpacked.append(size)
    return unpacked if sum(unpacked) <= UNPACK_LIMIT else packed


def _is_float(entry: Entry) -> bool:
    return entry.dtype in ("F16", "BF16", "F32", "F64")


def _group(config: Mapping[str, Any], stem: str) -> int:
    quantization = config.get("quantization")
    if not isinstance(quantization, dict):
        return 64
    own = quantization.get(stem)
    group = (own if isinstance(own, dict) else quantization).get("group_size", 64)
    return group if isinstance(group, int) else 64


def settle(model: Any, where: Backend) -> None:
    """Bring a lazily loaded model into the precision for ``where`` and evaluate its weights.

    Weight by weight, so that the peak is one weight above the final size.
    """
    import mlx.core as mx

    if where == "cpu":
        from mlx_lm.utils import get_total_parameters

        unpack = get_total_parameters(model) * 4 <= UNPACK_LIMIT
        model.set_dtype(mx.float32)
        if unpack:
            _unpack(model)
    for _, module in model.named_modules():
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])


def _unpack(model: Any) -> None:
    """Replace packed layers by float32 ones."""
    import mlx.core as mx
    from mlx.utils import tree_unflatten
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    nn: Any = importlib.import_module("mlx.nn")  # it has no types
    plain: dict[type, Any] = {
        nn.QuantizedLinear: nn.Linear,
        nn.QuantizedEmbedding: nn.Embedding,
        QuantizedSwitchLinear: SwitchLinear,
        QuantizedMultiLinear: MultiLinear,
    }
    replaced: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        kind = plain.get(type(module))
        if kind is None or "global_scale" in module:
            continue
        new: Any = kind.__new__(kind)
        nn.Module.__init__(new)  # its own would fill a weight with random numbers first
        new.weight = mx.dequantize(
            module.weight,
            module.scales,
            module.get("biases"),
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        ).astype(mx.float32)
        if "bias" in module:
            new.bias = module.bias
        mx.eval(new.weight)
        module.clear()  # the list being walked still holds it
        replaced.append((name, new))
    if replaced:
        model.update_modules(tree_unflatten(replaced))


def describe(model: Any) -> str:
    """What the weights are in, such as ``"float32"`` or ``"4-bit affine, group 32"``."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    packed = [
        (f"{m.bits}-bit {getattr(m, 'mode', 'affine')}, group {m.group_size}", m.weight.size)
        for _, m in model.named_modules()
        if hasattr(m, "bits") and hasattr(m, "group_size") and "weight" in m
    ]
    if packed:
        return _heaviest(packed)
    leaves: Any = tree_flatten(model.parameters())
    floats = [
        (str(array.dtype).removeprefix("mlx.core."), array.nbytes)
        for _, array in leaves
        if mx.issubdtype(array.dtype, mx.floating)
    ]
    return _heaviest(floats) if floats else "no weights"


def _heaviest(weighed: Iterable[tuple[str, int]]) -> str:
    total: dict[str, int] = {}
    for what, weight in weighed:
        total[what] = total.get(what, 0) + weight
    return max(total, key=lambda what: total[what])
