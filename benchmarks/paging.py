"""What leaving memory and coming back costs: ratios from one run.

    python benchmarks/paging.py [--shape smollm2|1b] [--tokens N] [--rounds N] [--place DIR]
                                [--conversations N] [--each N] [--restart]

1. The pages of a conversation of N tokens, written to a store and read in again, against
   ``mx.save_safetensors`` and ``mx.load`` of the same bytes in one file; also with the page cache
   of the operating system emptied of them.
2. The first token of a long prompt in a process that has just started, from disk and (where the
   device has memory of its own) from the host's memory, against computing it.
3. Some conversations in turn, in memory for two of them: every switch read in, every switch
   computed, and the choice by measured rates.

``--restart`` does the second with the default model, its real weights and two engines, instead of
random weights.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from mlx_jupyter import blas

blas.ensure()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from restore import SHAPES, build, fill, gpu, stamp  # noqa: E402

from mlx_jupyter.cache import packing  # noqa: E402
from mlx_jupyter.cache.plan import Rates  # noqa: E402
from mlx_jupyter.cache.prefix_cache import PrefixCache  # noqa: E402
from mlx_jupyter.cache.store import Store  # noqa: E402
from mlx_jupyter.models import allocator  # noqa: E402

MANY = 1 << 50


class Always(Rates):
    """Rates that no measurement changes."""

    def seen(self, **_: float) -> Rates:
        """These."""
        return self

    def doubted(self) -> Rates:
        """These."""
        return self


READ = Always(prefill=1.0)
COMPUTE = Always(prefill=1e-9, restore=1.0, read=1.0)


def conversation(number: int, tokens: int) -> np.ndarray:
    """Ids of a conversation; no two share a beginning."""
    return np.random.default_rng(number).integers(0, 30000, tokens, np.int32)


def drop_from_page_cache(paths: list[Path]) -> None:
    """Ask the operating system to forget what it has of these files."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def save(cache: PrefixCache, store: Store) -> None:
    """Write what isn't written yet, and note it."""
    cache.tiers.save_all(lambda: False)
    store.flush()
    cache.tiers.note()


class Table:
    """Prints rows as they come."""

    def __init__(self) -> None:
        print("| what | figure | goal |\n|---|---|---|")

    def row(self, what: str, figure: str, goal: str = "") -> None:
        """One line."""
        print(f"| {what} | {figure} | {goal} |", flush=True)


def moving(model: object, shape: str, args: argparse.Namespace, place: Path, table: Table) -> None:
    """The first part."""
    settings = SHAPES[shape]
    heads = settings["num_key_value_heads"]
    width = settings["hidden_size"] // settings["num_attention_heads"]
    ids = conversation(1, args.tokens)
    outs, ins, colds, saves, loads, cold_loads = [], [], [], [], [], []
    for round_ in range(args.rounds):
        store = Store(place / f"store-{round_}", budget=MANY)
        cache = PrefixCache(lambda: make_prompt_cache(model), budget=MANY, shelf=store.shelf("b"))
        cache.rates = READ
        stamp(cache, ids, heads, width)
        with cache.open(conversation(2, 300)):
            pass  # elsewhere, so that the rows lie in pages
        arrays = {
            f"{page.start}.{g}.{i}": array
            for node in cache.path_to(ids)
            for page in node.pages
            for g, stack in enumerate(page.stacks)
            for i, array in enumerate(stack)
        }
        nbytes = sum(array.nbytes for array in arrays.values())
        began = time.perf_counter()
        save(cache, store)
        outs.append(nbytes / (time.perf_counter() - began))
        file = place / f"one-{round_}.safetensors"
        began = time.perf_counter()
        mx.save_safetensors(str(file), arrays)
        saves.append(nbytes / (time.perf_counter() - began))
        del arrays
        files = list(store.directory.rglob("*.safetensors"))
        for cold in (False, True):
            if cold:
                drop_from_page_cache([*files, file])
            began = time.perf_counter()
            loaded = mx.load(str(file))
            mx.eval(loaded)
            (cold_loads if cold else loads).append(nbytes / (time.perf_counter() - began))
            del loaded
            other = PrefixCache(
                lambda: make_prompt_cache(model), budget=MANY, shelf=store.shelf("b")
            )
            other.rates = READ
            began = time.perf_counter()
            with other.open(np.append(ids, [1]).astype(np.int32), room=256) as session:
                (colds if cold else ins).append(nbytes / (time.perf_counter() - began))
                assert session.plan.read == args.tokens, session.plan
            other.clear()
            del session, other
            gc.collect()  # else one round's caches would push the next one into new memory
        cache.clear()
        store.close()
        shutil.rmtree(store.directory)
        file.unlink()
        mx.clear_cache()
    out, into, cold, saved, loaded_, cold_loaded = map(
        statistics.median, (outs, ins, colds, saves, loads, cold_loads)
    )
    table.row("bytes of the conversation", f"{nbytes / 1e6:.0f} MB")
    table.row("written to the store", f"{out / 1e9:.2f} GB/s")
    table.row("`mx.save_safetensors`, one file", f"{saved / 1e9:.2f} GB/s")
    table.row("written ÷ `mx.save_safetensors`", f"{out / saved:.2f}", "≥ 0.5")
    table.row("read in, into the live cache", f"{into / 1e9:.2f} GB/s")
    table.row("`mx.load`, evaluated", f"{loaded_ / 1e9:.2f} GB/s")
    table.row("read in ÷ `mx.load`", f"{into / loaded_:.2f}", "≥ 0.5")
    table.row("the same, page cache cold: read in", f"{cold / 1e9:.2f} GB/s")
    table.row("page cache cold: read in ÷ `mx.load`", f"{cold / cold_loaded:.2f}")


def first_token(cache: PrefixCache, model: object, ids: np.ndarray, chunk: int) -> float:
    """Seconds from the request to its first logits."""
    began = time.perf_counter()
    with cache.open(ids, room=64) as session:
        opened = time.perf_counter()
        for at in range(session.start, len(ids), chunk):
            fed = ids[at : min(at + chunk, len(ids))].tolist()
            logits = model(mx.array([fed]), cache=session.layers)
            session.advance(fed)
            session.settle()
        mx.eval(logits[:, -1])
        ended = time.perf_counter()
        session.measured(len(ids) - session.start, ended - opened)
        return ended - began


def restarting(model: object, args: argparse.Namespace, place: Path, table: Table) -> None:
    """The second part, with random weights."""
    chunk = 2048 if gpu() else 128
    ids = conversation(3, args.tokens)
    store = Store(place / "restart", budget=MANY)
    cache = PrefixCache(lambda: make_prompt_cache(model), budget=MANY, shelf=store.shelf("b"))
    first_token(cache, model, conversation(4, 2 * chunk), chunk)
    cold = first_token(cache, model, ids, chunk)
    save(cache, store)
    cache.clear()
    table.row(f"first token of {args.tokens:,} tokens, computed", f"{cold:.3f} s")
    for tier in ("disk", "host") if packing.discrete() else ("disk",):
        times = []
        for _ in range(args.rounds):
            fresh = PrefixCache(
                lambda: make_prompt_cache(model),
                budget=MANY,
                shelf=store.shelf("b") if tier == "disk" else None,
                host_budget=MANY if tier == "host" else 0,
            )
            fresh.rates = READ
            if tier == "host":
                fill(fresh, model, ids, chunk)
                fresh.evict()
            times.append(first_token(fresh, model, ids, chunk))
            assert fresh.live.offset == len(ids)
            fresh.clear()
        warm = statistics.median(times)
        table.row(f"the same from {tier}", f"{warm:.3f} s")
        table.row(f"from {tier} ÷ computed", f"{warm / cold:.3f}", "≤ 0.1 on a CPU")
    store.close()


def restarting_for_real(args: argparse.Namespace, place: Path, table: Table) -> None:
    """The second part, with the default model and two engines."""
    from mlx_jupyter.engine.engine import Engine

    os.environ.pop("MLX_JUPYTER_STORE", None)
    ids = conversation(3, args.tokens).tolist()
    seen = {}
    for when in ("computed", "after a restart"):
        with Engine(store=place / "real", store_bytes=MANY, context=args.tokens + 64) as engine:
            began = time.perf_counter()
            engine.load("smollm2-135m")
            loading = time.perf_counter() - began
            answer = engine.generate(tokens=ids, max_tokens=2)
            engine.settle_store()
            seen[when] = answer.timing.ttft
            table.row(
                f"SmolLM2, {answer.usage.prompt:,} tokens, {when} (load {loading:.0f} s)",
                f"first token after {answer.timing.ttft:.2f} s, {answer.usage.cached:,} cached",
            )
    ratio = seen["after a restart"] / seen["computed"]
    table.row("after a restart ÷ computed", f"{ratio:.4f}", "≤ 0.1")


def taking_turns(model: object, args: argparse.Namespace, place: Path, table: Table) -> None:
    """The third part."""
    chunk = 2048 if gpu() else 128
    all_ids = [conversation(10 + n, args.each) for n in range(args.conversations)]
    probe = PrefixCache(lambda: make_prompt_cache(model), budget=MANY)
    fill(probe, model, all_ids[0], chunk)
    budget = 2 * probe.live.row_bytes() * (args.each + 512)
    probe.clear()
    seconds = {}
    for name, rates in (("read in", READ), ("computed", COMPUTE), ("chosen by cost", Rates())):
        store = Store(place / f"turns-{len(seconds)}", budget=MANY)
        cache = PrefixCache(
            lambda: make_prompt_cache(model),
            budget=budget,
            shelf=store.shelf("b"),
            host_budget=MANY if packing.discrete() else 0,
        )
        cache.rates = rates
        for ids in all_ids:
            first_token(cache, model, ids, chunk)
            save(cache, store)
        prefilled = read = 0
        began = time.perf_counter()
        for _ in range(args.turns):
            for n, ids in enumerate(all_ids):
                all_ids[n] = ids = np.append(ids, [n, 7]).astype(np.int32)
                plan = cache.plan(ids)
                first_token(cache, model, ids, chunk)
                prefilled += plan.recomputed
                read += plan.read
                assert cache.nbytes() <= budget, (cache.nbytes(), budget)
        seconds[name] = time.perf_counter() - began
        switches = args.turns * args.conversations
        table.row(
            f"{switches} switches between {args.conversations} conversations of {args.each:,} "
            f"tokens, {name}",
            f"{seconds[name]:.2f} s; {prefilled:,} prefilled, {read:,} read",
            f"{switches * 2:,} prefilled at most {switches * 3:,}" if name == "read in" else "",
        )
        cache.clear()
        store.close()
        all_ids = [ids[: args.each] for ids in all_ids]
    best = min(seconds["read in"], seconds["computed"])
    table.row(
        "chosen by cost ÷ the better extreme", f"{seconds['chosen by cost'] / best:.2f}", "≤ 1"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1b" if gpu() else "smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--place", type=Path, default=None)
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--each", type=int, default=8192 if gpu() else 1024)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--only", choices=["moving", "restarting", "turns"], default=None)
    args = parser.parse_args()
    kept = not gpu() and allocator.keep_freed()
    print(
        f"{args.shape}, {args.tokens:,} tokens; {mx.default_device()}, {os.cpu_count()} cores, "
        f"BLAS {blas.status().state}, malloc keeps buffers: {kept}; {platform.platform()}\n"
    )
    table = Table()
    with tempfile.TemporaryDirectory(dir=args.place) as place:
        if args.restart:
            restarting_for_real(args, Path(place), table)
            return
        model = build(args.shape)
        if args.only in (None, "moving"):
            moving(model, args.shape, args, Path(place), table)
        if args.only in (None, "restarting"):
            restarting(model, args, Path(place), table)
        if args.only in (None, "turns"):
            taking_turns(model, args, Path(place), table)


if __name__ == "__main__":
    main()
