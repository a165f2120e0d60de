"""glibc's allocator, told to keep large freed buffers: page faults dominate big copies on CPU.

MLX's CPU backend gets its buffers from ``malloc``. By default glibc returns every large one to the
system at once, and each new one is mapped and zeroed page by page, which takes longer than filling
it. With a high trim threshold and large buffers on the heap, memory that is freed is used again.
``trim`` then has to give it back when a lot was freed for good.

Linux with glibc and MLX's CPU backend only. ``MLX_JUPYTER_MALLOC=off`` leaves the allocator alone.
``benchmarks/restore.py`` measures the difference.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import cache

log = logging.getLogger(__name__)

VARIABLE = "MLX_JUPYTER_MALLOC"

# From glibc's malloc.h (mallopt(3)).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP = (1 << 31) - 1  # never trim by itself; mallopt takes an int
_HEAP = 32 << 20  # the largest threshold that glibc accepts on 64 bits


@cache
def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux" or os.environ.get(VARIABLE, "").lower() == "off":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def keep_freed() -> bool:
    """Keep freed buffers for the next ones; False where that isn't possible or switched off."""
    library = _glibc()
    if library is None:
        return False
    done = library.mallopt(_M_TRIM_THRESHOLD, _KEEP) and library.mallopt(_M_MMAP_THRESHOLD, _HEAP)
    log.debug("malloc keeps freed buffers: %s", bool(done))
    return bool(done)


def trim() -> None:
    """Give freed memory back to the system: after an unload, an eviction or a clear."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
