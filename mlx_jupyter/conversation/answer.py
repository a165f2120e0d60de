"""What a request gave, as plain data that can be pickled and kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mlx_jupyter.engine.stats import Timing, Usage

if TYPE_CHECKING:
    from mlx_jupyter.cache.plan import Cause

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: ``"system"``, ``"user"``, ``"assistant"`` or ``"tool"``.
        content: its text; data, never parsed for control tokens.
        ids: for an answer that the model made, the token ids it generated (without the end
            token), so that they are reused as they are instead of tokenising the text again.
        model: the short name of the model that made it; another one doesn't use its ids.
    """

    role: str
    content: str
    ids: tuple[int, ...] | None = None
    model: str = field(default="", compare=False)

    def to_dict(self) -> dict[str, str]:
        """The message as chat templates and other tools know it."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished (or cancelled) request.

    Attributes:
        text: the generated text.
        tokens: generated ids without the end token.
        prompt_ids: the prompt's ids as the model saw them.
        finish: ``"stop"`` (end token or stop string), ``"length"`` or ``"cancelled"``.
        usage: token counts.
        timing: seconds by phase.
        model: the model's short name.
        seed: the seed that sampling used.
        stopped_by: the stop string that ended it. Its text is cut off from ``text``, but the
            tokens that spelled it are among ``tokens``.
        messages: the conversation including this answer; empty for raw and token prompts.
        why: reasons for recomputed prompt tokens.
        logprobs: for each generated token its log-probability under the raw logits
            (log-softmax before temperature and processors), natural log, floored at -1e4.
        node: id of the trie node where the answer ends; None when nothing was recorded.
        peak_bytes: MLX's peak memory during the request.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish: Finish
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    model: str = ""
    seed: int = 0
    stopped_by: str | None = None
    messages: tuple[Message, ...] = ()
    why: tuple[Cause, ...] = ()
    logprobs: tuple[float, ...] = ()
    node: int | None = None
    peak_bytes: int = 0

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The answer as JSON-ready data."""
        from dataclasses import asdict

        return asdict(self)
