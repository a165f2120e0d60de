"""What the engine costs on top of mlx-lm, and how fast it lets go: ratios from one run.

    python benchmarks/overhead.py [--model NAME] [--rounds N] [--tokens N] [--prompt N] [--no-cell]

Both sides run the same model object on the same thread, in turns, so that a noisy machine slows
both; each ratio is a median over rounds of paired measurements.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import statistics
import threading
import time
from typing import TYPE_CHECKING

from mlx_jupyter.engine.engine import Engine
from mlx_jupyter.engine.request import Prefill, Ticket, Token

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNKS = (64, 128, 256, 512, 2048)


def ids(n: int, seed: int) -> list[int]:
    """A prompt of ordinary token ids that shares no prefix with another seed's."""
    return random.Random(seed).choices(range(1000, 20000), k=n)


class Reference:
    """mlx-lm on the engine's own thread and model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loaded = engine._shop.find(None)

    def generate(self, prompt: list[int], tokens: int, chunk: int = 2048) -> tuple[float, float]:
        """(prefill, decode) tokens a second of ``mlx_lm.stream_generate``."""

        def work() -> tuple[float, float]:
            from mlx_lm import stream_generate

            times: list[float] = []
            start = time.perf_counter()
            tokenizer = self._loaded.tokenizer
            ends, tokenizer.eos_token_ids = tokenizer.eos_token_ids, set()
            try:
                responses = stream_generate(
                    self._loaded.model,
                    tokenizer,
                    prompt,
                    max_tokens=tokens,
                    prefill_step_size=chunk,
                )
                times.extend(time.perf_counter() for _ in responses)
            finally:
                tokenizer.eos_token_ids = ends
            decode = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
            return len(prompt) / (times[0] - start), decode

        return self._engine._thread.call(work)


def ours(engine: Engine, prompt: list[int], tokens: int) -> tuple[float, float]:
    """(prefill, decode) tokens a second through the engine, no end token."""
    tokenizer = engine._shop.find(None).tokenizer
    ends, tokenizer.eos_token_ids = tokenizer.eos_token_ids, set()
    try:
        answer = engine.generate(tokens=prompt, max_tokens=tokens)
    finally:
        tokenizer.eos_token_ids = ends
    assert answer.usage.generated == tokens
    return answer.timing.prefill_tps, answer.timing.decode_tps


def paired(rounds: int, a: Callable[[int], float], b: Callable[[int], float]) -> list[float]:
    """The ratios a ÷ b, measured in turns, the order swapped every round."""
    ratios = []
    for i in range(rounds):
        if i % 2:
            y, x = b(i), a(i)
        else:
            x, y = a(i), b(i)
        ratios.append(x / y)
    return ratios


def show(name: str, ratios: list[float], goal: str) -> None:
    """One line of the table."""
    low, high = min(ratios), max(ratios)
    print(
        f"| {name} | {statistics.median(ratios):.3f} | {low:.3f} … {high:.3f} | {goal} |",
        flush=True,
    )


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return sorted(values)[max(0, round(0.95 * len(values)) - 1)]


def intervals(engine: Engine, prompt: list[int], tokens: int) -> dict[type, list[float]]:
    """Seconds between the events of an uninterrupted run: prefill chunks and decode steps."""
    seen: dict[type, list[float]] = {Prefill: [], Token: []}
    last = time.perf_counter()
    for event in engine.stream(tokens=prompt, max_tokens=tokens):
        now = time.perf_counter()
        if type(event) in seen and getattr(event, "done", 1):
            seen[type(event)].append(now - last)
        last = now
    return seen


def interrupts(engine: Engine, count: int) -> None:
    """Interrupt the calling thread at random times; how soon it returns, how soon all is idle."""
    dice = random.Random(3)
    usual = intervals(engine, ids(900, 999), 40)
    longest = {kind: max(times) for kind, times in usual.items()}
    back: list[float] = []
    idle: list[float] = []
    for i in range(count):
        kind = Prefill if i % 2 == 0 else Token
        ticket = engine.submit(engine.request(tokens=ids(900, 1000 + i), max_tokens=200))
        sent: list[float] = []

        def send(ticket: Ticket = ticket, kind: type = kind, sent: list[float] = sent) -> None:
            left = dice.randrange(1, 4)
            for event in ticket.events():
                if isinstance(event, kind) and getattr(event, "done", 1):
                    left -= 1
                    if not left:
                        time.sleep(dice.random() * statistics.median(usual[kind]))
                        sent.append(time.perf_counter())
                        os.kill(os.getpid(), signal.SIGINT)
                        return

        sender = threading.Thread(target=send)
        try:
            sender.start()
            ticket.wait()
            sender.join()
            raise SystemExit("the interrupt came too late: raise max_tokens")
        except KeyboardInterrupt:
            ticket.cancel()
            ticket.settle()
            back.append(time.perf_counter() - sent[0])
        ticket.wait()
        idle.append((time.perf_counter() - sent[0]) / longest[kind])
        sender.join()
    print(
        f"| prompt back after an interrupt, p95, ms | {p95(back) * 1e3:.0f} | "
        f"max {max(back) * 1e3:.0f} | ≤ 100 |"
    )
    chunk, step = longest[Prefill] * 1e3, longest[Token] * 1e3
    print(
        f"| engine idle after an interrupt, p95, in longest chunks ({chunk:.0f} ms) or steps "
        f"({step:.0f} ms) of an uninterrupted run | {p95(idle):.3f} | "
        f"max {max(idle):.3f} | ≤ 1 |",
        flush=True,
    )


CELL = """%%llm --max {tokens} -t 0 -o r --view md --raw
{text}"""


def streaming_cell(model: str, rounds: int, tokens: int) -> list[float]:
    """Decode speed of a streaming %%llm cell ÷ mlx-lm's, in one real kernel, in turns."""
    import json

    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")

    def run(code: str) -> str:
        shown = ""

        def collect(message: dict) -> None:
            nonlocal shown
            if message["msg_type"] == "stream":
                shown += message["content"]["text"]

        reply = client.execute_interactive(code, output_hook=collect, timeout=600)
        assert reply["content"]["status"] == "ok", (code, reply["content"])
        return shown

    try:
        here = json.dumps(os.path.dirname(os.path.abspath(__file__)))
        run("%load_ext mlx_jupyter")
        run(f"%llm load {model}")
        run(
            f"import sys; sys.path.insert(0, {here})\n"
            "import mlx_jupyter as mj, overhead\n"
            "ref = overhead.Reference(mj.engine())"
        )
        ratios = []
        for i in range(rounds):
            text = f"Once upon a time, in the year {1900 + i}, there was a"
            for side in ("ours", "theirs") if i % 2 else ("theirs", "ours"):
                if side == "ours":
                    run(CELL.format(tokens=tokens, text=text))
                    mine = float(run("print(r.timing.decode_tps if r.usage.generated > 8 else 0)"))
                else:
                    code = (
                        f"print(ref.generate(ref._loaded.tokenizer.encode({text!r}), {tokens})[1])"
                    )
                    theirs = float(run(code))
            ratios.append(mine / theirs)
        return ratios
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--interrupts", type=int, default=40)
    parser.add_argument("--no-cell", action="store_true")
    args = parser.parse_args()

    with Engine(store=False) as engine:
        info = engine.load(args.model)
        status = engine.status()
        print(
            f"{info.name}, {info.dtype}, chunk {info.prefill_chunk}; {status.device}, "
            f"{os.cpu_count()} cores, BLAS {status.blas.state}; {platform.platform()}\n"
        )
        print("| what | median | range | goal |\n|---|---|---|---|")
        reference = Reference(engine)
        n = args.prompt
        ours(engine, ids(64, 1), 8)
        reference.generate(ids(64, 1), 8)

        best = max(CHUNKS, key=lambda c: reference.generate(ids(n, 2), 1, c)[0])
        show(
            f"prefill of {n} tokens: ours ÷ mlx-lm's at its best chunk ({best})",
            paired(
                args.rounds,
                lambda i: ours(engine, ids(n, 10 + i), 1)[0],
                lambda i: reference.generate(ids(n, 10 + i), 1, best)[0],
            ),
            "≥ 0.97",
        )
        show(
            f"decode of {args.tokens} tokens, from Python: ours ÷ mlx-lm's",
            paired(
                args.rounds,
                lambda i: ours(engine, ids(64, 30 + i), args.tokens)[1],
                lambda i: reference.generate(ids(64, 30 + i), args.tokens, best)[1],
            ),
            "≥ 0.97",
        )

        def ttft(_: int) -> float:
            engine.generate(tokens=ids(n, 50), max_tokens=1)
            return engine.generate(tokens=ids(n, 50), max_tokens=1).timing.ttft

        def step(_: int) -> float:
            return 1 / ours(engine, ids(n, 50), 24)[1]

        show(
            f"first token of a fully cached prompt of {n} ÷ one decode step",
            paired(args.rounds, ttft, step),
            "≤ 1.5",
        )
        interrupts(engine, args.interrupts)
    if not args.no_cell:
        show(
            "decode from a streaming cell: ours ÷ mlx-lm's",
            streaming_cell(args.model, args.rounds, 2 * args.tokens),
            "≥ 0.95",
        )


if __name__ == "__main__":
    main()
