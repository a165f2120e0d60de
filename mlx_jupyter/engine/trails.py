"""Which token sequences a conversation led through, earlier versions too, until it is forgotten.

A cell that runs again leaves what it computed before in the cache and on disk, reachable by nobody.
To remove a conversation for good that has to be found; the ids are all it takes. Bounded: of the
sequences that were noted longest ago nothing is known any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_jupyter.cache.trie import common_prefix

if TYPE_CHECKING:
    import numpy as np

TOKENS = 4_000_000
"""Ids that are remembered for all conversations together, four bytes each."""


class Trails:
    """See the module. Used on the engine thread."""

    def __init__(self) -> None:
        self._paths: list[
            tuple[str, str, np.ndarray]
        ] = []  # owner, model, ids; the last noted last

    def note(self, owner: str | None, model: str, ids: np.ndarray) -> None:
        """An owner's request led through these ids, int32; only branches are remembered."""
        if owner is None or not owner.startswith("@"):
            return
        self._paths = [
            each
            for each in self._paths
            if each[:2] != (owner, model) or common_prefix(each[2], ids) < len(each[2])
        ]
        self._paths.append((owner, model, ids))
        held = sum(len(path) for _, _, path in self._paths)
        while held > TOKENS and len(self._paths) > 1:
            held -= len(self._paths.pop(0)[2])

    def of(self, owner: str) -> list[tuple[str, np.ndarray]]:
        """An owner's sequences, each with its model."""
        return [(model, ids) for who, model, ids in self._paths if who == owner]

    def forget(self, owner: str) -> None:
        """An owner is gone."""
        self._paths = [each for each in self._paths if each[0] != owner]
