"""What bringing a stored conversation back costs: ratios from one run.

    python benchmarks/restore.py [--shape smollm2|1b] [--tokens N] [--rounds N] [--no-prefill]

Switches A → B → A between two conversations of N tokens on a random-weight model and compares the
bytes read in with MLX's own copy of as many bytes into fresh buffers, and with prefilling again.
Then matches a prompt of 100,000 tokens against a trie of 5,000 nodes.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time

from mlx_jupyter import blas

blas.ensure()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from mlx_jupyter.cache.match import match  # noqa: E402
from mlx_jupyter.cache.prefix_cache import PrefixCache  # noqa: E402
from mlx_jupyter.models import allocator  # noqa: E402

SHAPES = {
    "smollm2": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    },
}  # fmt: skip


def build(shape: str) -> llama.Model:
    """A llama with random weights, evaluated; float32 on CPU, bfloat16 on a GPU."""
    args = llama.ModelArgs.from_dict(
        {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e4,
         "max_position_embeddings": 65536, "tie_word_embeddings": True, **SHAPES[shape]}
    )  # fmt: skip
    model = llama.Model(args)
    model.set_dtype(mx.bfloat16 if gpu() else mx.float32)
    mx.eval(model.parameters())
    return model


def gpu() -> bool:
    """Whether MLX computes on a GPU."""
    return mx.default_device().type == mx.DeviceType.gpu


def fill(cache: PrefixCache, model: llama.Model, ids: np.ndarray, chunk: int) -> float:
    """Put a conversation into the cache by computing it; seconds."""
    start = time.perf_counter()
    with cache.open(ids, room=1) as session:
        for a in range(session.start, len(ids), chunk):
            fed = ids[a : a + chunk].tolist()
            model(mx.array([fed]), cache=session.layers)
            session.advance(fed)
            session.settle()
    return time.perf_counter() - start


def stamp(cache: PrefixCache, ids: np.ndarray, heads: int, width: int) -> None:
    """Put a conversation into the cache with random rows, without computing the model."""
    dtype = mx.bfloat16 if gpu() else mx.float32
    with cache.open(ids, room=1) as session:
        for a in range(session.start, len(ids), 2048):
            fed = ids[a : a + 2048].tolist()
            for layer in session.layers:
                rows = mx.random.normal((1, heads, len(fed), width)).astype(dtype)
                layer.update_and_fetch(rows, rows)
            session.advance(fed)
            session.settle()


def switch(cache: PrefixCache, ids: np.ndarray) -> tuple[float, float]:
    """Open a stored conversation and let it stand: (seconds of the switch, of the read-in)."""
    start = time.perf_counter()
    before = cache.rates
    cache.rates = type(before)()
    with cache.open(ids, room=256) as session:
        opened = time.perf_counter() - start
        read = cache.rates.restore * session.plan.restored
    cache.rates = before
    return opened, read


def copy_seconds(nbytes: int) -> float:
    """MLX's own copy of so many bytes into fresh buffers, 30 arrays at a time."""
    dtype = mx.bfloat16 if gpu() else mx.float32
    arrays = [mx.zeros((nbytes // 30 // dtype.size,), dtype) for _ in range(30)]
    mx.eval(arrays)
    start = time.perf_counter()
    copies = [mx.full(a.shape, a) for a in arrays]
    mx.eval(copies)
    return time.perf_counter() - start


def matching(nodes: int, tokens: int) -> float:
    """Seconds to match a long prompt against a trie of many nodes, median."""
    dice = random.Random(1)
    cache = PrefixCache(list, budget=1 << 40)
    long = np.array(dice.choices(range(30000), k=tokens), np.int32)
    cache.trie.insert(long)
    while sum(1 for _ in cache.trie.nodes()) < nodes:
        at = dice.randrange(1, tokens - 1)
        cache.trie.insert(np.append(long[:at], [30001 + dice.randrange(10**6)]).astype(np.int32))
    times = []
    for _ in range(9):
        start = time.perf_counter()
        match(cache.trie.root, long, 0, lambda _: False)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1b" if gpu() else "smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=None, help="tokens of the prefill compared")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--malloc", choices=["on", "off"], default="on")
    args = parser.parse_args()
    kept = args.malloc == "on" and not gpu() and allocator.keep_freed()
    shape = SHAPES[args.shape]
    heads, width = (
        shape["num_key_value_heads"],
        shape["hidden_size"] // shape["num_attention_heads"],
    )
    model = build(args.shape)
    print(
        f"{args.shape}, {args.tokens:,} tokens; {mx.default_device()}, {os.cpu_count()} cores, "
        f"BLAS {blas.status().state}, malloc keeps buffers: {kept}; {platform.platform()}\n"
    )

    cache = PrefixCache(lambda: make_prompt_cache(model), budget=1 << 40)
    dice = np.random.default_rng(1)
    a, b = (dice.integers(0, 30000, args.tokens, np.int32) for _ in range(2))
    for ids in (a, b):
        stamp(cache, ids, heads, width)
    for ids in (a, b):
        switch(cache, ids)
    nbytes = cache.live.row_bytes() * args.tokens
    copies, switches, reads = [], [], []
    for _ in range(args.rounds):
        for ids in (a, b):
            opened, read = switch(cache, ids)
            switches.append(opened)
            reads.append(read)
            copies.append(copy_seconds(nbytes))
    cache.check()
    copy, read, opened = map(statistics.median, (copies, reads, switches))
    print("| what | figure | goal |\n|---|---|---|")
    print(f"| bytes read in | {nbytes / 1e6:.0f} MB | |")
    print(f"| MLX's own copy into fresh buffers | {nbytes / copy / 1e9:.1f} GB/s | |")
    print(f"| read-in | {nbytes / read / 1e9:.1f} GB/s | ≥ 100 GB/s on an H200 |")
    print(f"| read-in ÷ MLX's own copy | {copy / read:.2f} | ≥ 0.5 |")
    print(f"| whole switch (the other one moved out, this one in) | {opened * 1e3:.1f} ms | |")
    if not args.no_prefill:
        tokens = args.prefill or args.tokens
        fresh = PrefixCache(lambda: make_prompt_cache(model), budget=1 << 40)
        chunk = 2048 if gpu() else 128
        fill(fresh, model, a[:chunk], chunk)
        fresh.clear()
        seconds = fill(fresh, model, a[:tokens], chunk) * args.tokens / tokens
        print(
            f"| prefill again ({tokens:,} tokens measured) ÷ read-in "
            f"| {seconds / read:.0f} | ≥ 50 |"
        )
        print(f"| prefill again ÷ whole switch | {seconds / opened:.0f} | |")
    print(
        f"| match 100,000 tokens in 5,000 nodes | {matching(5000, 100_000) * 1e3:.2f} ms | ≤ 10 |"
    )


if __name__ == "__main__":
    main()
