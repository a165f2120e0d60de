"""Write the lock file from pip's own resolution, read as JSON on standard input.

``./run lock`` feeds it with the report of ``pip install --dry-run --ignore-installed``, so the
versions are those that pip and the user's own pip configuration choose; only names and versions
are kept, never where they came from. The argument is the oldest Python that they are for.
"""

from __future__ import annotations

import json
import re
import sys

HEADER = """\
# Exact versions for CI and for a reproducible checkout: Linux, CPython {python} or a later 3.11.
# Made by `./run lock`, used by `./run` as pip constraints; don't edit.
"""


def lock(report: dict[str, object], python: str, own: str = "mlx-jupyter") -> str:
    """The lock file's text for a pip installation report."""
    pinned = set()
    for item in report["install"]:  # type: ignore[attr-defined]
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        if name != own:
            pinned.add(f"{name}=={item['metadata']['version']}")
    return HEADER.format(python=python) + "".join(f"{line}\n" for line in sorted(pinned))


if __name__ == "__main__":
    sys.stdout.write(lock(json.load(sys.stdin), sys.argv[1]))
