"""Which call of which cell of which client is running: the identity of a turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_jupyter.conversation.turn import Call

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Calls:
    """Counts the calls of one execution.

    An execution is one ``execute_request`` in a kernel, one input in a terminal. Cells that run
    inside another one (``%%capture``, ``%%time``) belong to the outer one's execution.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._execution: object = None
        self._count = 0

    def next(self) -> Call | None:
        """This call; None where the client sends no cell id, so that reruns can't be told."""
        session, cell, execution = self._where()
        if execution != self._execution:
            self._execution = execution
            self._count = 0
        index = self._count
        self._count += 1
        return Call(session, cell, index, str(execution)) if cell else None

    def owner(self, call: Call | None) -> str:
        """Names what the call computes, the same when its cell is run again."""
        if call is None:
            return self.label(call)
        return f"{call.session}/{call.cell}/{call.index}"

    def label(self, call: Call | None) -> str:
        """How a person knows the call: the cell's number, and which call it was."""
        # IPython counts up before it runs an input.
        number = f"In [{self._shell.execution_count - 1}]"
        return f"{number}.{call.index + 1}" if call is not None and call.index else number

    def _where(self) -> tuple[str, str | None, object]:
        """(client session, cell id, what names this execution)."""
        parent = self._parent()
        header = parent.get("header") or {}
        cell = (parent.get("metadata") or {}).get("cellId")
        if not header:
            return "", None, self._shell.execution_count
        return str(header.get("session", "")), cell or None, header.get("msg_id")

    def _parent(self) -> dict[str, Any]:
        get_parent = getattr(self._shell, "get_parent", None)
        if getattr(self._shell, "kernel", None) is None or get_parent is None:
            return {}
        return get_parent() or {}
