"""The models that are loaded, and the one way in for all of them.

Used on the engine thread only: what it loads belongs to that thread. A model is admitted when what
it needs (``admission.py``) fits into what is free; ``eviction.py`` makes room. A model that was
sent away for another comes back when it is asked for. A load that fails leaves nothing behind.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_jupyter import blas
from mlx_jupyter.errors import Interrupted, ModelDoesNotFit
from mlx_jupyter.models import adapters, eviction, limits, memory, precision, sources, tensors
from mlx_jupyter.models.admission import Need
from mlx_jupyter.models.identity import Witness
from mlx_jupyter.models.info import ModelInfo
from mlx_jupyter.models.lazy import evaluate
from mlx_jupyter.models.lint import lint
from mlx_jupyter.models.mlx_limits import trim_buffers
from mlx_jupyter.models.reading import cache_layers, import_mlx_lm, read, warm_up, wrapped
from mlx_jupyter.models.shortage import is_shortage

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_jupyter.models.adapters import Adapter

log = logging.getLogger(__name__)

GIVEN = "(given)"
"""The source of a model that the user handed over as an object."""


@dataclass(slots=True)
class LoadedModel:
    """A model that can run.

    Attributes:
        info: what is known of it, as plain data.
        model: mlx-lm's model, an ``mlx.nn.Module``.
        tokenizer: mlx-lm's ``TokenizerWrapper``; None when only token prompts can be served.
        defaults: the model's own defaults, by the option names of ``engine.request.Options``.
        aliases: other names it answers to.
        vocabulary: token ids below this are valid; 0 when that isn't known.
        identity: what its stored pages depend on (``models/identity.py``); None: it has none, and
            nothing of it may be kept on disk.
        adapter: what was put on top of its own weights.
        files: where it was read from, without its adapter; None for an object of the user's.
        bases: the names that the model answers to without its adapter.
        row_bytes: what a token takes in the caches of all full layers; 0 until that is seen.
        chunk_bytes: what a prefill chunk takes by its config; 0 when that isn't known.
        pinned: it is never sent away for another.
        used: grows with each use of any model: the smallest was used longest ago.

    Once it is unloaded, ``model`` and ``tokenizer`` are None for whoever still holds it.
    """

    info: ModelInfo
    model: Any
    tokenizer: Any
    defaults: dict[str, Any] = field(default_factory=dict)
    aliases: frozenset[str] = frozenset()
    vocabulary: int = 0
    identity: str | None = None
    row_bytes: int = 0
    adapter: Adapter | None = None
    files: sources.Source | None = None
    bases: frozenset[str] = frozenset()
    chunk_bytes: int = 0
    pinned: bool = False
    used: int = 0

    @property
    def may_go(self) -> bool:
        """Whether it may be sent away for another: it can come back."""
        return not self.pinned and self.files is not None

    @property
    def gone(self) -> bool:
        """Whether it was unloaded; looked at after ``tokenizer``, it tells why that is None."""
        return self.model is None


class ModelPool:
    """The loaded models; the last of ``_models`` is the current one.

    Other threads may look (``find``, ``current``, ``infos``): the list is replaced, never changed.

    Args:
        context: the user's bound on the context length, in tokens.

    Attributes:
        on_unload: called with each model that is about to go, so that whoever holds caches of it
            lets them go too.
        held: bytes that a model's cache holds and could give up.
        shrink: has the caches give up at least so many bytes, if they can.
        memory_limit: the user's bound on what may be taken, in bytes.
    """

    def __init__(self, *, context: int | None = None, memory_limit: int | None = None) -> None:
        self.context = context
        self.memory_limit = memory_limit
        self.on_unload: Callable[[LoadedModel], None] = _nothing
        self.held: Callable[[LoadedModel], int] = lambda _: 0
        self.shrink: Callable[[int], None] = lambda _: None
        self._models: list[LoadedModel] = []
        self._uses = itertools.count(1)
        self._away: dict[str, LoadedModel] = {}
        self._wanted: str | None = None

    # --- looking -----------------------------------------------------------------------------

    @property
    def current(self) -> LoadedModel | None:
        """The model that requests without a model's name go to; None while that is away."""
        return self._models[-1] if self._models and self._wanted is None else None

    @property
    def wanted(self) -> str | None:
        """The name of the current model that was sent away, and has to come back."""
        return self._wanted

    def models(self) -> tuple[LoadedModel, ...]:
        """The loaded models, the current one last."""
        return tuple(self._models)

    def infos(self) -> tuple[ModelInfo, ...]:
        """The loaded models, the current one last."""
        return tuple(loaded.info for loaded in self._models)

    def find(self, name: str | None, adapter: Adapter | None = None) -> LoadedModel | None:
        """The loaded model with this short name or source; the current one for None.

        With ``adapter`` it is that model with the adapter on top, and ``name`` is the model's own.
        """
        if adapter is not None:
            base = self.find(name)
            names = base.bases if base is not None else {name}
            same = (m for m in reversed(self._models) if m.adapter == adapter)
            return next((m for m in same if not m.bases.isdisjoint(names)), None)
        if name is None:
            return self.current
        for loaded in reversed(self._models):
            if name in (loaded.info.name, loaded.info.source) or name in loaded.aliases:
                return loaded
        return None

    def use(self, loaded: LoadedModel) -> None:
        """Make a loaded model the current one."""
        # One assignment: other threads may be looking.
        self._models = [*(m for m in self._models if m is not loaded), loaded]
        self._wanted = None
        self.touch(loaded)

    def touch(self, loaded: LoadedModel) -> None:
        """Note that a model was used just now."""
        loaded.used = next(self._uses)

    def pin(self, name: str, *, on: bool = True) -> LoadedModel | None:
        """Keep a loaded model from being sent away, or no longer; None when there is none."""
        loaded = self.find(name)
        if loaded is not None:
            loaded.pinned = on
        return loaded

    # --- coming in ---------------------------------------------------------------------------

    def adopt(self, model: Any, tokenizer: Any = None, name: str = "model") -> LoadedModel:
        """Take over a model object and make it the current one.

        Args:
            model: an mlx-lm style model.
            tokenizer: a ``TokenizerWrapper``, a plain transformers tokenizer, or None.
            name: its short name; one that is taken is replaced.
        """
        import_mlx_lm()
        self._remove([m for m in self._models if m.info.name == name])
        evaluate(model)
        config = limits.config_of(model)
        loaded = self._admit(model, wrapped(tokenizer), config, name=name, source=GIVEN)
        self.use(loaded)
        return loaded

    def load(
        self,
        name: str,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        trust_remote_code: bool = False,
        adapter: Adapter | None = None,
        current: bool = True,
    ) -> LoadedModel:
        """Load a model, unless it is loaded, and make it the current one.

        Args:
            name: what ``sources.resolve`` takes, or the short name of a loaded model.
            progress: called with (what is being done, done, total) now and then.
            cancelled: looked at between steps.
            trust_remote_code: whether the model may bring code of its own.
            adapter: put on top of it; that makes it a model of its own.
            current: False: one that is current, or away and wanted, stays so.

        Raises:
            ModelNotFound: no such model.
            BadModel: its files are wrong.
            ModelDoesNotFit: not enough memory, even with idle models unloaded.
            Interrupted: ``cancelled`` answered True.
        """
        before = self.current
        loaded = self.find(name, adapter)
        if loaded is None:
            base = self.find(name) or self._away.get(name)
            source = base.files if base is not None else None
            if adapter is None and base is not None:
                adapter = base.adapter
            source = source or sources.resolve(
                name, progress=progress, cancelled=cancelled, trust_remote_code=trust_remote_code
            )
            loaded = self.find(str(source.path), adapter) or self._load(
                source, name, progress, cancelled, adapter
            )
        if current or (before is None and self._wanted is None):
            self.use(loaded)
        else:
            self.touch(loaded)
            if before in self._models:
                self._models = [*(m for m in self._models if m is not before), before]
        return loaded

    def _load(
        self,
        source: sources.Source,
        asked: str,
        progress: Callable[[str, int, int], None] | None,
        cancelled: Callable[[], bool],
        adapter: Adapter | None = None,
    ) -> LoadedModel:
        blas.ensure()
        import_mlx_lm()
        if cancelled():
            raise Interrupted
        where = precision.backend()
        bases = frozenset({asked, source.origin, source.name, str(source.path)})
        shown, place = source.name, str(source.path)
        if adapter is not None:
            taken = [(m.info.name, m.adapter.path if m.adapter else None) for m in self._models]
            shown, place = adapter.name_for(source.name, taken), f"{source.path} + {adapter.path}"
        need = _need(source, where, adapter)
        eviction.make_room(self, shown, need.total, progress)
        if progress is not None:
            progress(f"Loading {source.name}", 0, 0)
        witness = Witness(source.path, adapter.path if adapter is not None else None)
        try:
            model, tokenizer, config = read(source)
            if adapter is not None:
                adapters.apply(model, adapter)
            precision.settle(model, where)
            if cancelled():
                raise Interrupted
            row_bytes = warm_up(model)
        except BaseException as error:
            model = tokenizer = None
            traceback.clear_frames(error.__traceback__)  # their locals would keep its arrays
            _settle()
            if is_shortage(error):
                free = eviction.free_bytes(self)
                held = eviction.holders(self)
                raise ModelDoesNotFit(shown, need.total, free, held) from error
            raise
        identity = witness.identity(model, where)
        self._remove([m for m in self._models if m.info.name == shown])
        loaded = self._admit(model, tokenizer, config, name=shown, source=place)
        loaded.identity = identity
        loaded.row_bytes, loaded.chunk_bytes = row_bytes, need.chunk
        loaded.defaults = limits.defaults_of(source.path)
        loaded.aliases = bases if adapter is None else frozenset()
        loaded.files, loaded.bases, loaded.adapter = source, bases, adapter
        self._back(loaded)
        _settle()
        return loaded

    def _back(self, loaded: LoadedModel) -> None:
        """A model is here: nobody needs to remember how to bring it back."""
        for name in (loaded.info.name, loaded.info.source, *loaded.aliases):
            former = self._away.pop(name, None)
            if former is not None:
                loaded.pinned = former.pinned

    def _admit(
        self, model: Any, tokenizer: Any, config: dict[str, Any], *, name: str, source: str
    ) -> LoadedModel:
        from mlx_lm.utils import get_total_parameters

        parameters = int(get_total_parameters(model))
        context, origin = limits.context_of(config, tokenizer, self.context)
        info = ModelInfo(
            name=name,
            source=source,
            family=str(config.get("model_type", type(model).__name__)),
            parameters=parameters,
            weight_bytes=memory.weights_bytes(model),
            dtype=precision.describe(model),
            context=context,
            context_origin=origin,
            layers=cache_layers(model),
            prefill_chunk=precision.prefill_chunk(precision.backend(), parameters),
            template_faults=tuple(lint(tokenizer)) if tokenizer is not None else (),
        )
        loaded = LoadedModel(info, model, tokenizer, vocabulary=limits.vocabulary_of(config))
        self._models = [*self._models, loaded]
        return loaded

    # --- going out ---------------------------------------------------------------------------

    def unload(self, name: str | None = None) -> list[str]:
        """Unload a model, or all without a name; the names of those that went."""
        self._wanted = None
        if name is None:
            self._away.clear()
            return self._remove(list(self._models))
        loaded = self.find(name)
        return self._remove([loaded] if loaded is not None else [])

    def send_away(self, going: LoadedModel) -> None:
        """Unload a model that comes back when it is asked for."""
        if going is self.current:
            self._wanted = going.info.name
        for name in (going.info.name, going.info.source, *going.aliases):
            self._away[name] = going
        self._remove([going])

    def _remove(self, going: list[LoadedModel]) -> list[str]:
        names = []
        while going:
            loaded = going.pop()
            self._models = [m for m in self._models if m is not loaded]
            self.on_unload(loaded)
            names.append(loaded.info.name)
            # Whoever still holds the entry must not hold the weights.
            loaded.model = None
            loaded.tokenizer = None
            del loaded
        if names:
            _settle()
        return names


def _need(source: sources.Source, where: precision.Backend, adapter: Adapter | None) -> Need:
    """What a model needs, from its files."""
    entries = [*tensors.model_entries(source.path), *(adapter.entries if adapter else ())]
    config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    return Need.of(where, entries, config)


def _settle() -> None:
    """Have everything that nobody holds any more really gone."""
    gc.collect()
    trim_buffers()


def _nothing(loaded: LoadedModel) -> None:
    del loaded
