"""What each kind of model recomputes when a notebook goes on: a table, no clock.

    python benchmarks/reuse.py

The scenarios are those that ``tests/test_families.py`` checks: a first prompt of 83 tokens (a
system text to 40, a question to 80, a generation tail of 3) with an answer of 6, then what the
heading says. Each cell is tokens recomputed, of which tokens new.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from test_families import EXPECTED_REUSE, FAMILIES, kind, last_request


def main() -> None:
    """Print the table."""
    scenarios = list(EXPECTED_REUSE)
    print("| family | restores by | " + " | ".join(scenarios) + " |")
    print("|---|---|" + "---|" * len(scenarios))
    for name in FAMILIES:
        cells = []
        for scenario in scenarios:
            run, new = last_request(name, scenario)
            cells.append(f"{run.computed} ({new} new)")
        print(f"| {name} | {kind(name)} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
