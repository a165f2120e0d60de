"""What is really in use and what is really free, in bytes.

Everything here is measured when asked; nothing is an estimate kept from a load.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_jupyter.models import allocator

RESERVE = 0.05
"""Share of the memory that is left to everybody else."""

CACHE_SHARE = 0.4
"""Share of what is free after the weights that prefix caches may take by default."""

LEAST_BUFFERS, MOST_BUFFERS = 64 << 20, 2 << 30
"""Bounds of MLX's cache of freed buffers, which takes a sixteenth of the memory."""

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
    """

    active: int
    peak: int
    cache: int
    limit: int
    free: int
    device: str


def measured() -> Memory:
    """Measure now."""
    import mlx.core as mx
    import psutil

    active, cache = mx.get_active_memory(), mx.get_cache_memory()
    system = psutil.virtual_memory()
    limits, free = [system.total], [system.available + cache]
    group = cgroup()
    if group is not None:
        limits.append(group[0])
        free.append(group[1] + cache)
    device = device_bytes()
    if device is not None:
        limits.append(device)
        free.append(device - active)
    limit = min(limits)
    return Memory(active, mx.get_peak_memory(), cache, limit, max(0, min(free)), device_name())


def set_limits(limit: int | None) -> None:
    """Bound what MLX takes; call it once, before the first model is loaded.

    MLX's own cache of freed buffers may by default grow up to the memory limit, which prefix
    caches would then never see as free, so it gets a bound of its own.

    Args:
        limit: the user's bound in bytes; the machine's when None.
    """
    import mlx.core as mx

    total = measured().limit
    bound = total if limit is None else min(limit, total)
    if mx.default_device().type == mx.DeviceType.cpu:
        allocator.keep_freed()
    mx.set_memory_limit(bound)
    mx.set_cache_limit(max(LEAST_BUFFERS, min(bound // 16, MOST_BUFFERS)))
    if mx.metal.is_available():
        wired = mx.device_info().get("max_recommended_working_set_size")
        if isinstance(wired, int):
            mx.set_wired_limit(min(bound, wired))


def device_name() -> str:
    """What MLX computes on."""
    import mlx.core as mx

    device = mx.default_device()
    name = str(mx.device_info(device).get("device_name", "")).strip()
    kind = "gpu" if device.type == mx.DeviceType.gpu else "cpu"
    return f"{kind} ({name})" if name else kind


def device_bytes() -> int | None:
    """Bytes that the GPU may hold; None on the CPU backend, where the system's are the bound."""
    import mlx.core as mx

    if not mx.is_available(mx.gpu):
        return None
    info: dict[str, Any] = dict(mx.device_info(mx.gpu))
    for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if isinstance(info.get(key), int):
            return int(info[key])
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


def admissible() -> int:
    """Bytes that a new model may take now: what is free, less the reserve."""
    now = measured()
    return max(0, now.free - int(now.limit * RESERVE))


def default_host_bytes() -> int:
    """What prefix caches may take of the host's memory; 0 where the device's is the same."""
    import mlx.core as mx
    import psutil

    if not mx.is_available(mx.gpu) or mx.metal.is_available():
        return 0
    free = [int(psutil.virtual_memory().available)]
    group = cgroup()
    if group is not None:
        free.append(group[1])
    return int(min(free) * HOST_SHARE)


def default_cache_bytes() -> int:
    """A budget for prefix caches that fits this machine; ask after the weights are loaded."""
    return max(LEAST_CACHE, int(admissible() * CACHE_SHARE))
