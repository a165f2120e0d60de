"""The magics about conversations as files and the store; a mixin of ``LLMMagics``."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_jupyter.conversation import keeping
from mlx_jupyter.engine.request import Failed, Kept
from mlx_jupyter.errors import Cancelled
from mlx_jupyter.notebook import config, reports
from mlx_jupyter.notebook.display import screen_for
from mlx_jupyter.notebook.following import follow
from mlx_jupyter.notebook.interrupt import Interrupts

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

    from mlx_jupyter.cache.forgetting import Removed
    from mlx_jupyter.engine.engine import Engine
    from mlx_jupyter.engine.request import Ticket
    from mlx_jupyter.notebook.chat import Chat

STOPPING = 2.0  # seconds that an interrupted save waits for its last piece
SETTLE = 0.05  # seconds that an interrupted cell waits for the engine's own account


@dataclass(frozen=True, slots=True)
class Outcome:
    """A command's value.

    Attributes:
        value: what the magic returns.
        shown: it is on the screen already.
        kept: it is in a variable of the user's choice.
    """

    value: Any
    shown: bool = False
    kept: bool = False


class KeepingCommands:
    """``save``, ``restore``, ``forget`` and ``store``."""

    shell: InteractiveShell
    project: config.Project
    _chat: Chat

    @abstractmethod
    def _engine(self) -> Engine:
        """The kernel's engine, told what is set."""

    def _save(self, branch: str, path: str | None) -> Outcome:
        ticket = keeping.save(self._engine(), branch, path)
        return self._kept(
            ticket, lambda receipt: reports.saved(branch, receipt), f"@{branch} isn't saved"
        )

    def _restore(self, branch: str, path: str | None) -> Outcome:
        engine = self._engine()
        self._chat.attach(engine)
        model = config.setting("model", self, self.project)
        ticket = keeping.restore(engine, branch, path, model)
        return self._kept(ticket, reports.restored, f"@{branch} isn't restored")

    def _forget(self, branch: str) -> Outcome:
        engine = self._engine()

        def told(gone: Removed) -> str:
            keeping.forgotten(engine, branch)
            return reports.removed(branch, gone)

        return self._kept(keeping.forget(engine, branch), told, f"@{branch} is still there")

    def _store(self, *, clear: bool) -> Outcome:
        engine = self._engine()
        if not clear:
            return Outcome(reports.store(engine.status().store))
        freed = engine.clear_store()
        return Outcome(reports.Page(reports.cleared(freed, engine.status().store), freed))

    def _kept(self, ticket: Ticket, told: Callable[[Any], str], undone: str) -> Outcome:
        """Follow a ticket about a conversation as a file; what it ends with, told in one line."""
        screen = screen_for(self.shell, "text")
        with Interrupts() as interrupts:
            follow(ticket, interrupts, screen)
            if not ticket.ended:
                ticket.cancel()
                ticket.wait(STOPPING)
            outcome = ticket.outcome
            if isinstance(outcome, Kept):
                screen.finish(told(outcome.value), "")
            else:
                screen.fail()
        if isinstance(outcome, Failed):
            raise outcome.error
        if interrupts.count or not isinstance(outcome, Kept):
            error = Cancelled(ticket.settle(SETTLE))
            done = isinstance(outcome, Kept)
            error.args = (
                "Interrupted; it was done already." if done else f"Interrupted; {undone}.",
            )
            raise error
        return Outcome(outcome.value, shown=True)
