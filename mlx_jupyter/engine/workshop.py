"""What the engine thread works with: the models, one prefix cache for each, what is published.

All methods but those that say so run on the engine thread. ``published`` is
replaced whole, never changed, so that any thread may read it.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

from mlx_jupyter.cache import lending
from mlx_jupyter.cache.prefix_cache import PrefixCache
from mlx_jupyter.cache.preview import Preview, preview
from mlx_jupyter.cache.trace import TraceWriter
from mlx_jupyter.cache.view import TreeView
from mlx_jupyter.engine.budgets import Budgets
from mlx_jupyter.engine.explaining import Explaining
from mlx_jupyter.engine.filters import DEFAULT, Filters
from mlx_jupyter.engine.pressure import Measured, Pressure
from mlx_jupyter.engine.publishing import Published, Publisher
from mlx_jupyter.engine.storage import Storage, store_place
from mlx_jupyter.engine.trails import Trails
from mlx_jupyter.engine.verify import Verification, sample, verify
from mlx_jupyter.errors import BadRequest, ModelNotFound
from mlx_jupyter.models import allocator, memory
from mlx_jupyter.models.mlx_limits import set_limits, trim_buffers
from mlx_jupyter.models.pool import LoadedModel, ModelPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from mlx_jupyter.engine.history import History
    from mlx_jupyter.engine.status import MemoryUse
    from mlx_jupyter.models.adapters import Adapter
    from mlx_jupyter.models.info import ModelInfo

log = logging.getLogger(__name__)

SAVING = 2.0
"""Seconds that a model's end may take to save what isn't on disk yet; a kernel that takes longer to
shut down than 5 s is killed."""


class Workshop(Explaining):
    """See the module; arguments as ``Engine``'s.

    Attributes:
        storage: what outlives memory. A model without an identity never goes there.
        memory_limit: the user's bound on what may be taken, in bytes.
        context: the user's bound on the context, in tokens (``engine/context.py``).
        filters: what is left out of prompts (``engine/filters.py``).
    """

    def __init__(
        self,
        *,
        cache_bytes: int | None,
        memory_limit: int | None,
        context: int | None,
        filters: Sequence[str] = DEFAULT,
        clock: Callable[[], float],
        trace: str | PathLike[str] | None = None,
        exact: bool = False,
        store: bool | str | PathLike[str] | None = None,
        store_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.storage = Storage(store_place(store), store_bytes)
        self.exact = exact
        self.clock = clock
        self.trace = TraceWriter(trace) if trace is not None else None
        self.trails = Trails()
        self._publisher = Publisher(clock, memory_limit)
        self._budgets = Budgets(cache_bytes, memory_limit)
        self._measured: dict[str, Measured] = {}
        self.memory_limit = memory_limit
        self.context = context
        self.filters = Filters(filters)
        self._limited = False
        self._caches: dict[str, PrefixCache] = {}
        self._identities: dict[str, str] = {}
        self._pool = ModelPool(memory_limit=memory_limit)
        self._pool.on_unload = lambda loaded: self._forget(loaded.info.name)
        self._pool.held = self._held
        self._pool.shrink = self._give_up

    def _limits(self) -> None:
        """Set MLX's limits once, before the first allocation of ours."""
        if not self._limited:
            self._limited = True
            set_limits(self.memory_limit)

    def adopt(self, model: Any, tokenizer: Any | None) -> ModelInfo:
        """Use a model and tokenizer that the user built."""
        self._limits()
        loaded = self._pool.adopt(model, tokenizer)
        self._ready(loaded)
        return loaded.info

    def load(
        self,
        name: str,
        progress: Callable[[str, int, int], None],
        cancelled: Callable[[], bool],
        adapter: Adapter | None = None,
        *,
        current: bool = True,
    ) -> LoadedModel:
        """The model of that name, loaded now if it isn't; arguments as ``ModelPool.load``'s."""
        self._limits()
        try:
            loaded = self._pool.load(
                name, progress=progress, cancelled=cancelled, adapter=adapter, current=current
            )
        except BaseException:
            self._settle()  # some may have gone for it
            self.publish()
            raise
        self._ready(loaded)
        return loaded

    @property
    def wanted(self) -> str | None:
        """The name of the current model while that is away for another one."""
        return self._pool.wanted

    def used(self, loaded: LoadedModel) -> None:
        """A request goes to this model."""
        self._pool.touch(loaded)

    def find(self, name: str | None, adapter: Adapter | None = None) -> LoadedModel | None:
        """A loaded model by short name or source; the current one when None. From any thread."""
        return self._pool.find(name, adapter)

    def find_alike(self, identity: str) -> LoadedModel | None:
        """A loaded model of that identity."""
        found = (self._pool.find(info.name) for info in self._pool.infos())
        return next(
            (each for each in found if each is not None and each.identity == identity), None
        )

    def known(self) -> dict[str, str]:
        """The identity of each model that was loaded so far and has one, by short name."""
        return dict(self._identities)

    def cache_of(self, loaded: LoadedModel) -> PrefixCache:
        """The prefix cache of a loaded model, in the mode that is asked for now."""
        cache = self._caches[loaded.info.name]
        cache.exact = self.exact
        return cache

    def verify(
        self, name: str | None, seed: int | None, cancelled: Callable[[], bool]
    ) -> Verification:
        """Replay one stored sequence of a model, drawn at random, cold."""
        loaded = self.find(name)
        if loaded is None:
            raise BadRequest(f"{name or 'No model'} is not loaded, so there is nothing to verify.")
        cache = self.cache_of(loaded)
        ids = sample(cache, random.Random(seed))  # noqa: S311
        if ids is None:
            raise BadRequest("Nothing that a prompt could use is cached yet: ask something first.")
        try:
            return verify(cache, loaded.model, ids, loaded.info.prefill_chunk, cancelled)
        finally:
            self.publish(loaded)

    def _forget(self, name: str) -> None:
        """A model is going: its cache must hold nothing when its memory is measured."""
        self.memory.unload(name)
        self._budgets.release(name)
        self._measured.pop(name, None)
        cache = self._caches.pop(name, None)
        if cache is not None:
            deadline = self.clock() + SAVING
            cache.tiers.save_all(lambda: self.clock() > deadline)
            cache.clear()

    def _ready(self, loaded: LoadedModel) -> None:
        if loaded.identity is not None:
            self._identities[loaded.info.name] = loaded.identity
        if loaded.info.name not in self._caches:
            from mlx_lm.models.cache import make_prompt_cache

            self._caches[loaded.info.name] = PrefixCache(
                lambda: make_prompt_cache(loaded.model),
                budget=0,  # set just below
                name=loaded.info.name,
                clock=self.clock,
                shelf=self.storage.shelf(loaded),
                host_budget=memory.default_host_bytes(),
            )
            self._settle()
            self.publish()
        else:
            self.publish(loaded)

    def _settle(self) -> None:
        """Divide the memory for caches among the models that are loaded now."""
        chunk = max((loaded.chunk_bytes for loaded in self._pool.models()), default=0)
        self._budgets.settle(self._caches, chunk)

    def pressure(self, loaded: LoadedModel, total: int) -> Pressure:
        """Watches the memory of a request to a model, of so many prompt tokens."""
        own = self.cache_of(loaded)
        known = self._measured.setdefault(
            loaded.info.name, Measured(loaded.chunk_bytes, loaded.info.prefill_chunk)
        )
        return Pressure(
            own,
            limit=self.memory_limit,
            measured=known,
            relieve=lambda nbytes: self._give_up(nbytes, but=own),
            total=total,
        )

    def _held(self, loaded: LoadedModel) -> int:
        cache = self._caches.get(loaded.info.name)
        return cache.nbytes() if cache is not None else 0

    def _give_up(self, nbytes: int, but: PrefixCache | None = None) -> None:
        """Have the caches give up bytes, the largest first; ``but`` one that is at work."""
        freed = 0
        resting = [cache for cache in self._caches.values() if cache is not but]
        for cache in sorted(resting, key=lambda c: -c.nbytes()):
            if freed < nbytes:
                freed += cache.evict(nbytes - freed)
        allocator.trim()

    def unload(self, name: str | None) -> list[str]:
        """Unload a model, or all when None, and its cache; the names that went."""
        gone = self._pool.unload(name)
        allocator.trim()
        if not gone and name is not None:
            loaded = ", ".join(info.name for info in self._pool.infos()) or "none"
            raise ModelNotFound(name, [f"loaded: {loaded}"])
        self._settle()
        self.publish()
        return gone

    @property
    def published(self) -> Published:
        """What was published last. From any thread."""
        return self._publisher.published

    @property
    def history(self) -> History:
        """Memory over time. From any thread."""
        return self._publisher.history

    def publish(
        self,
        changed: LoadedModel | None = None,
        *,
        ended: bool = False,
        compute: int | None = None,
    ) -> None:
        """Publish the models, and anew the cache of the model that changed."""
        self._publisher.publish(
            self._pool.models(), self._caches, changed, ended=ended, compute=compute
        )

    def publish_watched(self, changed: LoadedModel) -> None:
        """Publish in the middle of a request, if anybody looks: what it reads in has moved."""
        if self._publisher.watched:
            self.publish(changed)

    def memory_use(self, measured: memory.Memory) -> MemoryUse:
        """Bytes in use, as last published and as measured just now. From any thread."""
        return self._publisher.memory_use(measured)

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call ``told`` after each publishing until the function returned is. From any thread."""
        return self._publisher.watch(told)

    def tree(self, name: str) -> TreeView:
        """The prefix cache of a model as last published, or an empty one. From any thread."""
        return self.published.trees.get(name) or TreeView(model=name)

    def release(self, owner: str) -> None:
        """Let go of an owner in every cache."""
        self.memory.release(owner)
        for cache in self._caches.values():
            cache.release(owner)
            cache.unpin(owner)
            lending.end(cache, owner)
        self.publish()

    def pin(self, name: str) -> int:
        """Keep the path of a cell or branch, or a model; bytes that this holds."""
        for cache in self._caches.values():
            if cache.owns(name):
                pinned = cache.pin(name)
                self.publish()
                return pinned
        loaded = self._pool.pin(name)
        if loaded is None:
            raise BadRequest(
                f"No model {name!r} is loaded and nothing is cached for it, "
                "so there is nothing to pin."
            )
        self.publish(loaded)
        return loaded.info.weight_bytes

    def unpin(self, name: str) -> None:
        """Let retention judge the path of a cell or branch again, or a model be sent away."""
        if not any(cache.unpin(name) for cache in list(self._caches.values())):
            loaded = self.find(name)
            if loaded is None or not loaded.pinned:
                raise BadRequest(f"{name!r} is not pinned.")
            self._pool.pin(name, on=False)
        self.publish()

    def evict(self, nbytes: int | None) -> int:
        """Give up bytes, from the largest cache first."""
        freed = 0
        caches = sorted(self._caches.values(), key=lambda c: -c.nbytes())
        for cache in caches:
            if nbytes is None or freed < nbytes:
                freed += cache.evict(None if nbytes is None else nbytes - freed)
        allocator.trim()
        self.publish()
        return freed

    def preview(self, nbytes: int, name: str | None) -> Preview:
        """What a budget of one model's cache would do."""
        loaded = self.find(name)
        if loaded is None:
            return Preview(nbytes)
        return preview(self.cache_of(loaded), nbytes)

    def set_budget(self, nbytes: int, name: str | None) -> int:
        """Give one model's cache another budget; bytes freed."""
        loaded = self.find(name)
        if loaded is None:
            raise BadRequest(f"{name or 'No model'} is not loaded, so it has no cache yet.")
        cache = self.cache_of(loaded)
        before = cache.nbytes()
        self._budgets.fix(loaded.info.name, nbytes)
        self._settle()
        cache.fit_live()
        cache.enforce()
        allocator.trim()
        self.publish()
        return before - cache.nbytes()

    def clear(self) -> None:
        """Forget all cached tokens."""
        self.memory.clear()
        for cache in self._caches.values():
            cache.clear()
        allocator.trim()
        self.publish()

    def settle_store(self, timeout: float) -> bool:
        """Save what isn't on disk yet; whether all was within so many seconds."""
        deadline = self.clock() + timeout
        for cache in self._caches.values():
            cache.tiers.save_all(lambda: self.clock() > deadline)
        settled = self.storage.flush(max(deadline - self.clock(), 0))
        for cache in self._caches.values():
            cache.tiers.note()
        self.publish()
        return settled

    def clear_store(self) -> int:
        """Remove what is on disk; bytes freed. What is in memory stays."""
        removed = self.storage.clear()
        for cache in self._caches.values():
            cache.tiers.lost()
        self.publish()
        return removed.nbytes if removed is not None else 0

    def check(self) -> None:
        """Raise when an invariant is broken."""
        for cache in self._caches.values():
            cache.check()

    def idle(self) -> bool:
        """Do a small piece of work that nobody waits for; whether there is more."""
        if any(cache.tiers.save_next() for cache in self._caches.values()):
            return True
        trim_buffers()
        return False

    def abandon(self) -> None:
        """At the end: let go of every array and file."""
        if self.trace is not None:
            self.trace.close()
        self._pool.unload()
        self.storage.close(SAVING)
        self.memory.clear()
        self._publisher.end()
        allocator.trim()
