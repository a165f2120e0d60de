"""A real BLAS for MLX's CPU backend on Linux, put in place before mlx is imported.

MLX's Linux CPU wheel brings the reference BLAS, some fifteen times slower than a tuned one. A
library that is loaded with ``RTLD_GLOBAL`` *before* ``import mlx`` answers MLX's calls of
``cblas_sgemm`` instead. This module finds one and loads it, and never imports mlx itself.

``MLX_JUPYTER_BLAS`` overrides the search: the path (or soname) of a library, or ``off``.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.metadata
import logging
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

log = logging.getLogger(__name__)

VARIABLE = "MLX_JUPYTER_BLAS"

State = Literal["interposed", "none", "off", "not needed", "too late"]

_INSTALL = (
    "MLX runs on its slow built-in BLAS. For ten times the speed install a real one and restart "
    "the kernel: `sudo apt-get install libopenblas0` (Debian, Ubuntu), "
    "`sudo dnf install openblas` (Fedora) or `pip install mkl` (x86-64)."
)
_TOO_LATE = (
    "mlx was imported before mlx_jupyter, so it runs on its slow built-in BLAS. Restart the "
    "kernel and import mlx_jupyter (or `%load_ext mlx_jupyter`) first."
)

# Sonames that the dynamic linker resolves, best first. Not libblas.so.3: it may be the reference.
_SONAMES = (
    "libopenblas.so.0",
    "libopenblasp.so.0",
    "libopenblas.so",
    "libmkl_rt.so.2",
    "libmkl_rt.so",
    "libblis.so.4",
)
# Below a prefix (an environment or /usr): Debian keeps each implementation in its own directory,
# which the linker's cache doesn't know until an alternative is set.
_PATTERNS = (
    "lib/libmkl_rt.so*",
    "lib/libopenblas.so*",
    "lib/*/openblas-pthread/libopenblas.so.0",
    "lib/*/openblas-*/libopenblas.so.0",
    "lib/*/openblas-*/libblas.so.3",
    "lib/*/libopenblas.so.0",
    "lib64/libopenblasp.so.0",
    "lib64/libopenblas*.so.0",
    "lib/*/libmkl_rt.so",
    "lib/*/blis-*/libblas.so.3",
    "lib/libblis.so*",
)


@dataclass(frozen=True, slots=True)
class BlasStatus:
    """What was done about the BLAS.

    Attributes:
        state: ``"interposed"`` (a real BLAS is in place), ``"none"`` (none was found), ``"off"``
            (switched off), ``"not needed"`` (macOS, or a CUDA backend), ``"too late"`` (mlx was
            imported before).
        library: what was loaded, or ``""``.
        hint: one line that says what to do for more speed, or ``""``.
    """

    state: State
    library: str = ""
    hint: str = ""


def candidates(
    prefixes: Iterable[str | os.PathLike[str]] | None = None, sonames: Iterable[str] = _SONAMES
) -> Iterator[str]:
    """Libraries worth trying: the environment's own first, then the linker's, then by path.

    Args:
        prefixes: roots of installations, the environment's before the system's.
        sonames: names that the dynamic linker is asked for, between the two.
    """
    roots = [Path(p) for p in prefixes] if prefixes is not None else _prefixes()
    system = [r for r in roots if r == Path("/usr")]
    for root in roots:
        if root not in system:
            yield from _below(root)
    yield from sonames
    for root in system:
        yield from _below(root)


def _prefixes() -> list[Path]:
    seen = dict.fromkeys([sys.prefix, os.environ.get("CONDA_PREFIX") or sys.prefix])
    return [Path(p) for p in (*seen, "/usr/local", "/usr")]


def _below(root: Path) -> Iterator[str]:
    seen: set[str] = set()
    for pattern in _PATTERNS:
        for path in sorted(glob.glob(str(root / pattern))):
            if path not in seen:
                seen.add(path)
                yield path


def open_library(name: str) -> bool:
    """Load ``name`` globally; True when it is there and has the function that MLX calls."""
    try:
        # Local first: a library without the function must not stay in the global scope.
        library = ctypes.CDLL(name, mode=ctypes.RTLD_LOCAL)
        if not hasattr(library, "cblas_sgemm"):
            return False
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        log.debug("%s can't be loaded: %s", name, error)
        return False
    return True


def has_cuda_backend() -> bool:
    """Whether one of MLX's CUDA backends is installed in this environment."""
    for name in ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def decide(
    *,
    setting: str,
    platform: str,
    cuda: Callable[[], bool],
    imported: bool,
    find: Callable[[], Iterable[str]],
    load: Callable[[str], bool],
) -> BlasStatus:
    """Choose and load a BLAS; everything it looks at is given, so that it can be tested.

    Args:
        setting: the value of ``MLX_JUPYTER_BLAS``.
        platform: as ``sys.platform``.
        cuda: tells whether a CUDA backend is installed.
        imported: whether mlx is imported already.
        find: gives the candidates, best first.
        load: loads one of them, True on success.
    """
    if platform != "linux":
        return BlasStatus("not needed")
    if setting.lower() in ("off", "0", "no", "none"):
        return BlasStatus("off")
    if not setting and cuda():
        return BlasStatus("not needed")
    if imported:
        return BlasStatus("too late", hint=_TOO_LATE)
    if setting:
        if load(setting):
            return BlasStatus("interposed", setting)
        return BlasStatus(
            "none", hint=f"{VARIABLE}={setting} is no BLAS that can be loaded. {_INSTALL}"
        )
    for name in find():
        if load(name):
            return BlasStatus("interposed", name)
    return BlasStatus("none", hint=_INSTALL)


_lock = threading.Lock()
_status: BlasStatus | None = None


def ensure() -> BlasStatus:
    """Put a real BLAS in place if this machine needs one; does its work at the first call only."""
    global _status
    with _lock:
        if _status is None:
            _status = decide(
                setting=os.environ.get(VARIABLE, "").strip(),
                platform=sys.platform,
                cuda=has_cuda_backend,
                imported="mlx.core" in sys.modules,
                find=candidates,
                load=open_library,
            )
            log.debug("BLAS: %s %s", _status.state, _status.library)
        return _status


def status() -> BlasStatus:
    """What ``ensure`` did; it is called now if it wasn't before."""
    return _status or ensure()
