"""Compares retention policies on traces of notebooks: prefilled tokens ÷ an infinite cache's.

    python benchmarks/retention.py [--quick] [--seeds N] [--scale N] [TRACE ...]

Without traces it takes the recorded ones in ``traces/`` and synthetic ones of several styles. A
recorded token stands for ``--scale`` tokens, so that short recordings press on the budget as long
conversations would: by default as many as make all that is distinct 250,000 tokens, but no
prompt longer than 32,000.

The budgets are 4, 6 and 12 GB at 65,536 bytes a token, with states of 150 MB (hybrid) and without
(rows). The live cache is counted, but for mlx-lm's, whose running copy is left out. Marconi's
score is given the best of three alphas at each budget. The clairvoyant knows the requests to come
and gives up greedily; it is a yardstick, not a bound that nothing could pass.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from retention_policies import Clairvoyant, LeafLRU, Marconi, MlxLM, Ours
from retention_sim import Model, SimCache
from retention_traces import STYLES, UNIT, distinct, scaled, session

from mlx_jupyter.cache.trace import read

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_jupyter.cache.trace import Step

TRACES = Path(__file__).parent / "traces"
BUDGETS = (4, 6, 12)
MODELS = {"hybrid": Model(65_536, 150_000_000), "rows": Model(65_536)}
ALPHAS = (0.5, 1.0, 2.0)
POLICIES = ("ours", "leaf LRU", "Marconi", "mlx-lm", "clairvoyant")
LIMIT = 1.4
"""How far from the clairvoyant ours may be."""


@dataclass(frozen=True)
class Trace:
    """A named trace; each of its tokens stands for ``factor`` tokens."""

    name: str
    steps: Sequence[Step]
    factor: int


@dataclass(frozen=True)
class Result:
    """Prefilled tokens of one trace on one model at one budget (GB), by policy."""

    trace: str
    model: str
    budget: int
    infinite: int
    prefilled: dict[str, int]

    def ratio(self, policy: str) -> float:
        """To what an infinite cache prefills."""
        return self.prefilled[policy] / self.infinite

    def near(self) -> bool:
        """Ours is within ``LIMIT`` of the clairvoyant."""
        return self.prefilled["ours"] <= LIMIT * self.prefilled["clairvoyant"]

    def best(self) -> bool:
        """No policy without foresight prefills less than ours."""
        others = (n for name, n in self.prefilled.items() if name not in ("ours", "clairvoyant"))
        return self.prefilled["ours"] <= min(others)


def recorded(scale: int | None = None, paths: Iterable[Path] = ()) -> list[Trace]:
    """Traces from files, by default the committed ones."""
    traces = []
    for path in paths or sorted(TRACES.glob("*.jsonl.gz")):
        steps = read(path)
        longest = max(len(s.ids) + len(s.generated) for s in steps)
        fitting = max(1, min(250_000 // distinct(steps), 32_000 // longest))
        traces.append(Trace(path.name.split(".")[0], steps, scale or fitting))
    return traces


def synthetic(seeds: Iterable[int]) -> list[Trace]:
    """Traces of all styles."""
    return [
        Trace(f"{name} {seed}", session(style, seed), UNIT)
        for name, style in STYLES.items()
        for seed in seeds
    ]


def compare(trace: Trace, models: Iterable[str] = MODELS) -> list[Result]:
    """Replay a trace with every policy at every budget."""
    steps = scaled(trace.steps, trace.factor)
    results = []
    for name in models:
        model = MODELS[name]
        infinite = sum(map(SimCache(model, math.inf, Ours()).request, steps))
        for gigabytes in BUDGETS:
            budget = gigabytes * 1e9

            def run(policy: Ours | LeafLRU | Marconi | Clairvoyant) -> int:
                cache = SimCache(model, budget, policy)  # noqa: B023 - called at once
                return sum(map(cache.request, steps))

            prefilled = {
                "ours": run(Ours()),
                "leaf LRU": run(LeafLRU()),
                "Marconi": min(run(Marconi(alpha)) for alpha in ALPHAS),
                "mlx-lm": sum(map(MlxLM(model, budget, trace.factor).request, trace.steps)),
                "clairvoyant": run(Clairvoyant(steps)),
            }
            results.append(Result(trace.name, name, gigabytes, infinite, prefilled))
    return results


def table(results: Iterable[Result]) -> str:
    """A Markdown table, the best policy without foresight in bold."""
    lines = [
        "| trace | model | GB | " + " | ".join(POLICIES) + " | ours ÷ clairvoyant |",
        "|---|---|---|" + "---|" * (len(POLICIES) + 1),
    ]
    for r in results:
        least = min(n for name, n in r.prefilled.items() if name != "clairvoyant")
        cells = [
            f"**{r.ratio(p):.2f}**"
            if r.prefilled[p] == least and p != "clairvoyant"
            else f"{r.ratio(p):.2f}"
            for p in POLICIES
        ]
        away = r.prefilled["ours"] / r.prefilled["clairvoyant"]
        lines.append(f"| {r.trace} | {r.model} | {r.budget} | {' | '.join(cells)} | {away:.2f} |")
    return "\n".join(lines)


def means(results: Sequence[Result]) -> list[Result]:
    """For each model and budget all traces together: the geometric mean of the ratios."""
    made = []
    for model, budget in dict.fromkeys((r.model, r.budget) for r in results):
        chosen = [r for r in results if (r.model, r.budget) == (model, budget)]
        mean = {
            policy: round(
                1e6 * math.exp(sum(math.log(r.ratio(policy)) for r in chosen) / len(chosen))
            )
            for policy in POLICIES
        }
        made.append(Result(f"mean of {len(chosen)}", model, budget, 1_000_000, mean))
    return made


def main() -> None:
    """Print the table and which of the aims are missed."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("traces", nargs="*", type=Path)
    options.add_argument("--quick", action="store_true", help="recorded traces alone")
    options.add_argument("--seeds", type=int, default=2, help="synthetic sessions of each style")
    options.add_argument("--scale", type=int, help="tokens that a recorded token stands for")
    given = options.parse_args()
    traces = recorded(given.scale, given.traces)
    if not given.quick and not given.traces:
        traces += synthetic(range(1, given.seeds + 1))
    results = [result for trace in traces for result in compare(trace)]
    results.sort(key=lambda r: list(MODELS).index(r.model))
    print(table([*results, *means(results)]))
    for test, text in (
        (Result.near, f"more than {LIMIT} × the clairvoyant's"),
        (Result.best, "another policy prefills less"),
    ):
        missed = [f"{r.trace} {r.model} {r.budget} GB" for r in results if not test(r)]
        print(f"\n{text}: {len(missed)} of {len(results)}. {', '.join(missed)}")


if __name__ == "__main__":
    main()
