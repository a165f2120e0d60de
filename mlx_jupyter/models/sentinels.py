"""A chat template rendered with sentinels in place of data, and cut there.

Sentinels stand for whole contents; the cut text must equal the text rendered with the real
contents, or it isn't used. Where a template escapes or looks into a content, sentinels stand for
control tokens' texts alone, which no template has reason to look into.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mlx_jupyter.errors import BadRequest, ComputeError
from mlx_jupyter.models.codec import Codec, Span

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from mlx_jupyter.cache.view import MarkKind


_NOW = re.compile(r"""\bstrftime_now\(\s*(["'])([^"'\\{}]*)\1\s*\)""")


def asks_time(template: str) -> bool:
    """Whether a template asks for the time in a way that a clock of ours can answer."""
    return _NOW.search(template) is not None


class Masks:
    """Sentinels and what they stand for."""

    def __init__(self, codec: Codec, texts: str) -> None:
        self._codec = codec
        number = 0
        while f"ZQX{number}N" in texts:
            number += 1
        self._base = f"ZQX{number}N"
        self.pattern = re.compile(self._base + r"(\d{6})Z")
        self.table: list[Span] = []
        self.masked: dict[int, str] = {}

    def content(self, text: str, owner: int, *, assistant: bool) -> str:
        """A content with sentinels in place of its text.

        White space at the ends and thinking tags stay, so that the template trims and cuts them
        as it would.
        """
        parts = [text]
        if assistant and self._codec.tags:
            parts = re.split("(" + "|".join(map(re.escape, self._codec.tags)) + ")", text)
        # The split puts the tags at odd places.
        masked = "".join(p if i % 2 else self._core(p, owner) for i, p in enumerate(parts))
        self.masked[owner] = masked
        return masked

    def control(self, value: Any) -> Any:
        """Any nested value with sentinels in place of the control tokens in its texts."""
        if isinstance(value, str):
            return self._codec.pattern.sub(lambda found: self._new(found[0], None), value)
        if isinstance(value, dict):
            return {self.control(key): self.control(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.control(each) for each in value]
        return value

    def undo(self, masked: str) -> str:
        """The text behind a masked one."""
        return self.pattern.sub(lambda found: self.table[int(found[1])].text, masked)

    def units(self, masked: str) -> list[str]:
        """A masked text as sentinels and single characters."""
        return re.findall(f"{self.pattern.pattern.replace('(', '(?:')}|.", masked, re.DOTALL)

    def _core(self, text: str, owner: int) -> str:
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        return text[:start] + self._new(core, owner) + text[start + len(core) :]

    def _new(self, text: str, owner: int | None) -> str:
        self.table.append(Span(text, data=True, owner=owner))
        return f"{self._base}{len(self.table) - 1:06d}Z"


@dataclass(frozen=True, slots=True)
class Cut:
    """A rendered text in spans; ``tail`` is where the conversation ends in it, when known."""

    spans: tuple[Span, ...]
    text: str
    tail: int | None

    def boundaries(self, codec: Codec, roles: Sequence[str]) -> list[tuple[int, MarkKind]]:
        """Characters where a message's block ends, and what ends there."""
        regions = self._regions()
        found: list[tuple[int, MarkKind]] = []
        if regions:
            last = self.text[regions[-1][2] :]
            stop = codec.pattern.search(last)
            closing = stop[0] if stop else None
            if roles[regions[0][0]] != "system":
                at = _block_end(codec, self.text[: regions[0][1]], closing)
                if at is not None:
                    found.append((at, "system"))
            for (owner, _, end), (_, start, _) in pairwise(regions):
                at = _block_end(codec, self.text[end:start], closing)
                if at is None:
                    first = codec.pattern.search(self.text[end:start])
                    at = _past_space(codec, self.text[end:start], first.end()) if first else None
                kind: MarkKind = "system" if roles[owner] == "system" else "turn"
                found.append((start if at is None else end + at, kind))
        if self.tail is not None:
            found.append((self.tail, "prompt"))
        return found

    def _regions(self) -> list[tuple[int, int, int]]:
        """(message, start, end) of the contents, in the text's order."""
        regions: list[tuple[int, int, int]] = []
        at = 0
        for span in self.spans:
            end = at + len(span.text)
            if span.owner is not None:
                if regions and regions[-1][0] == span.owner:
                    regions[-1] = (span.owner, regions[-1][1], end)
                else:
                    regions.append((span.owner, at, end))
            at = end
        return regions


def _block_end(codec: Codec, gap: str, closing: str | None) -> int | None:
    """Where a block ends in the template's text between two contents: past its closing token."""
    if closing is None or closing not in gap:
        return None
    return _past_space(codec, gap, gap.rindex(closing) + len(closing))


def _past_space(codec: Codec, gap: str, at: int) -> int:
    """Past the white space at ``at`` when a control token follows it."""
    after = at + len(gap[at:]) - len(gap[at:].lstrip())
    return after if codec.pattern.match(gap, after) else at


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be rendered."""

    tokenizer: Any
    codec: Codec
    messages: list[dict[str, Any]]
    ids: dict[int, tuple[int, ...]]
    tools: list[Any] | None
    clock: datetime | None = None

    def cut(self, generation: bool) -> Cut:
        """Render and cut; see the module's head for how the cut is checked.

        Raises:
            BadRequest: the template refuses the conversation, leaves the system prompt out or
                takes data for structure.
            ComputeError: the template is broken.
        """
        real = self._apply(self.messages, self.tools, generation)
        everything = f"{self.messages}{self.tools}{self.codec.template}{real}"
        first = None
        for whole in (set(range(len(self.messages))), set(self.ids), set[int]()):
            masks = Masks(self.codec, everything)
            cut = self._try(masks, whole, generation)
            if cut is None:
                continue
            if cut.text == real:
                if not self._shows_all(cut, masks, "system"):
                    raise BadRequest(
                        "The model's chat template leaves the system prompt out. "
                        "Put it into the first user message."
                    )
                return cut
            first = first or (cut, masks)
        if first is not None:
            cut, masks = first
            own = [span.text for span in cut.spans if not span.data]
            control = self.codec.pattern.findall
            if control(real) == [found for text in own for found in control(text)]:
                return Cut((Span(real),), real, None)  # changed by the template beyond danger
            if self._shows_all(cut, masks, "system", "user", "tool"):
                return cut  # the template would take data for structure; it isn't let
        raise BadRequest(
            "The model's chat template reads meaning into a control token's text in a message. "
            "Take it out, or use --raw."
        )

    def _try(self, masks: Masks, whole: set[int], generation: bool) -> Cut | None:
        masked = [self._mask(masks, i, each, i in whole) for i, each in enumerate(self.messages)]
        tools = masks.control(self.tools)
        try:
            text = self._apply(masked, tools, generation)
        except (BadRequest, ComputeError):
            return None
        try:
            other = self._apply(masked, tools, not generation)
        except (BadRequest, ComputeError):
            other = ""
        bare, led = (other, text) if generation else (text, other)
        tail = led[len(bare) :] if bare and led.startswith(bare) else None
        spans = self._spans(masks, text, tail)
        full = "".join(span.text for span in spans)
        if tail is None:
            return Cut(spans, full, None)
        return Cut(spans, full, len(full) - len(tail) if generation else len(full))

    def _mask(
        self, masks: Masks, index: int, message: dict[str, Any], whole: bool
    ) -> dict[str, Any]:
        content = message.get("content")
        if not whole or not isinstance(content, str):
            return {k: v if k == "role" else masks.control(v) for k, v in message.items()}
        rest = {k: masks.control(v) for k, v in message.items() if k not in ("role", "content")}
        assistant = message["role"] == "assistant"
        masked = masks.content(content, index, assistant=assistant)
        return {"role": message["role"], "content": masked, **rest}

    def _spans(self, masks: Masks, text: str, tail: str | None) -> tuple[Span, ...]:
        spans: list[Span] = []
        at = 0
        for found in masks.pattern.finditer(text):
            if found.start() < at:
                continue
            span = masks.table[int(found[1])]
            start, end, answer = found.start(), found.end(), [span]
            if span.owner in self.ids:
                start, end, answer = self._answer(masks, text, found, at, tail)
            spans += [Span(text[at:start]), *answer]
            at = end
        return (*spans, Span(text[at:]))

    def _answer(
        self, masks: Masks, text: str, found: re.Match[str], low: int, tail: str | None
    ) -> tuple[int, int, list[Span]]:
        """How much of an answer stands around a sentinel, as it was, and its ids.

        Args:
            masks: what ``text`` was rendered with.
            text: the rendered text.
            found: the sentinel in it.
            low: nothing before this belongs to the answer.
            tail: what the template writes before a new answer.

        Returns:
            Start and end in ``text``, and the spans that stand for it.
        """
        core = masks.table[int(found[1])]
        owner = core.owner
        assert owner is not None
        units = masks.units(masks.masked[owner])
        first = units.index(found[0])
        last = first + 1
        start, end = found.span()
        # White space before the sentinel is the answer's only if the tail stands before it.
        at, back = start, first
        while tail and not text.endswith(tail, low, at):
            if not back or not text.endswith(units[back - 1], low, at):
                break
            back -= 1
            at -= len(units[back])
        else:
            start, first = at, back
        while last < len(units) and text.startswith(units[last], end):
            end += len(units[last])
            last += 1
        before = masks.undo("".join(units[:first]))
        shown = masks.undo("".join(units[first:last]))
        ids, size = own_ids(self.codec, self.ids[owner], before, shown)
        if not ids:
            # Tokenised apart, so that the tokens before it stay those of the prompt back then.
            return *found.span(), [replace(core, ids=tuple(self.codec.data(core.text)))]
        spans = [Span(shown[:size], data=True, ids=ids, owner=owner)]
        if size < len(shown):
            spans.append(Span(shown[size:], data=True, owner=owner))
        return start, end, spans

    def _apply(self, messages: list[dict[str, Any]], tools: Any, generation: bool) -> str:
        from jinja2 import TemplateError

        try:
            told = self._stopped(tools)
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generation, tokenize=False, **told
            )
        except Exception as error:
            if type(error) is TemplateError:  # what raise_exception raises in a template
                raise BadRequest(
                    f"The model's chat template refuses the conversation: {error}"
                ) from error
            raise ComputeError(f"The model's chat template failed: {error}") from error
        return text

    def _stopped(self, tools: Any) -> dict[str, str]:
        """The template with the clock's text where it asks for the time, if there is a clock.

        As a function the clock wouldn't get there: transformers hands on texts only.
        """
        clock = self.clock
        if clock is None or not asks_time(self.codec.template):
            return {}
        template: str = self.tokenizer.get_chat_template(None, tools=tools)
        return {"chat_template": _NOW.sub(lambda found: repr(clock.strftime(found[2])), template)}

    def _shows_all(self, cut: Cut, masks: Masks, *roles: str) -> bool:
        """Whether every masked content of these roles came through the template."""
        shown = {span.owner for span in cut.spans}
        return all(
            index in shown
            for index, masked in masks.masked.items()
            if self.messages[index]["role"] in roles and masks.pattern.search(masked)
        )


def own_ids(
    codec: Codec, ids: tuple[int, ...], before: str, shown: str
) -> tuple[tuple[int, ...], int]:
    """The ids of an answer that stand for a part of its text.

    Args:
        codec: of the tokenizer that made the answer.
        ids: the whole answer's.
        before: the answer's text before the part.
        shown: the part.

    Returns:
        The ids, and how many characters of ``shown`` they cover: all, or up to the last token
        boundary; no ids when the part begins inside a token or isn't what the ids say.
    """
    if not before and codec.decode(ids) == shown:
        return ids, len(shown)
    low = 0
    if before:
        low = bisect_left(range(len(ids)), len(before), key=lambda k: len(codec.decode(ids[:k])))
        if codec.decode(ids[:low]) != before:
            return (), 0

    def beyond(count: int) -> bool:
        # A character in the making decodes to a replacement character at the end.
        text = codec.decode(ids[low : low + count]).rstrip("\ufffd")
        return not shown.startswith(text)

    high = low + bisect_left(range(len(ids) - low + 1), True, key=beyond) - 1
    while high > low and not shown.startswith(codec.decode(ids[low:high])):
        high -= 1
    if high <= low:
        return (), 0
    return ids[low:high], len(codec.decode(ids[low:high]))
