"""From a checked GGUF file to an MLX model directory, without MLX.

4- and 8-bit blocks are repacked bit by bit into MLX's affine layout (group 32), which loses
nothing; floats are copied; other quantized types are dequantized to 16 bits. One tensor is in
memory at a time. Every tensor's shape is checked against the metadata first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_jupyter.models import tokens
from mlx_jupyter.models.tensors import Entry, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mlx_jupyter.models.gguf import GGUF, Tensor

VERSION = 1
"""Part of the cached directory's name; grows when the same file would be converted differently."""

GROUP = 32
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_FLOATS = ("F32", "F16", "BF16")

# Per block: GGUF's name → (Hugging Face's name, rows, columns); rows and columns name a size.
_BLOCK = {
    "attn_norm.weight": ("input_layernorm.weight", "hidden", None),
    "attn_q.weight": ("self_attn.q_proj.weight", "q", "hidden"),
    "attn_k.weight": ("self_attn.k_proj.weight", "kv", "hidden"),
    "attn_v.weight": ("self_attn.v_proj.weight", "kv", "hidden"),
    "attn_output.weight": ("self_attn.o_proj.weight", "hidden", "q"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "hidden", None),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "inner", "hidden"),
    "ffn_up.weight": ("mlp.up_proj.weight", "inner", "hidden"),
    "ffn_down.weight": ("mlp.down_proj.weight", "hidden", "inner"),
}
_EXTRA: dict[str, dict[str, tuple[str, str, str | None]]] = {
    "llama": {},
    "qwen2": {
        "attn_q.bias": ("self_attn.q_proj.bias", "q", None),
        "attn_k.bias": ("self_attn.k_proj.bias", "kv", None),
        "attn_v.bias": ("self_attn.v_proj.bias", "kv", None),
    },
    "qwen3": {
        "attn_q_norm.weight": ("self_attn.q_norm.weight", "head", None),
        "attn_k_norm.weight": ("self_attn.k_norm.weight", "head", None),
    },
}
# llama.cpp's converter interleaves the halves of each head's q and k rows for these families.
_INTERLEAVED = frozenset({"llama"})


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor to convert: its new name and, for interleaved rows, the heads in it."""

    tensor: Tensor
    name: str
    heads: int = 0


def convert(source: GGUF, directory: Path, step: Callable[[int, int], None]) -> None:
    """Write an MLX model directory.

    Args:
        source: the checked file.
        directory: an empty directory to fill.
        step: called with (bytes done, bytes in all) after each tensor; may raise to stop.

    Raises:
        BadModel: the file's family isn't supported or its tensors contradict its metadata.
    """
    config, sizes = _config(source)
    parts = _parts(source, config, sizes)
    ends = tokens.write_tokenizer(source, directory, config["max_position_embeddings"])
    vocabulary = len(source.strings("tokenizer.ggml.tokens"))
    if vocabulary > config["vocab_size"]:
        source.bad(f"it has {vocabulary:,} tokens but {config['vocab_size']:,} embeddings")
    generation: dict[str, Any] = {}
    if ends:
        config["eos_token_id"] = generation["eos_token_id"] = ends
    half = _half(parts)
    _describe_quantization(config, parts)
    entries = [entry for part in parts for entry in _entries(part, half)]
    write(directory / "model.safetensors", entries, _arrays(source, parts, half, step))
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1))
    (directory / "config.json").write_text(json.dumps(config, indent=1))


# --- metadata → config.json -----------------------------------------------------------------


def _config(source: GGUF) -> tuple[dict[str, Any], dict[str, int]]:
    family = source.text("general.architecture")
    if family not in _EXTRA:
        source.bad(f"the family {family[:40]!r} isn't supported as GGUF ({', '.join(_EXTRA)} are)")
    if source.integer(f"{family}.expert_count", 0, 1 << 16, 0):
        source.bad("mixtures of experts aren't supported as GGUF")
    hidden = source.integer(f"{family}.embedding_length", 1, 1 << 17)
    heads = source.integer(f"{family}.attention.head_count", 1, 1 << 12)
    kv_heads = source.integer(f"{family}.attention.head_count_kv", 1, heads, heads)
    head = source.integer(f"{family}.attention.key_length", 2, 1 << 12, max(2, hidden // heads))
    if heads % kv_heads or head % 2:
        source.bad(f"{heads} heads of {head} don't go with {kv_heads} key/value heads")
    for key in ("attention.value_length", "rope.dimension_count"):
        if source.integer(f"{family}.{key}", 1, 1 << 12, head) != head:
            source.bad(f"GGUF metadata {family}.{key} differs from the head size {head}")
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        source.bad("the tensor 'token_embd.weight' is missing or no matrix")
    inner = source.integer(f"{family}.feed_forward_length", 1, 1 << 20)
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": source.integer(f"{family}.block_count", 1, 1 << 10),
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "rms_norm_eps": source.number(f"{family}.attention.layer_norm_rms_epsilon", 0, 1),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": source.integer(f"{family}.context_length", 1, 1 << 27),
        "rope_theta": source.number(f"{family}.rope.freq_base", 1, 1e12, 10000.0),
        "tie_word_embeddings": "output.weight" not in source.tensors,
    }
    scaling = _rope_scaling(source, config)
    if scaling:
        config["rope_scaling"] = scaling
    sizes = {
        "hidden": hidden,
        "q": heads * head,
        "kv": kv_heads * head,
        "inner": inner,
        "head": head,
        "vocabulary": embedding.shape[0],
    }
    return config, sizes


def _rope_scaling(source: GGUF, config: dict[str, Any]) -> dict[str, Any] | None:
    family = config["model_type"]
    kind = source.text(f"{family}.rope.scaling.type", "none")
    if kind == "linear":
        return {
            "type": "linear",
            "factor": source.number(f"{family}.rope.scaling.factor", 1e-3, 1e6),
        }
    if kind != "none":
        source.bad(f"its position scaling {kind[:40]!r} isn't supported")
    factors = source.tensors.get("rope_freqs.weight")
    if factors is None:
        return None
    half = config["head_dim"] // 2
    if factors.type != "F32" or factors.shape != (half,):
        source.bad(f"the tensor 'rope_freqs.weight' should have {half} float32 values")
    given = _raw(source, factors).view("<f4")
    scaling = {
        "rope_type": "llama3",
        "factor": float(given.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(given, _llama3_factors(config, scaling), rtol=1e-3):
        source.bad("its position factors (rope_freqs.weight) follow no known rule")
    return scaling


def _llama3_factors(config: dict[str, Any], scaling: dict[str, Any]) -> np.ndarray:
    """By how much each frequency is divided: long waves by the factor, short ones by 1."""
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    powers = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    length = scaling["original_max_position_embeddings"]
    turns = length / (2 * np.pi * config["rope_theta"] ** powers)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    factors: np.ndarray = 1 / ((1 - blend) / factor + blend)
    return factors


def _describe_quantization(config: dict[str, Any], parts: list[_Part]) -> None:
    bits = {p.name.removesuffix(".weight"): _BITS.get(p.tensor.type) for p in parts}
    used = [b for b in bits.values() if b]
    if not used:
        return
    usual = max(set(used), key=used.count)
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": usual, "mode": "affine"}
    for name, own in bits.items():
        if own and own != usual:
            quantization[name] = {"group_size": GROUP, "bits": own, "mode": "affine"}
    config["quantization"] = quantization


# --- tensors --------------------------------------------------------------------------------


def _parts(source: GGUF, config: dict[str, Any], sizes: dict[str, int]) -> list[_Part]:
    family = config["model_type"]
    used: set[str] = {"rope_freqs.weight"}

    def part(name: str, target: str, rows: str, columns: str | None, heads: int = 0) -> _Part:
        tensor = source.tensors.get(name)
        shape = (sizes[rows],) if columns is None else (sizes[rows], sizes[columns])
        if tensor is None:
            source.bad(f"the tensor {name!r} is missing")
        if tensor.shape != shape:
            source.bad(f"the tensor {name!r} has shape {tensor.shape}, not {shape}")
        if columns is None and tensor.type not in _FLOATS:
            source.bad(f"the tensor {name!r} should have floats, not {tensor.type}")
        used.add(name)
        return _Part(tensor, target, heads)

    parts = [part("token_embd.weight", "model.embed_tokens.weight", "vocabulary", "hidden")]
    for layer in range(config["num_hidden_layers"]):
        for name, (target, rows, columns) in (_BLOCK | _EXTRA[family]).items():
            heads = 0
            if family in _INTERLEAVED and name in ("attn_q.weight", "attn_k.weight"):
                heads = sizes[rows] // sizes["head"]
            parts.append(
                part(f"blk.{layer}.{name}", f"model.layers.{layer}.{target}", rows, columns, heads)
            )
    parts.append(part("output_norm.weight", "model.norm.weight", "hidden", None))
    if not config["tie_word_embeddings"]:
        parts.append(part("output.weight", "lm_head.weight", "vocabulary", "hidden"))
    if unknown := sorted(set(source.tensors) - used):
        source.bad(f"the tensor {unknown[0]!r} has no place in the family {family!r}")
    return parts


def _half(parts: list[_Part]) -> str:
    """The dtype of norms and biases: that of the matrices, so that activations stay in it."""
    kinds = {p.tensor.type for p in parts if len(p.tensor.shape) == 2}
    if kinds == {"F32"}:
        return "F32"
    return "BF16" if kinds <= {"BF16", "F32"} else "F16"


def _entries(part: _Part, half: str) -> list[Entry]:
    tensor = part.tensor
    if bits := _BITS.get(tensor.type):
        rows, columns = tensor.shape
        stem = part.name.removesuffix("weight")
        return [
            Entry(part.name, "U32", (rows, columns * bits // 32)),
            Entry(stem + "scales", "F16", (rows, columns // GROUP)),
            Entry(stem + "biases", "F16", (rows, columns // GROUP)),
        ]
    if len(tensor.shape) == 1:
        return [Entry(part.name, half, tensor.shape)]
    return [Entry(part.name, tensor.type if tensor.type in _FLOATS else "F16", tensor.shape)]


def _arrays(
    source: GGUF, parts: list[_Part], half: str, step: Callable[[int, int], None]
) -> Iterator[np.ndarray]:
    total = sum(part.tensor.nbytes for part in parts)
    done = 0
    for part in parts:
        for entry, array in zip(_entries(part, half), _pieces(source, part, half), strict=True):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                source.bad(f"the tensor {part.tensor.name!r} has values that aren't finite numbers")
            yield _unmixed(array, part.heads).reshape(entry.shape)
        done += part.tensor.nbytes
        step(done, total)


def _pieces(source: GGUF, part: _Part, half: str) -> list[np.ndarray]:
    tensor = part.tensor
    raw = _raw(source, tensor)
    if tensor.type in _BITS:
        return list(_repack(raw, tensor))
    if len(tensor.shape) == 1:
        return [_cast(_floats(raw, tensor.type), half)]
    if tensor.type in _FLOATS:
        kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
        return [raw.view(kinds[tensor.type]).reshape(tensor.shape)]
    from gguf import GGMLQuantizationType, dequantize

    rows = raw.reshape(tensor.shape[0], -1)
    with np.errstate(all="ignore"):
        values = dequantize(rows, GGMLQuantizationType[tensor.type])
    return [_cast(values, "F16")]


def _raw(source: GGUF, tensor: Tensor) -> np.ndarray:
    with source.path.open("rb") as file:
        file.seek(tensor.offset)
        raw = np.fromfile(file, np.uint8, tensor.nbytes)
    if raw.nbytes != tensor.nbytes:
        source.bad("the file was cut short while it was read")
    return raw


def _floats(raw: np.ndarray, kind: str) -> np.ndarray:
    if kind == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view("<f4" if kind == "F32" else "<f2").astype(np.float32)


def _cast(values: np.ndarray, kind: str) -> np.ndarray:
    """To the bytes of ``kind``; bfloat16 as uint16, rounded to the nearest, ties to even."""
    if kind == "BF16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype("<f4" if kind == "F32" else "<f2")


def _repack(raw: np.ndarray, tensor: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A tensor of Q4_0, Q4_1 or Q8_0 blocks as MLX's packed words, scales and biases.

    A block is a float16 scale, for Q4_1 a float16 minimum, and 32 quants. MLX computes
    ``scale * quant + bias`` with unsigned quants: Q4_0's are centred on 8, Q8_0's are signed.
    """
    rows = tensor.shape[0]
    blocks = raw.reshape(rows, tensor.shape[1] // GROUP, -1)
    scales = blocks[..., :2].copy().view("<f2")[..., 0]
    with np.errstate(over="ignore", invalid="ignore"):
        if tensor.type == "Q8_0":
            words = np.ascontiguousarray(blocks[..., 2:] ^ 0x80).view("<u4")
            return words.reshape(rows, -1), scales, scales * np.float16(-128)
        if tensor.type == "Q4_1":
            biases, quants = blocks[..., 2:4].copy().view("<f2")[..., 0], blocks[..., 4:]
        else:
            biases, quants = scales * np.float16(-8), blocks[..., 2:]
    # Byte i holds element i in its low half and element i + 16 in its high half; MLX wants
    # neighbours in one byte.
    low, high = quants & 0x0F, quants >> 4
    flat = np.concatenate([low, high], axis=-1)
    packed = flat[..., 0::2] | (flat[..., 1::2] << 4)
    return np.ascontiguousarray(packed).view("<u4").reshape(rows, -1), scales, biases


def _unmixed(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows back in Hugging Face's order: within a head all first halves, then all second ones."""
    if not heads:
        return np.ascontiguousarray(array)
    rows = array.reshape(heads, array.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(array.shape)
