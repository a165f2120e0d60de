"""How close stored bytes come to what must be stored: ratios from one run.

    python benchmarks/memory.py [--small]

Branches from one prefix on a model of full layers, a long conversation on a sliding-window model
with and without a budget, and MLX's peak over all of it. Random weights; ``--small`` for a look.
Without it ``memory_truth.py`` runs too: what is reported against what the system says.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

from mlx_jupyter import blas

blas.ensure()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models import gemma3_text, llama  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from mlx_jupyter.cache.needs import joined  # noqa: E402
from mlx_jupyter.cache.prefix_cache import PrefixCache  # noqa: E402

CHUNK = 128


def rows_model(small: bool) -> nn.Module:
    """A llama of SmolLM2-135M's shape (or a quarter of its layers)."""
    return _ready(
        llama.Model(
            llama.ModelArgs.from_dict(
                {
                    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
                    "num_hidden_layers": 8 if small else 30, "num_attention_heads": 9,
                    "num_key_value_heads": 3, "vocab_size": 49152, "rms_norm_eps": 1e-5,
                    "rope_theta": 1e4, "tie_word_embeddings": True,
                    "max_position_embeddings": 8192,
                }
            )
        )
    )  # fmt: skip


def window_model(small: bool) -> nn.Module:
    """Of Gemma 3 270M's kind: a window of 512, every sixth layer full."""
    return _ready(
        gemma3_text.Model(
            gemma3_text.ModelArgs.from_dict(
                {
                    "model_type": "gemma3_text", "hidden_size": 320, "intermediate_size": 640,
                    "num_hidden_layers": 6 if small else 18, "num_attention_heads": 4,
                    "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 32000,
                    "query_pre_attn_scalar": 128, "sliding_window": 512,
                    "sliding_window_pattern": 6, "rms_norm_eps": 1e-6,
                }
            )
        )
    )  # fmt: skip


def _ready(model: nn.Module) -> nn.Module:
    mx.eval(model.parameters())
    return model


class Bench:
    """A model with a prefix cache, and the largest ratio of MLX's peak to what is accounted."""

    def __init__(self, model: nn.Module, budget: int = 1 << 40) -> None:
        gc.collect()  # an earlier cache is a cycle of objects
        self.model = model
        self.cache = PrefixCache(lambda: make_prompt_cache(model), budget=budget)
        self.weights = mx.get_array_buffer_size([a for _, a in tree_flatten(model.parameters())])
        self.peak = 0.0

    def ask(self, ids: np.ndarray, generate: int, marks: list[tuple[int, str]]) -> np.ndarray:
        """Feed a prompt and some more tokens one by one; all the ids."""
        cache = self.cache
        mx.clear_cache()
        mx.reset_peak_memory()
        accounted = cache.nbytes()
        made = np.random.default_rng(len(ids)).integers(0, 30000, generate, np.int32)
        whole = np.concatenate([ids, made])
        with cache.open(ids, room=generate, marks=marks) as session:
            at = session.start
            while at < len(whole):
                end = min((at // CHUNK + 1) * CHUNK, session.next_cut(at), len(ids) - 1)
                end = end if at < len(ids) - 1 else at + 1
                fed = whole[at:end].tolist()
                logits = self.model(mx.array([fed]), cache=session.layers)
                if at >= len(ids) - 1:
                    mx.eval(logits)
                session.advance(fed)
                if at < len(ids) or session.due:
                    session.settle()
                    accounted = max(accounted, cache.nbytes())
                at = end
        accounted = max(accounted, cache.nbytes())
        self.peak = max(self.peak, mx.get_peak_memory() / (self.weights + accounted))
        cache.check()
        return whole


def branches(model: nn.Module, prefix: int, length: int, count: int = 20) -> tuple[float, float]:
    """Stored ÷ unique bytes of branches from one prefix, and the peak ratio."""
    bench = Bench(model)
    dice = np.random.default_rng(1)
    shared = dice.integers(0, 30000, prefix, np.int32)
    for _ in range(count):
        bench.ask(np.concatenate([shared, dice.integers(0, 30000, length, np.int32)]), 0, [])
    row = bench.cache.live.row_bytes()
    unique = (count - 1) * length * row  # the prefix and the last branch are in the live cache
    return bench.cache.stored_bytes() / unique, bench.peak


def conversation(
    model: nn.Module, turns: int, question: int, answer: int, budget: int | None
) -> tuple[float, float, list[int]]:
    """Stored ÷ needed bytes of one conversation, the peak ratio, bytes after each turn."""
    bench = Bench(model, budget if budget is not None else 1 << 40)
    dice = np.random.default_rng(2)
    ids = np.zeros(0, np.int32)
    marks: list[tuple[int, str]] = []
    used: list[int] = []
    for _ in range(turns):
        if len(ids):
            marks.append((len(ids), "turn"))
        ids = np.concatenate([ids, dice.integers(0, 30000, question, np.int32)])
        ids = bench.ask(ids, answer, marks)
        used.append(bench.cache.nbytes())
    cache = bench.cache
    places = sorted(at for n in cache.trie.nodes() for at in n.marks)
    union = joined(span for at in places for span in cache.needs.spans(at))
    strips = [s for n in cache.trie.nodes() for s in n.strips]
    longest = max(strips, key=lambda s: s.tokens)  # the least part of it is rounding
    window_row = longest.nbytes / longest.tokens
    needed = window_row * sum(b - a for a, b in union)
    return cache.stored_bytes() / needed, bench.peak, used


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    print(f"{mx.default_device()}, {os.cpu_count()} cores, BLAS {blas.status().state}; "
          f"{platform.platform()}\n")  # fmt: skip
    print("| what | figure | goal |\n|---|---|---|")
    model = rows_model(small)
    prefix = 1024 if small else 4096
    for start, length in ((prefix, 256), (prefix + 4, 250)):
        stored, peak = branches(model, start, length)
        print(f"| 20 branches of {length} from {start}: stored ÷ unique | {stored:.3f} | ≤ 1.05 |")
        print(f"| the same: MLX's peak ÷ (weights + live + stored) | {peak:.3f} | ≤ 1.15 |")
    del model
    model = window_model(small)
    turns, question, answer = (8, 600, 60) if small else (20, 700, 100)
    stored, peak, used = conversation(model, turns, question, answer, None)
    print(f"| {turns} turns on a window of 512: stored ÷ needed | {stored:.3f} | ≤ 1.05 |")
    print(f"| the same: MLX's peak ÷ (weights + live + stored) | {peak:.3f} | ≤ 1.15 |")
    budget = used[-1] * 2 // 3
    _, peak, used = conversation(model, turns, question, answer, budget)
    print(
        f"| the same with two thirds of that: largest ÷ budget | {max(used) / budget:.3f} | ≤ 1 |"
    )
    half = used[len(used) // 2]
    print(f"| the same: bytes after the last turn ÷ after half | {used[-1] / half:.3f} | flat |")

    if not small:
        print(flush=True)
        # What is reported against what the system says needs a process that held nothing else.
        truth = Path(__file__).with_name("memory_truth.py")
        subprocess.run([sys.executable, str(truth)], check=True)


if __name__ == "__main__":
    main()
