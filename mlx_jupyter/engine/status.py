"""What the engine says of itself: plain data, as last published, never waiting for a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlx_jupyter.engine.storage import StoreUse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_jupyter.blas import BlasStatus
    from mlx_jupyter.engine.holdings import Holding
    from mlx_jupyter.models.info import ModelInfo
    from mlx_jupyter.models.limits import Limit


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use, by what uses them.

    Attributes:
        weights: of all loaded models.
        live: buffers of the live caches, spare rows included.
        stored: pages and snapshots outside them.
        host: those in the host's memory, where that isn't the device's.
        budget: what live and stored may take together.
        active: all that MLX has allocated now.
        cache: MLX's cache of free buffers.
        peak: MLX's peak since the last request began.
        limit: what this process may use: the smallest of machine, container and device.
        snapshots: those of ``stored`` that are states at marks.
        on_disk: tokens whose rows only a file has.
        compute: what the last request's activations took at their peak, beside all it kept.
        free: what could be taken now.
        resident: of the process in the host's memory, Python and libraries included.
        system_limit: the host's memory, the container's where that is less.
        system_free: what nobody uses of it.
        device_limit: the GPU's memory; None on the CPU backend.
        device_free: what nobody uses of it.
    """

    weights: int = 0
    live: int = 0
    stored: int = 0
    host: int = 0
    budget: int = 0
    active: int = 0
    cache: int = 0
    peak: int = 0
    limit: int = 0
    snapshots: int = 0
    on_disk: int = 0
    compute: int = 0
    free: int = 0
    resident: int = 0
    system_limit: int = 0
    system_free: int = 0
    device_limit: int | None = None
    device_free: int | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """The engine at one moment.

    Attributes:
        models: loaded ones, the current one first.
        memory: bytes in use.
        context: tokens that fit, for the current model; 0 without one.
        context_origin: where that limit comes from.
        limits: all that bound it, the smallest first.
        contexts: the limit in force of each loaded model, by short name.
        blas: which BLAS computes on the CPU.
        device: MLX's default device.
        store: what is kept on disk.
        requests: how many requests have ended.
        waiting: requests that are queued or running.
        closed: the engine has ended.
        holdings: what each loaded model holds, in the order of ``models``.
        now: when this was made, by the clock that tells when a model was used.
    """

    models: tuple[ModelInfo, ...]
    memory: MemoryUse
    context: int
    context_origin: str
    blas: BlasStatus
    device: str
    store: StoreUse = field(default_factory=StoreUse)
    requests: int = 0
    waiting: int = 0
    closed: bool = False
    limits: tuple[Limit, ...] = ()
    contexts: Mapping[str, Limit] = field(default_factory=dict)
    holdings: tuple[Holding, ...] = ()
    now: float = 0.0

    @property
    def next_out(self) -> Holding | None:
        """The model that would be sent away first for another one; None: none may go."""
        idle = [each for each in self.holdings if each.may_go]
        return min(idle, key=lambda each: each.used, default=None)
