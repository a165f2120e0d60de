"""How much each model's prefix cache may take: one shared figure, divided as models come and go.

The figure is a share of what would be free if the caches were empty, so that the budgets of all
models together never exceed what is there. What a user set, for all caches or for one, is kept as
far as it fits; it holds again in full when there is more room. One prefill chunk stays free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_jupyter.models import memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_jupyter.cache.prefix_cache import PrefixCache


def divided(
    names: list[str], fixed: Mapping[str, int], default: int | None, room: int
) -> dict[str, int]:
    """The budget of each model.

    Args:
        names: the models.
        fixed: what the user set for some of them.
        default: what the user set for each of the others; None: a share of what is there.
        room: bytes that all caches together may take.
    """
    if not names:
        return {}
    wanted = {name: fixed.get(name, default) for name in names}
    told = {name: size for name, size in wanted.items() if size is not None}
    total = sum(told.values())
    if total > room:  # in proportion
        told = {name: size * room // total for name, size in told.items()}
    rest = [name for name in names if name not in told]
    left = room - sum(told.values())
    share = min(max(int(room * memory.CACHE_SHARE), memory.LEAST_CACHE), left)
    return told | {name: share // len(rest) for name in rest}


class Budgets:
    """See the module.

    Args:
        default: what the user wants each cache to take, or None.
        memory_limit: the user's bound on MLX's arrays, or None.
    """

    def __init__(self, default: int | None, memory_limit: int | None) -> None:
        self._default = default
        self._limit = memory_limit
        self._fixed: dict[str, int] = {}

    def fix(self, name: str, nbytes: int) -> None:
        """The user's own budget for a loaded model."""
        self._fixed[name] = nbytes

    def release(self, name: str) -> None:
        """The model is gone, and its budget with it."""
        self._fixed.pop(name, None)

    def room(self, caches: Mapping[str, PrefixCache], chunk: int) -> int:
        """Bytes that all caches together may take, a prefill chunk of so many bytes left free.

        Never less than the least cache: on a machine that seems full a conversation still fits.
        """
        held = sum(cache.nbytes() for cache in caches.values())
        return max(memory.free_within(self._limit) + held - chunk, memory.LEAST_CACHE)

    def settle(self, caches: Mapping[str, PrefixCache], chunk: int) -> None:
        """Set every cache's budget; those that hold more give it up as they always do."""
        shares = divided(list(caches), self._fixed, self._default, self.room(caches, chunk))
        for name, cache in caches.items():
            cache.budget = shares[name]
            if cache.nbytes() > cache.budget:
                cache.fit_live()
                cache.enforce()
