"""What is reported against what the process really takes, and models that come and go.

    python benchmarks/memory_truth.py [--model NAME] [--switches N]

Reported are MLX's arrays and its buffer cache (``status().memory.active + .cache``), real is what
the system says: the process's resident memory, or the device's used memory on CUDA. Both as growth
since before the load, in a process that had loaded, run and unloaded the model once: libraries,
kernels and garbage that stay after that are Python's, not the model's. The tokenizer is Python's
too, but the model's own: what one takes is measured by itself, printed, and added to what is
reported (not on CUDA, where it isn't on the device). The first load's figures, which count
everything in, are printed too. Samples under load are taken while a prompt is
prefilled and an answer generated. Then two copies of the model that fit one at a time take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path

from mlx_jupyter import blas

blas.ensure()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from mlx_jupyter.engine.engine import Engine  # noqa: E402
from mlx_jupyter.models import memory, precision, sources, tensors  # noqa: E402
from mlx_jupyter.models.admission import Need  # noqa: E402
from mlx_jupyter.models.mlx_limits import trim_buffers  # noqa: E402
from mlx_jupyter.models.reading import import_mlx_lm  # noqa: E402

PROMPT, ANSWER = 1500, 60
PERIOD = 0.05
"""Seconds between two samples."""

REST = 1.5
"""Seconds after which the engine has been idle for long enough to have trimmed its buffers."""


def figures() -> tuple[int, int]:
    """(reported, real) bytes now."""
    now = memory.measured()
    if memory.discrete():
        assert now.device_limit is not None
        assert now.device_free is not None
        return now.active + now.cache, now.device_limit - now.device_free
    return now.active + now.cache, now.resident


def tokenizer_bytes(name: str) -> int:
    """What one more tokenizer of the model takes of the host's memory."""
    from mlx_lm.utils import load_tokenizer

    before = settled()
    tokenizer = load_tokenizer(sources.resolve(name).path)
    grown = settled() - before
    del tokenizer
    settled()
    return max(grown, 0)


def settled() -> int:
    """Resident bytes once garbage is gone."""
    gc.collect()
    trim_buffers()
    return memory.measured().resident


def ratio(before: tuple[int, int], beside: int = 0) -> tuple[float, int, int]:
    """Growth reported (with ``beside``) ÷ real since ``before``, and both."""
    reported, real = (b - a for a, b in zip(before, figures(), strict=True))
    reported += beside
    return reported / max(real, 1), reported, real


def said(what: str, found: tuple[float, int, int], goal: str) -> None:
    """One row of the table."""
    print(
        f"| {what} | {found[0]:.3f} ({found[1] / 1e6:,.0f} ÷ {found[2] / 1e6:,.0f} MB) | {goal} |"
    )


def under_load(engine: Engine, before: tuple[int, int], beside: int, ids: list[int]) -> list[float]:
    """Ratios while a request runs."""
    seen: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PERIOD):
            seen.append(ratio(before, beside)[0])

    thread = threading.Thread(target=watch)
    thread.start()
    engine.generate(tokens=ids, max_tokens=ANSWER)
    done.set()
    thread.join()
    return seen


def truth(name: str) -> None:
    """Ratios at rest and under load."""
    ids = np.random.default_rng(0).integers(100, 40_000, PROMPT).tolist()
    with Engine(store=False) as engine:
        engine.status()
        import_mlx_lm()
        first = figures()
        engine.load(name)
        time.sleep(REST)
        said("first load, libraries and tokenizer counted in", ratio(first), "–")
        engine.generate(tokens=ids[:300], max_tokens=2)
        engine.unload()
        time.sleep(REST)
        beside = 0 if memory.discrete() else tokenizer_bytes(name)
        print(f"| a tokenizer, in the host's memory | {beside / 1e6:.0f} MB | – |")
        settled()
        before = figures()
        engine.load(name)
        time.sleep(REST)
        said("at rest after the load", ratio(before, beside), "0.95–1.05")
        seen = under_load(engine, before, beside, ids)
        middle = statistics.median(seen)
        print(f"| under load, {len(seen)} samples: median | {middle:.3f} | 0.90–1.10 |")
        print(f"| the same: lowest and highest | {min(seen):.3f}, {max(seen):.3f} | 0.90–1.10 |")
        time.sleep(REST)
        said("at rest with a filled cache", ratio(before, beside), "0.95–1.05")
        engine.clear()
        time.sleep(REST)
        said("at rest after clear", ratio(before, beside), "0.95–1.05")


def switches(name: str, count: int) -> None:
    """Two copies of a model with room for one take turns; what is left, what they answer."""
    source = sources.resolve(name)
    where = precision.backend()
    with tempfile.TemporaryDirectory() as place:
        copies = [Path(place) / each for each in ("one", "two")]
        for copy in copies:
            copy.mkdir()
            for file in source.path.iterdir():
                (copy / file.name).symlink_to(file)
        config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
        need = Need.of(where, tensors.model_entries(source.path), config)
        limit = mx.get_active_memory() + int(1.2 * need.total)
        with Engine(store=False, memory_limit=limit) as engine:
            ask = {"max_tokens": 8, "temperature": 0}
            solo = [engine.generate("Name a colour.", model=str(c), **ask).text for c in copies]
            base = engine._thread.call(mx.get_active_memory)
            real = figures()[1]
            same = 0
            for _ in range(count):
                for copy, wanted in zip(copies, solo, strict=True):
                    answer = engine.generate("Name a colour.", model=str(copy), **ask)
                    same += answer.text == wanted
            left = engine._thread.call(mx.get_active_memory)
            print(f"| {2 * count} switches: answers like a solo run | {same} | {2 * count} |")
            print(
                f"| the same: MLX's memory at the end ÷ at the start | {left / base:.4f} | ± 2 % |"
            )
            print(f"| the same: real memory, end ÷ start | {figures()[1] / real:.3f} | – |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=sources.DEFAULT_MODEL)
    parser.add_argument("--switches", type=int, default=0, help="there and back so many times")
    chosen = parser.parse_args()
    print(f"{mx.default_device()}, {os.cpu_count()} cores, BLAS {blas.status().state}; "
          f"{platform.platform()}\n")  # fmt: skip
    print("| what | figure | goal |\n|---|---|---|")
    truth(chosen.model)
    if chosen.switches:
        switches(chosen.model, chosen.switches)


if __name__ == "__main__":
    main()
