"""A fake model whose next token is a known function of every cached row.

``FakeModel`` is a real ``nn.Module`` with mlx-lm cache layers. Each layer writes (token, position)
into its cache and reads the *whole* history back from it; the logits are a hash of what was read.
One swapped, missing or stale row gives other logits, so a wrong cache can't stay hidden.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

P = 1_000_003  # a prime; every intermediate value below stays under 2**63
VOCAB = 260
EOS = 257
LETTERS = [*range(ord("a"), ord("z") + 1), ord(" ")]


def _weight(position: mx.array) -> mx.array:
    return (position * 7919 + 104_729) % P


class FakeModel(nn.Module):
    """See the module's docstring.

    Args:
        kinds: one of "rows", "window" or "state" for each layer.
        window: size of the "window" layers.
        eos_every: the end token is certain when the hash is a multiple of it; 0 is never.
        before_call: called with the number of tokens at the start of each forward pass; may
            block or raise, which makes every timing and failure reproducible.
    """

    def __init__(
        self,
        kinds: Sequence[str] = ("rows", "rows"),
        *,
        window: int = 32,
        eos_every: int = 0,
        before_call: Callable[[int], None] | None = None,
        context: int = 4096,
    ) -> None:
        super().__init__()
        self.embed = mx.arange(VOCAB).astype(mx.float32)
        self.model_type = "fake"
        self.kinds = tuple(kinds)
        self.layers = list(range(len(kinds)))
        self.window = window
        self.eos_every = eos_every
        self.before_call = before_call
        self.max_position_embeddings = context

    def make_cache(self) -> list[object]:
        make = {
            "rows": KVCache,
            "window": lambda: RotatingKVCache(max_size=self.window),
            "state": lambda: ArraysCache(2),
        }
        return [make[kind]() for kind in self.kinds]

    def __call__(self, inputs: mx.array, cache: list | None = None) -> mx.array:
        if self.before_call is not None:
            self.before_call(inputs.shape[1])
        cache = cache if cache is not None else self.make_cache()
        total = mx.zeros(inputs.shape, mx.int64)
        for index, (kind, layer) in enumerate(zip(self.kinds, cache, strict=True)):
            history = getattr(self, f"_{kind}")(inputs, layer, index)
            total = (total * 31 + history) % P
        return self._logits(total)

    def _write(self, inputs: mx.array, layer: KVCache, index: int) -> tuple[mx.array, mx.array]:
        """Append the rows of ``inputs``; give (token, position) of every row as read back."""
        length = inputs.shape[1]
        tokens = self.embed[inputs]
        positions = mx.broadcast_to(mx.arange(layer.offset, layer.offset + length), inputs.shape)
        keys = mx.stack([tokens, positions.astype(mx.float32)], axis=-1)[:, None]
        values = mx.stack([tokens + index, positions.astype(mx.float32) * 2], axis=-1)[:, None]
        keys, values = layer.update_and_fetch(keys, values)
        token = keys[:, 0, :, 0] + 3 * (values[:, 0, :, 0] - index)
        position = keys[:, 0, :, 1] + values[:, 0, :, 1]
        return token.astype(mx.int64), position.astype(mx.int64)

    def _rows(self, inputs: mx.array, layer: KVCache, index: int) -> mx.array:
        token, position = self._write(inputs, layer, index)
        place = mx.arange(token.shape[1]).astype(mx.int64)
        read = ((token + 1) * _weight(place) + position * 13) % P
        return mx.cumsum(read, axis=1)[:, -inputs.shape[1] :] % P

    def _window(self, inputs: mx.array, layer: RotatingKVCache, index: int) -> mx.array:
        length = inputs.shape[1]
        token, position = self._write(inputs, layer, index)
        where = position // 3  # key and value positions add up to three times the position
        read = ((token + 1) * _weight(where) + (position % 3) * 13) % P
        query = mx.arange(layer.offset - length, layer.offset)[None, :, None]
        inside = (where[:, None] <= query) & (where[:, None] > query - self.window)
        return mx.sum(mx.where(inside, read[:, None], 0), axis=2) % P

    def _state(self, inputs: mx.array, layer: ArraysCache, index: int) -> mx.array:
        if layer[0] is None:
            layer[0] = mx.zeros((1, 1), mx.int64)
            layer[1] = mx.zeros((1, 1), mx.int64)
        steps = layer[1] + mx.arange(inputs.shape[1])[None]
        read = (inputs.astype(mx.int64) + 1 + index) * _weight(steps) % P
        sums = (layer[0] + mx.cumsum(read, axis=1)) % P
        layer[0] = sums[:, -1:]
        layer[1] = steps[:, -1:] + 1
        return sums

    def _logits(self, total: mx.array) -> mx.array:
        """Logits, shape (batch, tokens, vocab): a letter chosen by the hash, or the end token."""
        spread = (mx.arange(VOCAB).astype(mx.int64) * 7_368_787 + 977) % P
        mixed = (total[..., None] * spread + total[..., None] // 7) % P
        logits = mixed.astype(mx.float32) / P * 8
        letters = mx.zeros(VOCAB)
        letters[mx.array(LETTERS)] = 1
        logits = mx.where(letters == 1, logits, -20.0)
        if self.eos_every:
            ends = (total % self.eos_every == 0)[..., None] & (mx.arange(VOCAB) == EOS)
            logits = mx.where(ends, 20.0, logits)
        return logits


def cold(model: FakeModel, tokens: Sequence[int], count: int) -> list[int]:
    """Greedy continuation of ``tokens`` without any cache reuse: the reference answer."""
    cache = model.make_cache()
    logits = model(mx.array([list(tokens)]), cache=cache)[:, -1]
    out: list[int] = []
    while len(out) < count:
        token = int(mx.argmax(logits, axis=-1).item())
        if token == EOS:
            break
        out.append(token)
        logits = model(mx.array([[token]]), cache=cache)[:, -1]
    return out


def letters(n: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt of ``n`` random letters' ids, the same for the same seed."""
    return tuple(random.Random(seed).choices(LETTERS[:-1], k=n))


def fake_engine(model: FakeModel | None = None, **options):
    """An engine on a fake model and a byte tokenizer."""
    from fake_tokenizer import chatml_tokenizer
    from mlx_jupyter.engine.engine import Engine

    return Engine(model or FakeModel(), chatml_tokenizer(), **options)
