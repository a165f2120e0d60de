"""What is asked, and what each owner asked before: what a cause's explanation compares.

Nothing here holds text: messages are remembered as hashes, paths as token ids, both bounded.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mlx_jupyter.cache.match import match
from mlx_jupyter.cache.plan import Cause
from mlx_jupyter.cache.trie import common_prefix
from mlx_jupyter.models.template import block_ends

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_jupyter.cache.view import MarkKind, NodeView
    from mlx_jupyter.engine.request import Request

OWNERS = 256
"""Owners whose last request is remembered."""

TOKENS = 2_000_000
"""Token ids that are remembered for all of them together, four bytes each."""

CLOSE = 4
"""Tokens that a template closes a message with: what is new there lies in the next message."""

NONE = np.zeros(0, np.int32)
"""No ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """An owner's last request, as far as its next one needs it; no text.

    Attributes:
        model: who answered.
        parts: a hash of each message, the answer's last; of a raw text or of ids, one of the whole.
        path: int32, the prompt's and the answer's ids as far as they were recorded.
        gone: the model was unloaded since.
    """

    model: str
    parts: tuple[int, ...]
    path: np.ndarray
    gone: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Asking:
    """A prompt that is to be explained.

    Attributes:
        model: short name of the model that it goes to.
        request: what was asked.
        ids: int32, shape (prompt,).
        parts: see ``Asked``.
        ends: where the template's beginning ends (0 without one), then each message's block; empty
            when there are no messages or their places aren't known.
    """

    model: str
    request: Request
    ids: np.ndarray
    parts: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(
        cls,
        model: str,
        request: Request,
        ids: np.ndarray,
        marks: Sequence[tuple[int, MarkKind]],
    ) -> Asking:
        """From a request and what became of it; arguments as ``serve.prompt_ids`` gives them."""
        messages = request.messages
        if messages is None:
            whole = hash(request.text) if request.text is not None else hash(ids.tobytes())
            return cls(model, request, ids, (whole,), ())
        parts = tuple(hash((m.role, m.content)) for m in messages)
        return cls(model, request, ids, parts, block_ends(marks, messages, len(ids)))

    def index(self, at: int) -> int | None:
        """The message whose block holds token ``at``; -1 for the template's beginning.

        The last one also for the tail that starts the answer. None where that isn't known.
        """
        return min(bisect_right(self.ends, at), len(self.ends) - 1) - 1 if self.ends else None

    def equal(self, former: Asked) -> int:
        """How many leading messages are those of a former request."""
        pairs = enumerate(zip(self.parts, former.parts, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self.parts), len(former.parts)))

    def shared(self, former: Asked) -> int:
        """How many leading tokens say what a former request said, in this model's tokens."""
        count = self.equal(former)
        if count == len(self.parts):
            return len(self.ids)
        if self.request.tokens is not None:
            return common_prefix(former.path, self.ids)
        return self.ends[count] if count and self.ends else 0

    def said(self, index: int | None) -> str:
        """What a message is called."""
        if index is None or self.request.messages is None:
            return "the prompt"
        if index < 0:
            return "the template's beginning"
        return f"message {index + 1} ({self.request.messages[index].role})"

    def new(self, at: int) -> tuple[Cause, ...]:
        """What comes from ``at`` on is new; nothing at the end."""
        if at >= len(self.ids):
            return ()
        index = self.index(at)
        if index is not None and index + 1 < len(self.parts) and self.ends[index + 1] - at <= CLOSE:
            index += 1
        nth = number(index)
        text = f"new from token {at:,}" + (f", in {self.said(index)}" if nth else "")
        return (Cause("extended", text, len(self.ids) - at, at, nth),)


class Memory:
    """What each owner asked last. Changed on the engine thread; any thread may ask ``of``."""

    def __init__(self) -> None:
        self._asked: dict[str | None, Asked] = {}  # the one that asked last comes last

    def of(self, owner: str | None) -> Asked | None:
        """The last request of an owner; requests without one share None."""
        return self._asked.get(owner)

    def keep(self, prompt: Asking, answer: str, generated: Sequence[int], root: NodeView) -> None:
        """Remember a request that was answered.

        Args:
            prompt: what was asked.
            answer: the answer's text.
            generated: its ids.
            root: of the view after it: what isn't recorded there is no path.
        """
        path = np.concatenate([prompt.ids, np.asarray(generated, np.int32)])
        known = match(root, path, 0, lambda _: False).known
        said = () if prompt.request.messages is None else (hash(("assistant", answer)),)
        owner = prompt.request.owner
        self._asked.pop(owner, None)
        self._asked[owner] = Asked(prompt.model, (*prompt.parts, *said), path[:known].copy())
        held = sum(len(asked.path) for asked in self._asked.values())
        while len(self._asked) > 1 and (len(self._asked) > OWNERS or held > TOKENS):
            held -= len(self._asked.pop(next(iter(self._asked))).path)

    def unload(self, model: str) -> None:
        """A model goes: its ids mean nothing any more."""
        for owner, asked in self._asked.items():
            if asked.model == model:
                self._asked[owner] = replace(asked, path=NONE, gone=True)

    def release(self, owner: str) -> None:
        """An owner is gone."""
        self._asked.pop(owner, None)

    def clear(self) -> None:
        """Forget everything."""
        self._asked.clear()


def number(index: int | None) -> int | None:
    """A message's number for people, from 1; None where it isn't one."""
    return index + 1 if index is not None and index >= 0 else None
