"""What a request will reuse and why not more: plain values, no MLX.

The plan is decided before anything is touched, so that it can be tested, shown by ``--dry-run``
and told in a footer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

CauseCode = Literal[
    "first",  # nothing of this prompt was seen before
    "diverged",  # a stored sequence shares a prefix and then differs
    "extended",  # the prompt goes on where the stored sequence ends
    "cost",  # rows could be read in, but computing them again is faster here
    "evicted",  # the tokens are known but their rows were given up
    "snapshot",  # rows are held, but a layer's state can be restored only at an earlier snapshot
    "exact",  # exactness mode goes on only from where a forward pass ended
    "window",  # rows are held, but a sliding window's rows only for an earlier position
    "seed",  # one token is always evaluated to start decoding
    "model",  # another model, or the same one before it was unloaded, has computed them
    "template",  # the same messages, but the chat template renders them otherwise
    "filtered",  # no reason, but told beside them: what a filter left out; it costs no tokens
    "volatile",  # a clock, a date or an id in the system prompt or the template has changed
]


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason why tokens are recomputed.

    Attributes:
        code: the kind of reason.
        text: the reason as a phrase for people.
        tokens: how many tokens it costs.
        at: the absolute position where it begins.
        message: number of the message that it lies in, from 1; None where that isn't known.
        was: the words at ``at`` that are stored; empty where nothing differs.
        now: the words there now.
    """

    code: CauseCode
    text: str
    tokens: int
    at: int
    message: int | None = None
    was: str = ""
    now: str = ""


DOUBT = 0.99
"""What each doubt leaves of a measured rate: twice as slow as computing, it is tried again after
seventy requests."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What things cost here, as measured; seconds a token, 0 where nothing was measured yet.

    Attributes:
        prefill: computing a prompt token.
        restore: putting a token's rows back from pages in the device's memory.
        read: from pages elsewhere, reading included.
        doubts: how often neither was done, since computing was faster, after the last measurement.
            What was measured once may not hold for ever: each doubt takes a little of it.
    """

    prefill: float = 0.0
    restore: float = 0.0
    read: float = 0.0
    doubts: int = 0

    def cost(self, restored: int, recomputed: int, read: int = 0) -> float:
        """Seconds that a plan takes; without measurements every recomputed token counts."""
        if not self.prefill:
            return float(recomputed)
        moved = self.restore * restored + self.read * read
        return moved * DOUBT**self.doubts + self.prefill * recomputed

    def seen(self, *, prefill: float = 0.0, restore: float = 0.0, read: float = 0.0) -> Rates:
        """With one more measurement of any, in seconds a token."""
        return replace(
            self,
            prefill=_smoothed(self.prefill, prefill),
            restore=_smoothed(self.restore, restore),
            read=_smoothed(self.read, read),
            doubts=0 if restore or read else self.doubts,
        )

    def doubted(self) -> Rates:
        """After reading in was passed over."""
        return replace(self, doubts=min(self.doubts + 1, 1000))


def _smoothed(old: float, new: float) -> float:
    """An exponential average with weight 1/4 for the new value."""
    if not new:
        return old
    return new if not old else 0.75 * old + 0.25 * new


@dataclass(frozen=True, slots=True)
class Plan:
    """How a prompt of ``reused + restored + recomputed`` tokens will be served.

    Attributes:
        prompt: tokens in the prompt.
        reused: tokens that stay where they are in the live cache.
        restored: tokens whose rows are put back from pages.
        recomputed: tokens to prefill (the last one always).
        read: of the restored ones, those whose pages aren't in the device's memory.
        why: reasons for ``recomputed``; their tokens add up to it.
    """

    prompt: int
    reused: int
    restored: int
    recomputed: int
    why: tuple[Cause, ...] = ()
    read: int = 0

    @property
    def cached(self) -> int:
        """Tokens that need no prefill."""
        return self.reused + self.restored
