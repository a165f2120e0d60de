"""Checks a chat template once, at load: does a growing conversation keep its beginning?

What would make each prompt differ from the last one's beginning is found by rendering small
conversations, and told in words: a text that isn't the same twice, a clock, an earlier turn that is
written otherwise later, tools that move or depend on the order of a schema's keys.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from mlx_jupyter.conversation.answer import Message
from mlx_jupyter.errors import LLMError
from mlx_jupyter.models.codec import codec_of, common_prefix
from mlx_jupyter.models.template import has_template, message_at, render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_jupyter.models.codec import Codec
    from mlx_jupyter.models.template import Rendered

_ASKED = [Message("user", "What is two and two?")]
_NOON = datetime(2024, 5, 14, 12, 0, 0)
_STEPS = (
    (timedelta(seconds=61), "every minute"),
    (timedelta(hours=1), "every hour"),
    (timedelta(days=1), "every day"),
    (timedelta(days=370), "with the month or year"),
)


def lint(tokenizer: Any) -> list[str]:
    """Check that a tokenizer's chat template lets a growing conversation reuse its beginning.

    Returns:
        One line for people for each fault found; nothing for a sound template.
    """
    if not has_template(tokenizer):
        return ["The model has no chat template: it takes single prompts only."]
    try:
        first = render(tokenizer, _ASKED, clock=_NOON)
        if render(tokenizer, _ASKED, clock=_NOON) != first:
            return ["The chat template gives another text each time: nothing is reused."]
        codec = codec_of(tokenizer)
        return [
            *_clock(tokenizer, codec, first),
            *_turns(tokenizer, codec, first),
            *_tools(tokenizer, codec),
        ]
    except Exception as error:  # a template or tokenizer of another's costs the check, not the load
        return [f"The chat template can't be checked. {error or type(error).__name__}"]


def _clock(tokenizer: Any, codec: Codec, first: Rendered) -> list[str]:
    """A time in the prompt, and how soon it changes."""
    for step, often in _STEPS:
        later = render(tokenizer, _ASKED, clock=_NOON + step)
        if later.ids != first.ids:
            at = common_prefix(first.ids, later.ids)
            was, now = (codec.decode(ids[at : at + 1]) for ids in (first.ids, later.ids))
            return [
                f"The chat template writes the time, which changes {often}, at token {at:,} "
                f"({was!r} becomes {now!r}): all behind it is computed again then. The filter "
                "frozen-clock keeps it still."
            ]
    return []


def _turns(tokenizer: Any, codec: Codec, first: Rendered) -> list[str]:
    """An earlier turn that a later one changes."""
    answers = ["Four."]
    if codec.tags:
        answers.append("<think>\nTwo and two.\n</think>\n\nFour.")
    found = []
    for answer in answers:
        ids = tuple(codec.parse([answer])[0])
        talk = [*_ASKED, Message("assistant", answer, ids), Message("user", "And one more?")]
        second = render(tokenizer, talk, clock=_NOON)
        old = first.ids + ids
        same = common_prefix(old, second.ids)
        if same < len(old):
            number = message_at(second, talk, same)
            was, now = codec.decode(old[same : same + 1]), codec.decode(second.ids[same : same + 1])
            what = "a thinking answer" if answer in answers[1:] else "an answer"
            found.append(
                f"After {what} the chat template writes the conversation anew from token {same:,} "
                f"({was!r} becomes {now!r}, in message {number + 1}, the {talk[number].role}'s): "
                "what follows is computed again."
            )
    return found


def _tools(tokenizer: Any, codec: Codec) -> list[str]:
    """Tools whose text changes although they are the same; nothing where there are none."""
    plain = _with(tokenizer, _ASKED, None)
    once = _with(tokenizer, _ASKED, [_tool("add"), _tool("sub")])
    if plain is None or once is None or once.ids == plain.ids:
        return []  # it knows no tools, or won't take these
    found = []
    if _with(tokenizer, _ASKED, [_tool("add", turned=True), _tool("sub", turned=True)]) != once:
        found.append("The chat template writes a tool by the order of its schema's keys.")
    answer = Message("assistant", "Four.", tuple(codec.parse(["Four."])[0]))
    talk = [*_ASKED, answer, Message("user", "And one more?")]
    grown, bare = (_with(tokenizer, talk, each) for each in ([_tool("add"), _tool("sub")], None))
    if grown is not None and bare is not None:
        same = common_prefix(once.ids, grown.ids)
        # Without tools it may break too; that is told already.
        if same < len(once.ids) and common_prefix(plain.ids, bare.ids) == len(plain.ids):
            found.append(
                f"With tools the chat template writes the conversation anew in each turn, from "
                f"token {same:,}: what follows is computed again."
            )
    return found


def tool_order(tokenizer: Any) -> int | None:
    """From which token on the same tools in another order are another prompt; None: they aren't."""
    one, two = _tool("add"), _tool("sub")
    first, second = (_with(tokenizer, _ASKED, each) for each in ([one, two], [two, one]))
    if first is None or second is None or first.ids == second.ids:
        return None
    return common_prefix(first.ids, second.ids)


def _with(
    tokenizer: Any, talk: Sequence[Message], tools: Sequence[dict[str, Any]] | None
) -> Rendered | None:
    try:
        return render(tokenizer, talk, tools=tools, clock=_NOON)
    except LLMError:
        return None


def _tool(name: str, *, turned: bool = False) -> dict[str, Any]:
    """A tool's schema; ``turned`` with its keys the other way round."""
    kind = {"type": "number", "description": "a summand"}
    function = {"name": name, "description": f"{name} numbers", "parameters": {"a": kind}}
    made = {"type": "function", "function": function}
    if not turned:
        return made
    function["parameters"] = {"a": dict(reversed(kind.items()))}
    return {"function": dict(reversed(function.items())), "type": "function"}
