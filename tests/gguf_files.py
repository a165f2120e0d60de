"""Small GGUF files, written field by field so that tests can make each of them wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path

U32, F32, BOOL, STRING, ARRAY, U64, I32 = 4, 6, 7, 8, 9, 10, 5
_FORMATS = {U32: "<I", F32: "<f", BOOL: "<?", U64: "<Q", I32: "<i"}

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = [*ALPHABET, "he", "Ġt", "Ġthe", "<|end|>", "<|start|>", "<tool>"]
MERGES = ["h e", "Ġ t", "Ġt he"]
KINDS = [1] * (len(VOCABULARY) - 3) + [3, 3, 4]
END, START = len(VOCABULARY) - 3, len(VOCABULARY) - 2


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(kind: int, content: Any) -> bytes:
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        item, items = content
        body = b"".join(value(item, i) for i in items)
        return struct.pack("<IQ", item, len(items)) + body
    return struct.pack(_FORMATS[kind], content)


@dataclass
class File:
    """A GGUF file in parts; ``bytes(file)`` joins them."""

    metadata: dict[str, tuple[int, Any]] = field(default_factory=dict)
    tensors: dict[str, tuple[np.ndarray, int]] = field(default_factory=dict)  # raw rows, ggml type
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    alignment: int = 32
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    entry_count: int | None = None
    extra_entries: list[bytes] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)
    tail: int = 0  # bytes to cut off the end

    def add(self, name: str, array: np.ndarray, kind: str = "F32") -> None:
        number = gguf.GGMLQuantizationType[kind]
        raw = gguf.quantize(array.astype(np.float32), number)
        self.tensors[name] = (raw, int(number))
        self.shapes[name] = array.shape

    def __bytes__(self) -> bytes:
        entries = [
            string(key) + struct.pack("<I", kind) + value(kind, content)
            for key, (kind, content) in self.metadata.items()
        ] + self.extra_entries
        heads, body = [], b""
        for name, (raw, kind) in self.tensors.items():
            body += b"\0" * (-len(body) % self.alignment)
            shape = self.shapes[name]
            offset = self.offsets.get(name, len(body))
            heads.append(
                string(name)
                + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
            )
            body += raw.tobytes()
        tensor_count = len(heads) if self.tensor_count is None else self.tensor_count
        entry_count = len(entries) if self.entry_count is None else self.entry_count
        head = self.magic + struct.pack("<IQQ", self.version, tensor_count, entry_count)
        head += b"".join(entries) + b"".join(heads)
        head += b"\0" * (-len(head) % self.alignment)
        whole = head + body
        return whole[: len(whole) - self.tail]

    def write(self, path: Path) -> Path:
        path.write_bytes(bytes(self))
        return path


def describe(config: dict[str, Any], pre: str = "smollm") -> dict[str, tuple[int, Any]]:
    """GGUF metadata of a config.json and the test vocabulary."""
    f = config["model_type"]
    return {
        "general.architecture": (STRING, f),
        f"{f}.block_count": (U32, config["num_hidden_layers"]),
        f"{f}.context_length": (U32, config["max_position_embeddings"]),
        f"{f}.embedding_length": (U32, config["hidden_size"]),
        f"{f}.feed_forward_length": (U32, config["intermediate_size"]),
        f"{f}.attention.head_count": (U32, config["num_attention_heads"]),
        f"{f}.attention.head_count_kv": (U32, config["num_key_value_heads"]),
        f"{f}.attention.key_length": (U32, config["head_dim"]),
        f"{f}.attention.layer_norm_rms_epsilon": (F32, config["rms_norm_eps"]),
        f"{f}.rope.freq_base": (F32, config["rope_theta"]),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, pre),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, VOCABULARY)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, KINDS)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, MERGES)),
        "tokenizer.ggml.bos_token_id": (U32, START),
        "tokenizer.ggml.eos_token_id": (U32, END),
        "tokenizer.ggml.add_bos_token": (BOOL, False),
        "tokenizer.chat_template": (
            STRING,
            "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
        ),
    }


def tiny_config(family: str = "llama", hidden: int = 64, **changes: Any) -> dict[str, Any]:
    config = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": len(VOCABULARY),
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    return {**config, **changes}


_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def from_weights(
    config: dict[str, Any], weights: dict[str, np.ndarray], kind: str = "F32", pre: str = "smollm"
) -> File:
    """The file that llama.cpp's converter would make of Hugging Face weights."""
    file = File(describe(config, pre))
    for name, array in weights.items():
        if name in _TOP:
            target = _TOP[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            stem, _, leaf = rest.rpartition(".")
            target = f"blk.{layer}.{_NAMES[stem]}.{leaf}"
            if config["model_type"] == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
                array = interleave(array, array.shape[0] // config["head_dim"])
        file.add(target, array, kind if array.ndim == 2 else "F32")
    return file


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    rows = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
    return rows.swapaxes(1, 2).reshape(array.shape)


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights in the shapes of mlx-lm's model for ``config``."""
    import importlib

    import mlx.core as mx
    from mlx.utils import tree_flatten

    arch = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = arch.Model(arch.ModelArgs.from_dict(config))
    rng = np.random.default_rng(seed)
    found = {}
    for name, a in tree_flatten(model.parameters()):
        noisy = (np.array(a) + rng.normal(0, 0.02, a.shape)).astype(np.float32)
        # Real norms were 16 bits wide before llama.cpp's converter widened them.
        found[name] = noisy if a.ndim == 2 else (np.round(noisy * 64) / 64).astype(np.float32)
    return found
