"""What is really in use and what is really free, in bytes.

Everything here is measured when asked; nothing is an estimate kept from a load.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESERVE = 0.05
"""Share of the memory that is left to everybody else."""

CACHE_SHARE = 0.4
"""Share of what is free after the weights that prefix caches may take by default."""

HOST_SHARE = 0.25
"""Share of the host's free memory that may take what leaves a device with memory of its own."""

LEAST_CACHE = 64 << 20
"""The default cache budget never falls below this: a small conversation must fit."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A measurement.

    Attributes:
        active: bytes in MLX's live arrays.
        peak: their maximum since the last reset.
        cache: bytes that MLX keeps for reuse.
        limit: bytes that this process may use: the smallest of the machine's, the container's
            and the device's.
        free: bytes that it could still take.
        device: what computes, such as ``"cpu (AMD EPYC)"``.
        resident: bytes of this process in the host's memory, Python and its libraries included.
        system_limit: bytes of the host's memory, the container's where that is less.
        system_free: bytes of it that nobody uses.
        device_limit: bytes that the GPU may hold; None on the CPU backend.
        device_free: bytes of it that nobody uses.
    """

    active: int
    peak: int
    cache: int
    limit: int
    free: int
    device: str
    resident: int = 0
    system_limit: int = 0
    system_free: int = 0
    device_limit: int | None = None
    device_free: int | None = None


def measured() -> Memory:
    """Measure now."""
    import mlx.core as mx
    import psutil

    active, cache = mx.get_active_memory(), mx.get_cache_memory()
    system = psutil.virtual_memory()
    system_limit, system_free = int(system.total), int(system.available)
    group = cgroup()
    if group is not None:
        system_limit, system_free = min(system_limit, group[0]), min(system_free, group[1])
    device = device_bytes(active + cache)
    if device is None:
        limit, free = system_limit, system_free
    elif discrete():
        limit, free = device
    else:  # one memory for both: the device may have a part of it
        limit, free = min(system_limit, device[0]), min(system_free, device[1])
    return Memory(
        active,
        mx.get_peak_memory(),
        cache,
        limit,
        max(0, free + cache),
        device_name(),
        resident=int(psutil.Process().memory_info().rss),
        system_limit=system_limit,
        system_free=system_free,
        device_limit=None if device is None else device[0],
        device_free=None if device is None else device[1],
    )


def free_within(bound: int | None, *, margin: float = RESERVE) -> int:
    """Bytes that may be taken now: the smaller of the user's bound and what is really free.

    Args:
        bound: what MLX's arrays may take together, in bytes; None: only the machine counts.
        margin: share of the machine's memory that is left to everybody else.
    """
    now = measured()
    free = max(0, now.free - int(now.limit * margin))
    return free if bound is None else min(free, max(0, bound - now.active))


def discrete() -> bool:
    """Whether MLX computes on a device with memory of its own."""
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available()


def device_name() -> str:
    """What MLX computes on."""
    import mlx.core as mx

    device = mx.default_device()
    name = str(mx.device_info(device).get("device_name", "")).strip()
    kind = "gpu" if device.type == mx.DeviceType.gpu else "cpu"
    return f"{kind} ({name})" if name else kind


def device_bytes(taken: int) -> tuple[int, int] | None:
    """What the GPU may hold and what of it is free; None on the CPU backend.

    Args:
        taken: bytes that MLX has of it, for drivers that don't say what is free.
    """
    import mlx.core as mx

    if not mx.is_available(mx.gpu):
        return None
    info: dict[str, Any] = dict(mx.device_info(mx.gpu))
    for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if isinstance(limit := info.get(key), int):
            free = info.get("free_memory")  # CUDA's; of all processes
            return limit, free if isinstance(free, int) else max(0, limit - taken)
    return None


def cgroup(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """The container's (limit, free) bytes; None where there is no limit.

    Args:
        root: where the control groups are mounted, version 2 or 1.
    """
    for limit_file, used_file, stat_file, reclaimable in (
        (root / "memory.max", root / "memory.current", root / "memory.stat", "inactive_file"),
        (
            root / "memory/memory.limit_in_bytes",
            root / "memory/memory.usage_in_bytes",
            root / "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        with contextlib.suppress(OSError, ValueError):
            limit = int(limit_file.read_text())  # "max" is no number: no limit
            if limit >= 1 << 60:  # version 1's way to say "no limit"
                continue
            used = int(used_file.read_text())
            for line in stat_file.read_text().splitlines():
                if line.startswith(reclaimable + " "):
                    used -= int(line.split()[1])
            return limit, max(0, limit - used)
    return None


def weights_bytes(model: Any) -> int:
    """Bytes of the buffers behind a model's parameters; shared buffers count once."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    leaves: Any = tree_flatten(model.parameters())
    arrays = {id(array): array for _, array in leaves}
    return int(mx.get_array_buffer_size(list(arrays.values()))) if arrays else 0


def default_host_bytes() -> int:
    """What prefix caches may take of the host's memory; 0 where the device's is the same."""
    return int(measured().system_free * HOST_SHARE) if discrete() else 0
