"""Every error a user can meet, under one root, each worded as one line that says what to do.

Nothing below imports MLX or IPython: any layer may raise these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_jupyter.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_jupyter.conversation.answer import Answer


class LLMError(Exception):
    """Root of the package's errors."""


class BadRequest(LLMError):
    """The request itself is wrong: an empty prompt, an option out of range, malformed messages."""


class ContextOverflow(BadRequest):
    """The prompt doesn't fit into the context.

    Attributes:
        prompt: tokens in the prompt.
        limit: tokens that fit.
        origin: where the limit comes from, such as ``"the model (max_position_embeddings)"``.
    """

    def __init__(self, prompt: int, limit: int, origin: str) -> None:
        super().__init__(
            f"The prompt has {prompt:,} tokens but the context holds {limit:,} "
            f"(set by {origin}). Shorten the prompt or the conversation."
        )
        self.prompt = prompt
        self.limit = limit
        self.origin = origin


class ModelNotFound(LLMError):
    """No source knows the model.

    Attributes:
        name: what was asked for.
        tried: one line for each place that was looked at, with what it answered.
    """

    def __init__(self, name: str, tried: Sequence[str]) -> None:
        super().__init__(f"Model {name!r} was not found. Tried: " + "; ".join(tried) + ".")
        self.name = name
        self.tried = tuple(tried)


class BadModel(LLMError):
    """The model's files are there but wrong, hostile or not supported.

    Attributes:
        path: the file or directory at fault.
        reason: what is wrong with it.
    """

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason


class ModelDoesNotFit(LLMError):
    """Not enough memory for the model, even after idle ones were unloaded.

    Attributes:
        needed: bytes that the load needs.
        free: bytes that are free.
        holders: (name, bytes) of what holds memory now.
    """

    def __init__(
        self, name: str, needed: int, free: int, holders: Sequence[tuple[str, int]]
    ) -> None:
        held = ", ".join(f"{who} {human_bytes(size)}" for who, size in holders) or "nothing of ours"
        super().__init__(
            f"{name} needs {human_bytes(needed)} but {human_bytes(free)} are free "
            f"(held: {held}). Unload a model or choose a smaller one."
        )
        self.needed = needed
        self.free = free
        self.holders = tuple(holders)


class EngineClosed(LLMError):
    """The engine has ended; make a new one."""

    def __init__(
        self, message: str = "The engine is closed. Make a new one with mlx_jupyter.Engine()."
    ) -> None:
        super().__init__(message)


class ComputeError(LLMError):
    """The model, the sampler or the template raised; the engine itself is sound."""


class OutOfMemory(ComputeError):
    """There is no room for the next tokens, even after pages were given up.

    Attributes:
        needed: bytes that going on takes.
        free: bytes that are free.
        done: tokens that are computed; they are kept as far as they fit.
        total: tokens of the prompt.
    """

    def __init__(self, needed: int, free: int, done: int, total: int, detail: str = "") -> None:
        super().__init__(
            f"Out of memory after {done:,} of {total:,} prompt tokens: going on needs about "
            f"{human_bytes(needed)} but {human_bytes(free)} are free. Unload a model, shorten the "
            "prompt or raise the memory limit; what was computed is kept as far as it fits."
            + (f" ({detail})" if detail else "")
        )
        self.needed = needed
        self.free = free
        self.done = done
        self.total = total


class Interrupted(Exception):
    """The caller's cancel flag was set; nothing half-made is left in use. Never reaches users."""


class Cancelled(KeyboardInterrupt):
    """The user's interrupt ended a request; what was computed is kept.

    A ``KeyboardInterrupt``, so that Run All stops and ``except Exception`` lets it pass.

    Attributes:
        answer: the partial answer, its ``finish`` is ``"cancelled"``.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__("Interrupted; the partial answer is kept.")
        self.answer = answer
