"""Adapters: small weights beside a model's own, as mlx-lm's LoRA training writes them.

A directory with ``adapter_config.json`` and ``adapters.safetensors``. It is checked before a model
is loaded for it. A model with an adapter is an entry of its own in the pool, with its own cache and
identity; training the adapter again makes it another one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_jupyter.errors import BadModel
from mlx_jupyter.models import tensors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

CONFIG = "adapter_config.json"
WEIGHTS = "adapters.safetensors"

_TYPES = ("lora", "dora", "full")
_LEAVES = ("lora_a", "lora_b", "m")
_PLAIN = ("adapter", "adapters")  # mlx-lm's own names for the directory tell nothing


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's files at one moment.

    Attributes:
        path: the directory.
        stamp: sizes and times of its files, so that one that was trained again is another one.
        entries: its tensors.
    """

    path: Path
    stamp: tuple[tuple[int, int], ...]
    entries: tuple[tensors.Entry, ...] = field(default=(), compare=False, repr=False)

    @property
    def label(self) -> str:
        """What it is called: its directory's name, or the one above where that says more."""
        name, above = self.path.name, self.path.parent.name
        return above if name in _PLAIN and above else name

    def name_for(self, model: str, taken: Iterable[tuple[str, Path | None]]) -> str:
        """The short name of a model with it.

        Args:
            model: the model's own.
            taken: (short name, adapter's directory) of the loaded ones.
        """
        name = f"{model}+{self.label}"
        if any(each == name and path != self.path for each, path in taken):
            name += "-" + hashlib.sha256(str(self.path).encode()).hexdigest()[:4]
        return name


def resolve(place: str | PathLike[str]) -> Adapter:
    """The adapter in a directory.

    Raises:
        BadModel: there is no such directory, or it holds no sound adapter.
    """
    try:
        path = Path(place).expanduser().resolve()
        found = bool(str(place).strip()) and path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise BadModel(place, f"is no directory: {error}") from None
    if not found:
        raise BadModel(place, "is no directory, so there is no adapter in it")
    config = _config(path)
    kind = config.get("fine_tune_type", "lora")
    if kind not in _TYPES:
        raise BadModel(path, f"its fine_tune_type is {kind!r}; known: {', '.join(_TYPES)}")
    if kind != "full" and not (
        type(config.get("num_layers")) is int and isinstance(config.get("lora_parameters"), dict)
    ):
        raise BadModel(path, f"its {CONFIG} has no num_layers or lora_parameters")
    if not (path / WEIGHTS).is_file():
        raise BadModel(path, f"has no {WEIGHTS}, so it is no adapter of mlx-lm's")
    entries = tuple(tensors.read_header(path / WEIGHTS))
    stats = [(path / name).stat() for name in (CONFIG, WEIGHTS)]
    return Adapter(path, tuple((s.st_size, s.st_mtime_ns) for s in stats), entries)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModel(path, f"has no {CONFIG}, so it is no adapter of mlx-lm's") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadModel(path, f"its {CONFIG} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise BadModel(path, f"its {CONFIG} isn't a table")
    return config


def apply(model: Any, adapter: Adapter) -> None:
    """Put an adapter's weights, lazily, into a model that was just read.

    Raises:
        BadModel: it belongs to another model.
    """
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_adapters

    try:
        load_adapters(model, str(adapter.path))
    except MemoryError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = ": ".join(lines[:2]).replace("::", ":") or type(error).__name__
        raise BadModel(adapter.path, f"doesn't fit the model: {told}") from error
    leaves: Any = tree_flatten(model.parameters())
    given = {entry.name for entry in adapter.entries}
    missing = [n for n, _ in leaves if n.rpartition(".")[2] in _LEAVES and n not in given]
    if missing:  # they would be random numbers
        raise BadModel(adapter.path, f"doesn't fit the model: it has no {missing[0]}")
    model.eval()
