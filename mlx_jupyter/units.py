"""Quantities as people read them, the same everywhere."""

from __future__ import annotations


def human_bytes(number: float) -> str:
    """Bytes in decimal units, three significant digits: ``0 B``, ``14.2 MB``, ``2.05 GB``."""
    if number < 1000:
        return f"{number:.0f} B"
    value = float(number)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5 or unit == "TB":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"
