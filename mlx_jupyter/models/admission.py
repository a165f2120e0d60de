"""What a model needs to come in, from its files alone; pure.

The weights are counted from the headers. The two reserves are estimates from the config, good to a
factor of two or so: they only keep a model from coming in that couldn't answer anything. Once it
runs, ``engine/pressure.py`` measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_jupyter.models import precision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_jupyter.models.precision import Backend
    from mlx_jupyter.models.tensors import Entry

LEAST_TOKENS = 1024
"""Tokens whose rows the smallest cache must hold: a question or two with their answers."""

MOST_CACHE = 64 << 20
"""The smallest cache asks for no more than this, however wide a model's rows are."""

FLOAT = {"cpu": 4, "metal": 2, "cuda": 2}
"""Bytes of an activation: on a CPU everything computes in float32."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a model needs.

    Attributes:
        weights: its weights once loaded.
        loading: the peak of loading them: the weights and one more of the largest.
        chunk: activations of one prefill chunk.
        cache: the smallest cache that is of any use.
    """

    weights: int
    loading: int
    chunk: int
    cache: int

    @property
    def total(self) -> int:
        """What must be free: loading is over before the first chunk is computed."""
        return max(self.loading, self.weights + self.chunk + self.cache)

    @classmethod
    def of(cls, where: Backend, entries: Sequence[Entry], config: Mapping[str, Any]) -> Need:
        """From the headers of the weights and the config."""
        parameters = sum(entry.size for entry in entries)
        chunk = precision.prefill_chunk(where, parameters)
        return cls(
            weights=precision.loaded_bytes(where, entries, config),
            loading=precision.needed_bytes(where, entries, config),
            chunk=chunk_bytes(where, config, chunk),
            cache=cache_bytes(where, config),
        )


def chunk_bytes(where: Backend, config: Mapping[str, Any], chunk: int) -> int:
    """Activations of a prefill chunk: what one layer holds at once.

    The residual stream and its norms, queries, keys, values and the attention's output are about
    eight times the hidden size, the feed-forward part three times its own; where attention isn't
    fused (CPU) the scores over the smallest cache come on top, twice.
    """
    hidden, inner = _number(config, "hidden_size"), _number(config, "intermediate_size")
    heads = _number(config, "num_attention_heads")
    width = 8 * hidden + 3 * (inner or 4 * hidden)
    scores = 2 * heads * (LEAST_TOKENS + chunk) if where == "cpu" else 0
    return chunk * (width + scores) * FLOAT[where]


def cache_bytes(where: Backend, config: Mapping[str, Any]) -> int:
    """Rows of ``LEAST_TOKENS`` tokens in all layers, as if each had full attention."""
    heads = _number(config, "num_attention_heads")
    wide = _number(config, "head_dim") or _number(config, "hidden_size") // max(heads, 1)
    kept = _number(config, "num_key_value_heads") or heads
    row = 2 * _number(config, "num_hidden_layers") * kept * wide * FLOAT[where]
    return min(row * LEAST_TOKENS or MOST_CACHE, MOST_CACHE)


def _number(config: Mapping[str, Any], key: str) -> int:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        value = part.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
