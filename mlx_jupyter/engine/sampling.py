"""From logits to a token, through mlx-lm's samplers, reproducible per request.

The random key of step i is a pure function of (seed, i): the draws don't depend on what other
requests did, nor on how much of the prompt was cached. Processors see the last tokens of the whole
context, cached ones included.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_jupyter.engine.options import Options

PENALTY_WINDOW = 256
"""Tokens that the repetition penalty looks back over."""

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the step over the key's bits
_MASK = (1 << 64) - 1


def step_key(seed: int, step: int) -> int:
    """The 64-bit seed of one step's draw."""
    return (seed ^ ((step + 1) * _GOLDEN)) & _MASK


class Sampling:
    """Samples one request's tokens.

    Args:
        options: every field set.
        seed: of this request.
        context: the prompt's ids.
    """

    def __init__(self, options: Options, seed: int, context: Sequence[int]) -> None:
        self._options = options
        self._seed = seed
        self._greedy = not options.temperature
        self._sampler: Callable[[mx.array], mx.array] | None = None
        self._processors: list[Any] = []
        if options.repetition_penalty not in (None, 1.0):
            from mlx_lm.sample_utils import make_repetition_penalty

            self._processors.append(
                make_repetition_penalty(options.repetition_penalty, PENALTY_WINDOW)
            )
        self._recent = mx.array(list(context[-PENALTY_WINDOW:]), dtype=mx.int32)

    def __call__(self, logits: mx.array, step: int) -> tuple[mx.array, mx.array]:
        """Sample from the logits of the last position, shape (1, vocab).

        Returns:
            The token, shape (1,), and its log-probability under the raw logits, shape (1,), both
            not yet evaluated.
        """
        # float32: half precision loses whole tokens of probability over a large vocabulary.
        raw = logits.astype(mx.float32)
        raw = raw - mx.logsumexp(raw, axis=-1, keepdims=True)
        scores = raw
        if self._processors:
            scores = copy.copy(raw)  # processors write in place
            for processor in self._processors:
                scores = processor(self._recent, scores)
            scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
        if not self._greedy:
            mx.random.seed(step_key(self._seed, step))
        token = self._sample(scores)
        if self._processors:
            recent = mx.concatenate([self._recent, token.astype(mx.int32)])
            self._recent = recent[-PENALTY_WINDOW:]
        return token, mx.take_along_axis(raw, token[:, None], axis=-1)[:, 0]

    def _sample(self, scores: mx.array) -> mx.array:
        if self._greedy:
            return mx.argmax(scores, axis=-1)
        if self._sampler is None:
            from mlx_lm.sample_utils import make_sampler

            top_k = self._options.top_k or 0
            self._sampler = make_sampler(
                temp=self._options.temperature,
                top_p=self._options.top_p if self._options.top_p is not None else 1.0,
                min_p=self._options.min_p or 0.0,
                top_k=top_k if top_k < scores.shape[-1] else 0,
            )
        return self._sampler(scores)
