"""Prefill and decode: the loop that runs one request's model calls.

Prefill leaves exactly one token, which seeds decoding. Chunks end at absolute multiples of the
chunk size and where the session wants a snapshot, so that logits don't depend on what was cached.
Decode keeps one step in flight: step n + 1 is dispatched before the token of step n is read, but
never beyond ``max_tokens`` or the context. The cancel flag is looked at between chunks and steps.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_jupyter.engine.request import Prefill, Tail, Token
from mlx_jupyter.engine.stats import Moments, Usage
from mlx_jupyter.models.mlx_limits import trim_buffers
from mlx_jupyter.models.shortage import is_shortage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_jupyter.cache.session import Session
    from mlx_jupyter.conversation.answer import Finish
    from mlx_jupyter.engine.pressure import Pressure
    from mlx_jupyter.engine.request import Ticket
    from mlx_jupyter.engine.sampling import Sampling
    from mlx_jupyter.engine.stats import Timing
    from mlx_jupyter.engine.text import TextStream

CLEAR_EVERY = 256
"""Generated tokens between two clearings of MLX's cache of free buffers."""

LOGPROB_FLOOR = -1e4
"""Stands for minus infinity, which JSON can't carry."""


@dataclass(slots=True)
class Run:
    """One request on its way through the pipeline; what it reports when it ends, however it ends.

    Attributes:
        ids: the prompt.
        limit: tokens that fit into the context.
        max_tokens: tokens to generate at most.
        chunk: tokens of a full prefill step.
        ends: ids of end tokens.
        clock: seconds, monotonic.
        submitted: when the caller submitted it, for a run without ``moments``.
        started: when its turn came, likewise.
        moments: when the phases of its request ended.
        think_end: ids that end the thinking; empty for models that don't think.
        pressure: looks ahead in memory; None: nobody does.
    """

    model: Any
    ids: Sequence[int]
    limit: int
    max_tokens: int
    chunk: int
    ends: frozenset[int]
    sampling: Sampling
    text: TextStream
    ticket: Ticket
    clock: Callable[[], float]
    submitted: InitVar[float] = 0.0
    started: InitVar[float] = 0.0
    think_end: tuple[int, ...] = ()
    moments: Moments = field(default_factory=lambda: Moments(0.0))
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = "cancelled"
    cached: int = 0
    computed: int = 0
    pressure: Pressure | None = None

    def __post_init__(self, submitted: float, started: float) -> None:
        if self.moments.started is None:
            self.moments = Moments(submitted, started, started, started)

    def __call__(self, session: Session) -> None:
        """Run in an entered session."""
        # When it is tried again, what it computed at first isn't new, nor is it "cached".
        self.cached = min(self.cached, session.start) if self.computed else session.start
        self.computed = session.start - self.cached
        self.moments.restored = self.clock()
        if self._prefill(session):
            self._decode(session)
        session.cancelled = self.finish == "cancelled"

    def _prefill(self, session: Session) -> bool:
        """Compute all but the last prompt token; False when cancelled."""
        at, last = session.start, len(self.ids) - 1
        self.ticket.emit(Prefill(at, len(self.ids), self.cached))
        while at < last:
            if self.ticket.cancelled:
                return False
            end = min((at // self.chunk + 1) * self.chunk, session.next_cut(at), last)
            if self.pressure is not None:
                end = self.pressure.chunk_end(at, end, self.chunk)
            fed = self.ids[at:end]
            self.model(mx.array([fed]), cache=session.layers)
            session.advance(fed)
            self._settle(session)
            if self.pressure is not None:
                self.pressure.computed(at, end)
            self.computed += end - at
            at = end
            self.ticket.emit(Prefill(at, len(self.ids), self.cached))
        if last > session.start:
            trim_buffers()  # prefill's activations are larger than what decode can reuse
        return not self.ticket.cancelled

    def _settle(self, session: Session) -> None:
        try:
            session.settle()
        except Exception as error:
            if self.pressure is not None and is_shortage(error):
                self.pressure.torn()
            raise

    def _step(self, session: Session, token: mx.array, step: int) -> tuple[mx.array, mx.array]:
        """Dispatch one forward pass of a token, shape (1,); the next one, not yet evaluated."""
        logits = self.model(token[None], cache=session.layers)[:, -1, :]
        sampled = self.sampling(logits, step)
        mx.async_eval(*sampled)  # type: ignore[no-untyped-call]
        return sampled

    def _decode(self, session: Session) -> None:
        wanted = min(self.max_tokens, self.limit - len(self.ids))
        seed = self.ids[-1]
        token, logprob = self._step(session, mx.array([seed]), 0)
        session.advance([seed])
        self.computed += 1
        if wanted <= 0:
            mx.eval(token)
            self._reached_first(session)
            self.finish = "length"
            return
        uncleared = 1
        while True:
            step = len(self.tokens)
            more = step + 1 < wanted and not self.ticket.cancelled
            if more:
                if session.due:
                    if self.pressure is not None:
                        self.pressure.room_to_grow()
                    session.settle()
                if uncleared >= CLEAR_EVERY:
                    mx.clear_cache()
                    uncleared = 0
                uncleared += 1
                following = self._step(session, token, step + 1)
            value = int(token.item())  # type: ignore[arg-type]
            if more:
                session.advance([value])
                if self._thought(value):
                    session.mark("thinking")
            if step == 0:
                self._reached_first(session)
            if value in self.ends:
                self.finish = "stop"
                self._release()
                return
            self.moments.last = self.clock()
            self._emit(value, float(logprob.item()), last=not more)  # type: ignore[arg-type]
            if self.text.stopped_by is not None:
                self.finish = "stop"
                return
            if not more:
                self.finish = "length" if step + 1 == wanted else "cancelled"
                return
            token, logprob = following

    def _thought(self, token: int) -> bool:
        """Whether this token completes the end of the thinking."""
        end = self.think_end
        return bool(end) and token == end[-1] and (*self.tokens, token)[-len(end) :] == end

    def _reached_first(self, session: Session) -> None:
        moments = self.moments
        moments.first = self.clock()
        assert moments.restored is not None
        session.measured(self.computed, moments.first - moments.restored)
        self.ticket.emit(Prefill(len(self.ids), len(self.ids), self.cached))

    def _emit(self, token: int, logprob: float, *, last: bool) -> None:
        """Report a token; the last one brings along the text that is still held back."""
        piece = self.text.add(token)
        if last:
            piece += self.text.finish()
        logprob = max(logprob, LOGPROB_FLOOR)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.pieces.append(piece)
        self.ticket.emit(Token(token, piece, logprob))

    def _release(self) -> None:
        """Report the text that is held back, after an end token."""
        rest = self.text.finish()
        if rest:
            self.pieces.append(rest)
            self.ticket.emit(Tail(rest))

    # --- what it reports ---------------------------------------------------------------------

    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(self.cached, self.computed, len(self.tokens))

    def timing(self) -> Timing:
        """Seconds so far."""
        return self.moments.timing(
            self.clock(), prefilled=self.computed, generated=len(self.tokens)
        )
