"""Tells an error that means "no memory" from all others.

MLX has no class for it: Metal, CUDA and the CPU backend raise ``RuntimeError`` with texts of their
own. (On Linux's CPU backend a refused allocation mostly ends the process: what keeps it alive there
is looking ahead, ``engine/pressure.py``.)
"""

from __future__ import annotations

_SIGNS = (
    "[metal::malloc]",
    "[malloc_or_wait]",
    "attempting to allocate",
    "unable to allocate",
    "out of memory",
    "insufficient memory",
    "cudaerrormemoryallocation",
    "bad_alloc",
)


def is_shortage(error: BaseException) -> bool:
    """Whether an allocation was refused."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).casefold()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)
