"""Messages as callers give them: checked, and brought into one canonical form.

Never changes what the caller gave; the same conversation gives the same canonical form whatever
the order of keys was and whether a tool call's arguments came as a mapping or as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_jupyter.conversation.answer import Message
from mlx_jupyter.errors import BadRequest

ROLES = ("system", "user", "assistant", "tool")
# Keys of a tool's schema in the order that models are trained on; all others follow by name.
_SCHEMA_ORDER = {k: i for i, k in enumerate(("type", "function", "name", "description"))}


def normalise(
    prompt: str | Sequence[Message | Mapping[str, Any]], system: str | None = None
) -> tuple[Message, ...]:
    """Check a prompt and bring it into the form of messages.

    Args:
        prompt: one user message's text, or messages with ``role`` and ``content``.
        system: a system prompt to put first.

    Raises:
        BadRequest: an empty prompt, an unknown role or key, a content that isn't text.
    """
    given = [Message("user", prompt)] if isinstance(prompt, str) else prompt
    if isinstance(given, Message | Mapping) or not isinstance(given, Sequence):
        raise BadRequest(f"A prompt is text or a list of messages, not {type(prompt).__name__}.")
    messages = [_message(each, number) for number, each in enumerate(given, 1)]
    if not messages or not messages[-1].content.strip():
        raise BadRequest("The prompt is empty. Write something for the model to answer.")
    if system is not None and system.strip():
        if messages[0].role == "system" and messages[0].content != system:
            raise BadRequest("The messages have a system prompt already; give only one of the two.")
        if messages[0].role != "system":
            messages.insert(0, _message(Message("system", system), 0))
    return tuple(messages)


def _message(given: object, number: int) -> Message:
    if isinstance(given, Message):
        role, content, ids, model = given.role, given.content, given.ids, given.model
    elif isinstance(given, Mapping):
        extra = [key for key in given if key not in ("role", "content") and given[key]]
        if extra or "role" not in given:
            problem = f"the unknown key {extra[0]!r}" if extra else "no role"
            raise BadRequest(f"Message {number} has {problem}; it takes role and content.")
        role, content = given["role"], _text_of(given.get("content"), number)
        ids, model = None, ""
    else:
        raise BadRequest(f"Message {number} is {type(given).__name__}, not a dict or a Message.")
    if role not in ROLES:
        raise BadRequest(f"Message {number} has the role {role!r}; known: {', '.join(ROLES)}.")
    if not isinstance(content, str):
        raise BadRequest(f"Message {number}'s content is {type(content).__name__}, not text.")
    return Message(role, valid(content, f"Message {number}"), ids, model)


def _text_of(content: Any, number: int) -> Any:
    """A content given as text parts, joined; anything else as it is."""
    if content is None or not isinstance(content, list | tuple):
        return content
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadRequest(f"Message {number} has a part of type {kind!r}; only text is taken.")
    return "".join(part["text"] for part in content)


def valid(text: str, what: str) -> str:
    """The text; ``BadRequest`` when it can't be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = text[error.start]
        raise BadRequest(f"{what} holds {bad!r}, half of a surrogate pair, not text.") from None
    return text


def plain(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    """A fresh message for the template, every nested mapping in canonical key order."""
    if isinstance(message, Message):
        return {"role": message.role, "content": message.content}
    made: dict[str, Any] = {key: canonical(value) for key, value in message.items()}
    for call in made.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = canonical(json.loads(function["arguments"]))
            except ValueError:
                continue  # not JSON after all: the template gets the text
    return made


def canonical(value: Any) -> Any:
    """A deep copy whose mappings have one key order, whatever the caller's was."""
    if isinstance(value, Mapping):
        ranked = sorted(value, key=lambda key: (_SCHEMA_ORDER.get(key, 99), str(key)))
        return {key: canonical(value[key]) for key in ranked}
    if isinstance(value, list | tuple):
        return [canonical(each) for each in value]
    return value
