"""What uses memory, for ``%llm status`` and ``%llm ps``: all of it measured, estimates say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_jupyter.notebook.reports import Report
from mlx_jupyter.units import human_bytes

if TYPE_CHECKING:
    from mlx_jupyter.engine.holdings import Holding
    from mlx_jupyter.engine.status import Status


def memory_rows(now: Status) -> list[tuple[str, str]]:
    """Memory in use and what bounds it, as name and value pairs."""
    memory = now.memory
    stored = memory.stored - memory.snapshots
    parts = [f"{human_bytes(memory.live)} live", f"{human_bytes(stored)} pages"]
    if memory.snapshots:
        parts.append(f"{human_bytes(memory.snapshots)} snapshots")
    if memory.host:
        parts.append(f"{human_bytes(memory.host)} in the host's memory")
    if memory.on_disk:
        parts.append(f"{memory.on_disk:,} tokens on disk only")
    rows = [
        ("weights", human_bytes(memory.weights)),
        (
            "prefix cache",
            f"{human_bytes(memory.live + memory.stored)} of {human_bytes(memory.budget)}: "
            + ", ".join(parts),
        ),
        (
            "MLX memory",
            f"{human_bytes(memory.active)} in use, {human_bytes(memory.cache)} free buffers, "
            f"peak {human_bytes(memory.peak)}"
            + (f", limit {human_bytes(memory.limit)}" if memory.limit else ""),
        ),
        ("last request", f"{human_bytes(memory.compute)} for activations at the peak"),
    ]
    if memory.system_limit:
        system = (
            f"{human_bytes(memory.system_free)} of {human_bytes(memory.system_limit)} free, "
            f"this process holds {human_bytes(memory.resident)}"
        )
        rows.append(("system", system))
    if memory.device_limit is not None and memory.device_free is not None:
        gpu = f"{human_bytes(memory.device_free)} of {human_bytes(memory.device_limit)} free"
        rows.append(("GPU", gpu))
    return rows


def ps(now: Status) -> Report:
    """``%llm ps``."""
    if not now.holdings:
        return Report(title="No model is loaded.", data=now)
    first = now.next_out
    names = [info.name for info in now.models[:1]]
    rows = tuple(_row(now, each, current=each.name in names) for each in now.holdings)
    notes = [
        f"Next to go for another model: {first.name}, used longest ago."
        if first is not None
        else "No model may be sent away for another one."
    ]
    notes += [f"Next to go from the cache of {e.name}: {e.next}." for e in now.holdings if e.next]
    notes += [f"{name[0].upper()}{name[1:]}: {value}." for name, value in memory_rows(now)[2:]]
    return Report(
        head=("model", "weights", "cache", "context", "last used", "may go"),
        rows=rows,
        note="\n".join(notes),
        data=now,
    )


def _row(now: Status, each: Holding, *, current: bool) -> tuple[str, ...]:
    context = now.contexts.get(each.name)
    return (
        f"{each.name}{' (current)' if current else ''}",
        human_bytes(each.weights),
        f"{human_bytes(each.cached)} of {human_bytes(each.budget)}",
        f"{context.tokens:,} tokens, {context.origin}" if context is not None else "",
        _ago(now.now - each.used_at),
        "pinned" if each.pinned else "yes" if each.may_go else "no: given as an object",
    )


def _ago(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
