"""What other threads may read of the engine: replaced whole after each change, never changed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mlx_jupyter.engine.history import History
from mlx_jupyter.engine.holdings import Holding, holding
from mlx_jupyter.engine.status import MemoryUse
from mlx_jupyter.models import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlx_jupyter.cache.prefix_cache import PrefixCache
    from mlx_jupyter.cache.view import TreeView
    from mlx_jupyter.models.info import ModelInfo
    from mlx_jupyter.models.pool import LoadedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """What other threads may read.

    Attributes:
        models: the current one first.
        trees: the prefix cache of each model, by short name.
        requests: how many requests have ended.
        holdings: what each model holds, in the order of ``models``.
        compute: bytes that the last request's activations took at their peak.
    """

    models: tuple[ModelInfo, ...] = ()
    trees: dict[str, TreeView] = field(default_factory=dict)
    requests: int = 0
    holdings: tuple[Holding, ...] = ()
    compute: int = 0


class Publisher:
    """See the module. ``publish`` is called on the engine thread, everything else from any.

    Args:
        clock: monotonic seconds.
        limit: the user's bound on MLX's arrays in bytes, or None.
    """

    def __init__(self, clock: Callable[[], float], limit: int | None = None) -> None:
        self._limit = limit
        self.published = Published()
        self.history = History(clock)
        self._clock = clock
        self._watchers: dict[object, Callable[[], None]] = {}
        self._used: dict[str, tuple[int, float]] = {}

    def publish(
        self,
        models: Sequence[LoadedModel],
        caches: Mapping[str, PrefixCache],
        changed: LoadedModel | None,
        *,
        ended: bool,
        compute: int | None,
    ) -> None:
        """Publish the models, and anew the cache of the one that changed (all when None).

        Args:
            models: the loaded ones, the current one last.
            caches: theirs, by short name.
            changed: whose cache changed.
            ended: a request has ended.
            compute: bytes that its activations took at their peak.
        """
        before = {each.name: each for each in self.published.holdings}
        trees = {n: t for n, t in self.published.trees.items() if n in caches}
        holdings = []
        for loaded in reversed(models):
            name = loaded.info.name
            if name not in caches:
                continue
            used_at = self._used_at(loaded)
            anew = name not in trees or changed is None or changed is loaded
            if anew:
                trees[name] = caches[name].view()
            if anew or name not in before:
                holdings.append(holding(loaded, caches[name], trees[name], used_at))
            else:
                holdings.append(
                    replace(
                        before[name],
                        pinned=loaded.pinned,
                        may_go=loaded.may_go,
                        used=loaded.used,
                        used_at=used_at,
                    )
                )
        self.published = Published(
            models=tuple(loaded.info for loaded in reversed(models)),
            trees=trees,
            requests=self.published.requests + ended,
            holdings=tuple(holdings),
            compute=self.published.compute if compute is None else compute,
        )
        self._tell()

    def _tell(self) -> None:
        try:
            self.history.add(self.memory_use(memory.measured()))
            for told in list(self._watchers.values()):
                told()
        except Exception:  # no request fails because somebody looks on
            log.warning("a change couldn't be told", exc_info=True)

    def _used_at(self, loaded: LoadedModel) -> float:
        """When a model was used last, as far as it was looked at since."""
        seen = self._used.get(loaded.info.name)
        if seen is None or seen[0] != loaded.used:
            seen = self._used[loaded.info.name] = loaded.used, self._clock()
        return seen[1]

    def end(self) -> None:
        """Nothing is loaded any more."""
        self.published = Published(requests=self.published.requests)

    def memory_use(self, measured: memory.Memory) -> MemoryUse:
        """Bytes in use, as last published and as measured just now."""
        published = self.published
        trees, holdings = published.trees.values(), published.holdings
        return MemoryUse(
            weights=sum(m.weight_bytes for m in published.models),
            live=sum(t.live_bytes for t in trees),
            stored=sum(t.stored_bytes for t in trees),
            host=sum(t.host_bytes for t in trees),
            budget=sum(t.budget for t in trees),
            active=measured.active,
            cache=measured.cache,
            peak=measured.peak,
            limit=min(measured.limit, self._limit or measured.limit),
            snapshots=sum(each.snapshots for each in holdings),
            on_disk=sum(each.on_disk for each in holdings),
            compute=published.compute,
            free=measured.free,
            resident=measured.resident,
            system_limit=measured.system_limit,
            system_free=measured.system_free,
            device_limit=measured.device_limit,
            device_free=measured.device_free,
        )

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call ``told`` after each publishing until the function returned is."""
        key = object()
        self._watchers[key] = told

        def stop() -> None:
            self._watchers.pop(key, None)

        return stop

    @property
    def watched(self) -> bool:
        """Whether anybody looks on."""
        return bool(self._watchers)
