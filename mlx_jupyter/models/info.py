"""What is known of a loaded model, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model.

    Attributes:
        name: short name, the one that ``-m`` takes.
        source: the directory or file it came from; ``"(given)"`` for an object of the user's.
        family: mlx-lm's model type, such as ``"llama"``.
        parameters: number of weights.
        weight_bytes: bytes of the weights as loaded.
        dtype: what the weights are in, such as ``"float32"`` or ``"4-bit affine, group 32"``.
        context: tokens that fit, the limit in force.
        context_origin: where that limit comes from.
        layers: (kind, count) of its leaf caches.
        prefill_chunk: tokens a prefill step computes.
        template_faults: what in its chat template keeps prompts from being reused, a line each.
    """

    name: str
    source: str
    family: str
    parameters: int
    weight_bytes: int
    dtype: str
    context: int
    context_origin: str
    layers: tuple[tuple[str, int], ...]
    prefill_chunk: int
    template_faults: tuple[str, ...] = ()
