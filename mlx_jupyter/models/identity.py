"""What a stored page of a model depends on, as one short text: the model's identity.

Two loads with the same identity may read each other's pages; whatever would give other rows for
the same tokens, or rows of another form, changes it:

* the weights: each file's header, its size, bytes sampled all over it, and the hash that the hub
  has of it; the time of the last change where there is no such hash;
* the configuration, the model's own code if it brings any, the tokenizer and its chat template;
* the adapter on top of the weights, if there is one, in the same way as these;
* the precision in force, which on a CPU isn't the files';
* the layout of the cache: the classes of its leaves and their sizes;
* MLX's and mlx-lm's versions, since their kernels and model code make the rows and their cache
  classes hold them, and the backend. Rows of a CPU and of a GPU are close, but not equal, in
  float32 too (a GPU may multiply with fewer bits): with them an answer would depend on where the
  same was asked before. A CPU's BLAS isn't in: it moves rows no more than a chunk's length does.

The directory's place and the model's short name aren't in it. A model that the user gives as an
object has no files and so no identity.

No weights are read but the samples, whatever their size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from typing import TYPE_CHECKING, Any

from mlx_jupyter.models import adapters, paths, tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from mlx_jupyter.models.precision import Backend

log = logging.getLogger(__name__)

FORMAT = 1
"""Grows when stored pages of an earlier version can't be read, or must not be."""

SAMPLES = 32
"""Places of a weight file that are read: where files keep their dates (archives, package managers
that set all to one) they tell two trainings of the same model apart."""
SAMPLE = 1024
"""Bytes read at each."""

_OTHERS = (
    "config.json",
    "*.py",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)
_HUB_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's of small files, SHA-256 of large ones
_MADE = re.compile(r".+-[0-9a-f]{12,32}-v\d+")  # how ``sources`` names what it makes


class Witness:
    """A model's files while they are loaded: an identity only if nothing changed meanwhile.

    Else pages of what was loaded would be kept under the identity of what came after.

    Args:
        directory: the MLX model directory that is about to be loaded.
        adapter: the directory of its adapter, if there is one.
    """

    def __init__(self, directory: Path, adapter: Path | None = None) -> None:
        self._directory = directory
        self._adapter = adapter
        self._before = self._stamps()

    def identity(self, model: Any, where: Backend) -> str | None:
        """The identity of the model that was loaded; None, with a warning, if it has none.

        Never raises an ``Exception``: a model without an identity only keeps no pages on disk.
        """
        try:
            found = fingerprint(self._directory, model, where, self._adapter)
            if self._before is not None and self._before == self._stamps():
                return found
            log.warning("%s changed while it was loaded: its pages stay in memory", self._directory)
        except Exception:
            log.warning(
                "%s has no identity: its pages stay in memory", self._directory, exc_info=True
            )
        return None

    def _stamps(self) -> list[tuple[Any, ...]] | None:
        try:
            own = (*_weights(self._directory), *_others(self._directory))
            stats = [(str(f), f.stat()) for f in (*own, *_adapting(self._adapter))]
        except OSError:
            return None
        return [(f, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for f, s in stats]


def fingerprint(directory: Path, model: Any, where: Backend, adapter: Path | None = None) -> str:
    """The identity of a loaded model: 32 hexadecimal digits.

    Args:
        directory: the MLX model directory that it was loaded from.
        model: mlx-lm's model, in the precision it computes in.
        where: the backend.
        adapter: the directory of its adapter, if there is one.

    Raises:
        OSError, ValueError: a file can't be read or isn't what its name says.
    """
    import mlx.core as mx
    import mlx_lm

    mlx = mx.__version__  # type: ignore[attr-defined]
    extra = {file.name: _weight_file(file) for file in _adapting(adapter)}
    return _digest(
        {
            **({"adapter": extra} if extra else {}),
            "format": FORMAT,
            "versions": [_release(mlx), _release(mlx_lm.__version__)],
            "backend": where,
            "weights": {file.name: _weight_file(file) for file in _weights(directory)},
            "files": {
                str(file.relative_to(directory)): _digest(file.read_bytes())
                for file in _others(directory)
            },
            "precision": _precision(model),
            "layout": layout(model),
        }
    )


def layout(model: Any) -> list[tuple[str, list[dict[str, Any]]]]:
    """The leaf caches of a model by kind: the class of each and the numbers it was made with."""
    from mlx_lm.models.cache import make_prompt_cache

    from mlx_jupyter.cache.layers import Leaves

    leaves = Leaves.of(make_prompt_cache(model))
    each: tuple[tuple[str, Sequence[Any]], ...] = (
        ("rows", leaves.rows),
        ("window", leaves.windows),
        ("state", leaves.states),
    )
    return [(kind, [_leaf(adapter.cache) for adapter in group]) for kind, group in each if group]


def _leaf(cache: Any) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for name, value in getattr(cache, "__dict__", {}).items():
        if isinstance(value, list | tuple):
            numbers[name] = len(value)
        elif isinstance(value, bool | int | float | str):
            numbers[name] = value
    return {**numbers, "class": f"{type(cache).__module__}.{type(cache).__qualname__}"}


def _precision(model: Any) -> str:
    """Every weight's form, and how the packed ones are packed."""
    from mlx.utils import tree_flatten

    weights: Any = tree_flatten(model.parameters())
    packed = [
        (name, module.bits, module.group_size, getattr(module, "mode", "affine"))
        for name, module in model.named_modules()
        if hasattr(module, "bits") and hasattr(module, "group_size")
    ]
    forms = sorted((name, str(array.dtype), list(array.shape)) for name, array in weights)
    return _digest([forms, sorted(packed)])


# --- files ------------------------------------------------------------------------------------


def _weights(directory: Path) -> list[Path]:
    """The files that mlx-lm reads weights from."""
    return sorted(directory.glob("model*.safetensors"))


def _others(directory: Path) -> list[Path]:
    found = {file for pattern in _OTHERS for file in directory.glob(pattern) if file.is_file()}
    return sorted(found)


def _adapting(adapter: Path | None) -> list[Path]:
    """The files that an adapter is made of."""
    return [] if adapter is None else [adapter / adapters.CONFIG, adapter / adapters.WEIGHTS]


def _weight_file(file: Path) -> list[Any]:
    """What tells a weight file from others, without reading all of it."""
    with file.open("rb") as opened:
        start = opened.read(8)
        header = opened.read(min(int.from_bytes(start, "little"), tensors.MAX_HEADER))
        stat = os.fstat(opened.fileno())
        samples = b"".join(_samples(opened, len(start) + len(header), stat.st_size))
    known = _hub_hash(file, stat.st_mtime) or _made_name(file) or stat.st_mtime_ns
    return [stat.st_size, _digest(start + header), _digest(samples), known]


def _samples(opened: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """Bytes at places spread evenly over ``[start, end)``."""
    for index in range(SAMPLES):
        opened.seek(start + (end - start) * index // SAMPLES)
        yield opened.read(SAMPLE)


def _hub_hash(file: Path, changed: float) -> str | None:
    """The Hugging Face hub's own hash of a file that came from there.

    It is the file's name in the hub's cache, and in the notes that the hub's client keeps beside
    files in a directory of the user's; these hold while the file is no newer.
    """
    real = file.resolve()
    if real.parent.name == "blobs" and real.parents[1].name.startswith("models--"):
        return real.name if _HUB_HASH.fullmatch(real.name) else None
    note = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    try:
        _, known, noted = note.read_text(encoding="utf-8").split()[:3]
        if _HUB_HASH.fullmatch(known) and changed - 1 <= float(noted):
            return known
    except (OSError, ValueError):
        pass
    return None


def _made_name(file: Path) -> str | None:
    """The directory's name where it is one that ``sources`` made: it names what it was made of.

    So a model that is fetched and converted again, here or elsewhere, finds its pages.
    """
    directory = file.parent.resolve()
    made = directory.parent == paths.models().resolve() and _MADE.fullmatch(directory.name)
    return directory.name if made else None


def _release(version: str) -> str:
    """``major.minor.patch`` of a version."""
    return ".".join(re.findall(r"\d+", version)[:3])


def _digest(content: Any) -> str:
    if not isinstance(content, bytes):
        content = json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:32]
