"""Messages to token ids: pure, byte-stable, and message content stays data.

Contents are replaced by unique sentinels, the chat template is rendered, and the text is cut at
the sentinels: control tokens are parsed in the template's part only. The same cut shows where an
earlier answer stands, so that the ids that the model generated are used again as they are.

The template is rendered with the real contents too. Where both texts agree, the template treats
the content as opaque and the cut is exact. Where they don't (a template that escapes or looks
into a content), sentinels stand for control tokens' texts alone, which no template looks into.

Never changes the caller's messages; never looks at what is cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_jupyter.conversation.answer import Message
from mlx_jupyter.errors import BadRequest
from mlx_jupyter.models.codec import Codec, codec_of
from mlx_jupyter.models.messages import canonical, normalise, plain, valid
from mlx_jupyter.models.sentinels import Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from mlx_jupyter.cache.view import MarkKind

__all__ = [
    "Rendered",
    "block_ends",
    "encode_raw",
    "has_template",
    "message_at",
    "normalise",
    "render",
]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model sees it.

    Attributes:
        ids: token ids.
        marks: ascending (offset, kind): ``"system"`` where the system prompt's block ends,
            ``"turn"`` where a later message's block ends, ``"prompt"`` where the conversation
            ends and the tail that starts the answer begins.
        text: the rendered text.
    """

    ids: tuple[int, ...]
    marks: tuple[tuple[int, MarkKind], ...]
    text: str


def render(
    tokenizer: Any,
    messages: Sequence[Message | Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    generation: bool = True,
    clock: datetime | None = None,
) -> Rendered:
    """Render a conversation with the tokenizer's chat template.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper`` or a transformers tokenizer.
        messages: the conversation; mappings may carry what the template knows beyond role and
            content, such as ``tool_calls`` and ``reasoning_content``.
        tools: schemas of the tools; the order of their keys doesn't matter.
        generation: whether to add the tail that starts the next answer.
        clock: the time that the template is told when it asks for it; the real one when None.

    Raises:
        BadRequest: the template refuses the conversation, or there is no template.
        ComputeError: the template itself is broken.
    """
    codec = codec_of(tokenizer)
    given = [plain(message) for message in messages]
    ids = {
        i: message.ids
        for i, message in enumerate(messages)
        if isinstance(message, Message) and message.ids and message.role == "assistant"
    }
    if not has_template(tokenizer):
        return _without_template(codec, given)
    schemas = canonical(list(tools)) if tools else None
    source = Source(tokenizer, codec, given, ids, schemas, clock)
    cut = source.cut(generation)
    encoded = codec.encode(cut.spans)
    marks: dict[int, MarkKind] = {}
    for at, kind in cut.boundaries(codec, [message["role"] for message in given]):
        offset = encoded.offset(at)
        if offset:
            marks[offset] = "system" if marks.get(offset) == "system" and kind == "turn" else kind
    return Rendered(encoded.ids, tuple(sorted(marks.items())), cut.text)


def encode_raw(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of a raw prompt: control tokens in it are parsed, no template.

    The first token that the tokenizer would add to a plain text is added unless it is there.

    Raises:
        BadRequest: the text is empty.
    """
    if not text:
        raise BadRequest("The prompt is empty. Write something for the model to go on from.")
    codec = codec_of(tokenizer)
    ids = tuple(codec.parse([valid(text, "The prompt")])[0])
    bos = codec.bos()
    return ids if ids[: len(bos)] == bos else bos + ids


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer knows how a conversation is written."""
    known = getattr(tokenizer, "has_chat_template", None)
    if isinstance(known, bool):
        return known
    return getattr(tokenizer, "chat_template", None) is not None


def _without_template(codec: Codec, messages: Sequence[dict[str, Any]]) -> Rendered:
    if [message["role"] for message in messages] != ["user"]:
        raise BadRequest(
            "The model has no chat template, so it can't hold a conversation or take a system "
            "prompt. Send one prompt alone, or use --raw."
        )
    text = messages[0]["content"]
    ids = (*codec.bos(), *codec.data(text, first=True))
    return Rendered(ids, ((len(ids), "prompt"),), text)


def message_at(rendered: Rendered, messages: Sequence[Message], at: int) -> int:
    """Index of the message whose block holds token ``at``.

    The last index when ``at`` lies in the tail that starts the next answer.
    """
    _, ends = _ends(rendered.marks, messages)
    return min(sum(end <= at for end in ends), len(messages) - 1)


def block_ends(
    marks: Sequence[tuple[int, MarkKind]], messages: Sequence[Message], size: int
) -> tuple[int, ...]:
    """Where the template's beginning ends (0 without a system prompt of its own), then each block.

    Args:
        marks: of the rendered conversation.
        messages: the conversation.
        size: tokens that it has.

    Returns:
        One offset more than there are messages; none at all where the marks don't tell them apart.
    """
    own, ends = _ends(marks, messages)
    if len(ends) != len(messages) - 1:
        return ()
    return (own, *ends, next((at for at, kind in marks if kind == "prompt"), size))


def _ends(
    marks: Sequence[tuple[int, MarkKind]], messages: Sequence[Message]
) -> tuple[int, list[int]]:
    """Where the template's own system prompt ends, and the blocks of all but the last message."""
    ends = [offset for offset, kind in marks if kind != "prompt"]
    own_system = bool(messages) and messages[0].role == "system"
    if not own_system and any(kind == "system" for _, kind in marks):
        return ends[0], ends[1:]  # it comes before the first message
    return 0, ends
