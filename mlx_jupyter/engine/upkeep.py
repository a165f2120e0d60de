"""The engine's upkeep: looking on, checking, pinning, giving up, conversations as files.

The half of the front door that asks no model anything. Every call is safe from any thread; those
that change something wait behind what is queued.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from mlx_jupyter.engine import keeping, removal
from mlx_jupyter.engine.base import EngineBase
from mlx_jupyter.engine.errand import Errand
from mlx_jupyter.engine.keeping import chosen
from mlx_jupyter.engine.request import Request, Ticket
from mlx_jupyter.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from mlx_jupyter.cache.preview import Preview
    from mlx_jupyter.conversation.answer import Message
    from mlx_jupyter.conversation.saved import Saved
    from mlx_jupyter.engine.history import Sample
    from mlx_jupyter.engine.verify import Verification


class Upkeep(EngineBase):
    """See the module."""

    # --- looking on --------------------------------------------------------------------------

    def history(self) -> tuple[Sample, ...]:
        """Memory over time: a sample for each change that was published, oldest first."""
        return self._shop.history.samples()

    def watch(self, told: Callable[[], None]) -> Callable[[], None]:
        """Call ``told`` after each change of what ``tree`` and ``status`` say.

        It is called on the engine's thread, which waits for it: it may only leave a note.

        Returns:
            A function that ends it.
        """
        return self._shop.watch(told)

    def preview(self, bytes: int, model: str | None = None) -> Preview:  # noqa: A002
        """What ``set_budget`` would give up, as plain data; gives up nothing.

        Raises:
            BadRequest: the number is negative.
        """
        return self._thread.call(lambda: self._shop.preview(_checked(bytes), model))

    @property
    def exact(self) -> bool:
        """Whether the next request is served in exactness mode."""
        return self._shop.exact

    @exact.setter
    def exact(self, on: bool) -> None:
        self._shop.exact = bool(on)

    def verify(self, model: str | None = None, *, seed: int | None = None) -> Verification:
        """Serve a cached sequence, drawn at random, and compute it again cold; how they differ.

        The cold run takes as long as computing all its tokens, and the memory of another live
        cache. ``KeyboardInterrupt`` stops it.

        Raises:
            BadRequest: nothing is cached.
        """
        stop = threading.Event()
        try:
            return self._thread.call(lambda: self._shop.verify(model, seed, stop.is_set))
        except KeyboardInterrupt:
            stop.set()
            raise

    def check(self) -> None:
        """Raise ``AssertionError`` when an invariant of a cache is broken (tests, bug reports)."""
        self._thread.call(self._shop.check)

    def pin(self, name: str) -> int:
        """Never give up what a branch (``"@name"``) or cell needs; bytes that this holds now.

        Pinned bytes count in the budget; when they fill it, everything else is recomputed. The name
        of a loaded model pins that: it is never sent away for another one.

        Raises:
            BadRequest: nothing is cached for it, and no such model is loaded.
        """
        pinned: int = self._thread.call(lambda: self._shop.pin(name))
        return pinned

    def unpin(self, name: str) -> None:
        """Let a pinned branch, cell or model be given up again when room is needed.

        Raises:
            BadRequest: it isn't pinned.
        """
        self._thread.call(lambda: self._shop.unpin(name))

    # --- giving up ---------------------------------------------------------------------------

    def release(self, owner: str) -> None:
        """The cell or branch is gone: what only it needed goes first when room is needed."""
        self._thread.call(lambda: self._shop.release(owner))

    def evict(self, bytes: int | None = None) -> int:  # noqa: A002 - the public name
        """Give up at least so many bytes of cache now, all of it when None; bytes freed."""
        freed: int = self._thread.call(lambda: self._shop.evict(bytes))
        return freed

    def set_budget(self, bytes: int, model: str | None = None) -> int:  # noqa: A002
        """Let a loaded model's cache (the current one's when None) take so much; bytes freed.

        It holds until the model is unloaded.

        Raises:
            BadRequest: the number is negative, or no such model is loaded.
        """
        freed: int = self._thread.call(lambda: self._shop.set_budget(_checked(bytes), model))
        return freed

    def clear(self) -> None:
        """Forget all cached tokens; models stay loaded."""
        self._thread.call(self._shop.clear)

    def settle_store(self, timeout: float = 60.0) -> bool:
        """Save what isn't on disk yet; whether all was within ``timeout`` seconds."""
        return self._thread.call(lambda: self._shop.settle_store(timeout))

    def clear_store(self) -> int:
        """Remove everything that is kept on disk, of every model and kernel; bytes freed.

        What is in memory stays, and is saved again after the next request: ``clear`` first to
        forget that too.
        """
        return self._thread.call(self._shop.clear_store)

    # --- conversations as files --------------------------------------------------------------

    def submit_save(
        self, saved: Saved, messages: Sequence[Message], path: str | PathLike[str] | None = None
    ) -> Ticket:
        """Queue writing a conversation and what is cached of it to a file (``keeping.save``).

        Its events are ``Loading`` and at last ``Kept`` with a ``Receipt``, or ``Failed``.
        """
        where = None if path is None else chosen(path)
        return self._errand(lambda errand: keeping.save(errand, saved, messages, where))

    def submit_restore(
        self,
        name: str | None,
        path: str | PathLike[str] | None,
        put: Callable[[Saved], None],
        model: str | None = None,
    ) -> Ticket:
        """Queue bringing a conversation back (``keeping.restore``).

        Its events are ``Loading`` and at last ``Kept`` with a ``Restored``, or ``Failed``.
        """
        where = None if path is None else chosen(path)
        return self._errand(lambda errand: keeping.restore(errand, name, where, model, put))

    def submit_forget(
        self,
        name: str,
        gone: Sequence[tuple[str, Sequence[int]]],
        kept: Sequence[tuple[str, Sequence[int]]],
    ) -> Ticket:
        """Queue removing all that is cached of a conversation (``removal.forget``).

        Its events end with ``Kept`` with a ``Removed``, or ``Failed``.
        """
        return self._errand(lambda errand: removal.forget(errand, name, gone, kept))

    def _errand(self, work: Callable[[Errand], Any]) -> Ticket:
        return self._post(
            Ticket(Request()), lambda ticket, forget: Errand(self._shop, ticket, forget, work)
        )


def _checked(nbytes: int) -> int:
    if nbytes < 0:
        raise BadRequest(f"A budget must not be negative, but it is {nbytes}.")
    return nbytes
