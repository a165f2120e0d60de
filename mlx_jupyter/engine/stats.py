"""What a request used and how long it took, defined once for every path.

Streamed, silent, cancelled and failed requests all report these, by these definitions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    Attributes:
        cached: prompt tokens whose rows were restored, in place or by reading pages in.
        prefilled: prompt tokens that were really computed. After a cancel in prefill this is
            what had been computed by then, so ``prompt`` can be less than ``len(prompt_ids)``.
        generated: tokens emitted, the end token excluded; ``len(answer.tokens)``.
    """

    cached: int = 0
    prefilled: int = 0
    generated: int = 0

    @property
    def prompt(self) -> int:
        """Prompt tokens that the request covered: ``cached + prefilled``."""
        return self.cached + self.prefilled


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that one request spent, by phase. A phase that wasn't reached is 0.

    Attributes:
        queued: from submit to the start of work.
        load: finding the model, and fetching and loading it where that was needed.
        render: from the conversation to the prompt's ids.
        restore: bringing the live cache to the restore point.
        prefill: from the start of prefill to the first token's logits.
        ttft: from submit to the first token (time to first token).
        decode: from the first token to the last; an end token's step isn't in it.
        total: from submit to the end.
        prefilled: tokens computed in ``prefill``.
        decoded: tokens after the first.
    """

    queued: float = 0.0
    load: float = 0.0
    render: float = 0.0
    restore: float = 0.0
    prefill: float = 0.0
    ttft: float = 0.0
    decode: float = 0.0
    total: float = 0.0
    prefilled: int = 0
    decoded: int = 0

    @property
    def prefill_tps(self) -> float:
        """Prefilled tokens a second (0 when nothing was prefilled)."""
        return self.prefilled / self.prefill if self.prefill > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens a second after the first (0 when fewer than two were made)."""
        return self.decoded / self.decode if self.decode > 0 else 0.0


@dataclass(slots=True)
class Moments:
    """When the phases of one request ended, by one clock; None for what wasn't reached."""

    submitted: float
    started: float | None = None
    loaded: float | None = None
    rendered: float | None = None
    restored: float | None = None
    first: float | None = None
    last: float | None = None

    def timing(self, now: float, *, prefilled: int = 0, generated: int = 0) -> Timing:
        """What they come to; the phase that isn't over lasts until ``now``."""

        def phase(begin: float | None, end: float | None) -> float:
            return 0.0 if begin is None else (now if end is None else end) - begin

        decoded = max(generated - 1, 0)
        return Timing(
            queued=phase(self.submitted, self.started),
            load=phase(self.started, self.loaded),
            render=phase(self.loaded, self.rendered),
            restore=phase(self.rendered, self.restored),
            prefill=phase(self.restored, self.first) if prefilled else 0.0,
            ttft=0.0 if self.first is None else self.first - self.submitted,
            decode=phase(self.first, self.last) if decoded else 0.0,
            total=now - self.submitted,
            prefilled=prefilled,
            decoded=decoded,
        )
