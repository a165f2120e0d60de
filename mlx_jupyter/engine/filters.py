"""Named filters that keep a prompt's beginning the same from one request to the next.

Each is visible: it has a name, is in ``Engine.filters`` and ``%config LLMMagics.filters``, and what
it left out is told as a cause without tokens. None ever touches a user's, an assistant's or a
tool's text; what the caller gave is never changed, and an answer's messages are the caller's own.

* ``billing-header``: lines ``x-anthropic-billing-header: …`` at the head of a system prompt, which
  some clients write with another checksum in each request. On by default.
* ``frozen-clock``: a chat template that asks for the time is told the one at which the engine was
  made. Off by default: the model then believes that time has stood still.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from mlx_jupyter.cache.plan import Cause
from mlx_jupyter.errors import BadRequest
from mlx_jupyter.models.sentinels import asks_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_jupyter.conversation.answer import Message
    from mlx_jupyter.engine.request import Request

BILLING = "billing-header"
CLOCK = "frozen-clock"
KNOWN = (BILLING, CLOCK)
DEFAULT = (BILLING,)

_ROOM = 60
# Pairs only: text that follows on the same line is the prompt's own.
_HEADER = re.compile(
    r"(?:(?i:x-anthropic-billing-header):(?:[ \t]*[\w.-]+=[^;\s]*(?:;|(?=[ \t]*(?:\r?\n|\Z))))+"
    r"[ \t]*(?:\r?\n|\Z)?)+"
)


def checked_filters(names: Sequence[str]) -> tuple[str, ...]:
    """Filters by name.

    Raises:
        BadRequest: one of them isn't known.
    """
    if isinstance(names, str) or not all(isinstance(each, str) for each in names):
        raise BadRequest(f"filters takes a list of names, not {names!r}.")
    for name in names:
        if name not in KNOWN:
            raise BadRequest(f"There is no filter {name!r}. Known: {', '.join(KNOWN)}.")
    return tuple(dict.fromkeys(names))


class Filters:
    """Those of an engine. It may be asked from any thread.

    Args:
        names: which are on.
        now: what the clock says.

    Attributes:
        names: which are on; replaced whole.
    """

    def __init__(self, names: Sequence[str] = DEFAULT, now: datetime | None = None) -> None:
        self.names = checked_filters(names)
        self._made = now or datetime.now()

    @property
    def clock(self) -> datetime | None:
        """The time that templates are told; None for the real one."""
        return self._made if CLOCK in self.names else None

    def apply(self, request: Request, template: str) -> tuple[Request, tuple[Cause, ...]]:
        """The request as the model gets it, and what was filtered.

        Args:
            request: what was asked.
            template: the source of the model's chat template.
        """
        told: list[Cause] = []
        messages = request.messages
        if messages is None:
            return request, ()
        if BILLING in self.names:
            kept, told = _without_header(messages)
            if told:
                request = replace(request, messages=kept)
        if self.clock is not None and asks_time(template):
            stands = f"{self.clock:%Y-%m-%d %H:%M}"
            text = f"the template's clock stands still at {stands} ({CLOCK})"
            told.append(Cause("filtered", text, 0, 0))
        return request, tuple(told)


def _without_header(messages: Sequence[Message]) -> tuple[tuple[Message, ...], list[Cause]]:
    kept: list[Message] = []
    told: list[Cause] = []
    for number, message in enumerate(messages, 1):
        found = _HEADER.match(message.content) if message.role == "system" else None
        if found is None:
            kept.append(message)
            continue
        line = found[0].strip()
        shown = line if len(line) <= _ROOM else line[: _ROOM - 1] + "…"
        text = f"left out of the system prompt: {shown!r} ({BILLING})"
        told.append(Cause("filtered", text, 0, 0, number, was=line))
        rest = message.content[found.end() :]
        if rest.strip():
            kept.append(replace(message, content=rest))
    return tuple(kept), told
