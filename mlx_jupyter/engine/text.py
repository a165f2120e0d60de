"""From generated ids to text: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class TextStream:
    """Text that has become certain, token by token.

    An incomplete UTF-8 character is held back by the detokenizer, the beginning of a possible stop
    string here; both are released by ``finish``.

    Args:
        detokenizer: an mlx-lm streaming detokenizer; None gives no text.
        stops: generation ends before any of these.

    Attributes:
        stopped_by: the stop string that was met.
    """

    def __init__(self, detokenizer: Any | None, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._held = ""
        self.stopped_by: str | None = None

    def add(self, token: int) -> str:
        """Take a token; the text that is certain now."""
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        self._detokenizer.add_token(token)
        return self._release(self._detokenizer.last_segment)

    def finish(self) -> str:
        """The text that was held back; nothing may be added afterwards."""
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        self._detokenizer.finalize()
        certain = self._release(self._detokenizer.last_segment)
        rest, self._held = self._held, ""
        return certain + rest

    def _release(self, segment: str) -> str:
        if not self._stops:
            return segment
        text = self._held + segment
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ``text`` ends with."""
    return next(
        (n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0
    )
