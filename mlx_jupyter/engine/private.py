"""Where conversations are kept that the user gave no place: a directory for this user alone."""

from __future__ import annotations

import re
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING

from mlx_jupyter.cache.bundle import SUFFIX
from mlx_jupyter.cache.store_shelf import refusal
from mlx_jupyter.errors import BadRequest
from mlx_jupyter.models import paths

if TYPE_CHECKING:
    from pathlib import Path

_READABLE = 40


def place(name: str, *, make: bool) -> Path:
    """The file of a branch.

    Args:
        name: the branch's; it need not be one that a file can have.
        make: make the directory.

    Raises:
        BadRequest: the directory can't be made, or isn't this user's alone.
    """
    directory = paths.home() / "conversations"
    if make:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BadRequest(f"{directory} can't be made: {error.strerror or error}.") from None
        if reason := trusted(directory):
            raise BadRequest(f"Nothing is kept in {directory}: {reason}.")
    # Names may differ where a file system sees no difference, or be too long for it.
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:_READABLE].lstrip(".")
    number = blake2b(name.encode(), digest_size=6).hexdigest()
    return directory / f"{readable}-{number}{SUFFIX}"


def names() -> list[str]:
    """The branches that are kept there, as far as a file's name tells."""
    found = []
    with suppress(OSError):
        for path in (paths.home() / "conversations").iterdir():
            name = path.name.removesuffix(SUFFIX).rpartition("-")[0]
            if name and place(name, make=False) == path:
                found.append(name)
    return sorted(found)


def trusted(directory: Path) -> str:
    """Why what lies in a directory isn't believed; "" where only this user can write to it."""
    return refusal(directory)
