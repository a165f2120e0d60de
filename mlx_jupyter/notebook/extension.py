"""What ``%load_ext`` puts into a shell and ``%unload_ext`` takes out again."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from mlx_jupyter.conversation.answer import Answer
from mlx_jupyter.notebook import cells
from mlx_jupyter.notebook.display import bundle
from mlx_jupyter.notebook.footer import footer
from mlx_jupyter.notebook.magics import LLMMagics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_KEYS = ("%llm", "%%llm")
_ASSIGNED = r"[^%#]*=\s*%llm\s"


def load(shell: InteractiveShell) -> None:
    """Magics, transforms, completion and the answers' display; idempotent."""
    unload(shell)
    magics = LLMMagics(shell)
    shell.register_magics(magics)
    cells.install(shell)
    for key in _KEYS:
        shell.set_hook("complete_command", magics.completer, str_key=key)  # type: ignore[no-untyped-call]
    shell.set_hook("complete_command", magics.completer, re_key=_ASSIGNED)  # type: ignore[no-untyped-call]
    formatters = _formatters(shell)
    formatters["text/plain"].for_type(Answer, _pretty)
    formatters["text/markdown"].for_type(Answer, _markdown)
    for fault in magics.project.faults:
        print(f"mlx_jupyter: {fault}", file=sys.stderr)  # noqa: T201 - to the user, once


def unload(shell: InteractiveShell) -> None:
    """Take everything out; the engine and the branches stay."""
    cells.uninstall(shell)
    manager = shell.magics_manager
    magics = manager.registry.pop(cells.MAGICS, None)
    for kind in ("line", "cell"):
        manager.magics[kind].pop("llm", None)
    if magics in shell.configurables:
        shell.configurables.remove(magics)
    dispatcher = shell.strdispatchers.get("complete_command")
    if dispatcher is not None:
        for key in _KEYS:
            dispatcher.strs.pop(key, None)
        dispatcher.regexs.pop(re.compile(_ASSIGNED), None)
    for mime in ("text/plain", "text/markdown"):
        formatter = _formatters(shell)[mime]
        if Answer in formatter:
            formatter.pop(Answer)


def _formatters(shell: InteractiveShell) -> Any:
    assert shell.display_formatter is not None
    return shell.display_formatter.formatters


def _pretty(answer: Answer, printer: Any, cycle: bool) -> None:
    printer.text("…" if cycle else bundle(answer.text, footer(answer))["text/plain"])


def _markdown(answer: Answer) -> str:
    return bundle(answer.text, footer(answer))["text/markdown"]
