"""Text to token ids where some of the text is a template's and some is data.

Promises: a control token is parsed only where the template wrote it; inside data its text is
encoded as ordinary text, and no control token's id ever comes out of data. Where no data looks
like a control token the ids are those of the tokenizer for the whole text. Encoding is a pure
function of the spans. Works on a transformers tokenizer, wrapped by mlx-lm or not.
"""

from __future__ import annotations

import re
import threading
import weakref
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

from mlx_jupyter.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

THINK_TAGS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a rendered text.

    Attributes:
        text: what it says.
        data: whether control tokens in it are ordinary text.
        ids: its ids when they are known already (an answer's own).
        owner: index of the message whose content it is; None for the template's own text.
    """

    text: str
    data: bool = False
    ids: tuple[int, ...] | None = None
    owner: int | None = None


@dataclass(slots=True)
class _Chunk:
    """Text that is tokenised together: a control token and what follows up to the next one."""

    start: int
    lead: str = ""
    parts: list[Span] = field(default_factory=list)
    ids: Sequence[int] = ()
    known: bool = False

    @property
    def text(self) -> str:
        return self.lead + "".join(part.text for part in self.parts)


class Encoded:
    """The ids of some spans, and where positions of the text fall among them."""

    def __init__(self, codec: Codec, chunks: Sequence[_Chunk]) -> None:
        self._codec = codec
        self._chunks = chunks
        self._starts = [chunk.start for chunk in chunks]
        self._offsets = [0, *accumulate(len(chunk.ids) for chunk in chunks)]
        self.ids = tuple(i for chunk in chunks for i in chunk.ids)

    def offset(self, at: int) -> int:
        """The last token boundary at or before character ``at`` that text after it can't move."""
        index = bisect_right(self._starts, at) - 1
        if index < 0:
            return 0
        chunk = self._chunks[index]
        inside = at - chunk.start
        if inside <= 0:
            return self._offsets[index]
        if inside >= len(chunk.text):
            return self._offsets[index + 1]
        if chunk.known:
            return self._offsets[index]
        head = self._codec.parse([chunk.text[:inside]])[0]
        return self._offsets[index] + common_prefix(head, chunk.ids)


class Codec:
    """A tokenizer's control tokens and the two ways to encode text around them.

    Attributes:
        template: the source of its chat template; empty when there is none or it is code.
        control: text to id of the tokens that structure a conversation: the special ones, and
            other added tokens that look like tags and that the template writes.
        tags: the thinking tags that the template looks for.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        # Weak: codecs are kept by tokenizer and mustn't keep it alive.
        self._tokenizer = weakref.ref(tokenizer)
        self.template = template
        self.control = {
            token.content: id_
            for id_, token in tokenizer.added_tokens_decoder.items()
            if _structural(token.content, bool(token.special), template)
        }
        self.tags = tuple(tag for tag in THINK_TAGS if tag in template)
        self._ids = frozenset(self.control.values())
        longest_first = sorted(self.control, key=lambda text: (-len(text), text))
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._lock = threading.Lock()
        newline, letter, both = self.parse(["\n", "a", "\na"])
        self._newline = newline
        self._prefixes = both[: len(newline)] == newline and both[len(newline) :] != letter

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer; it must still be in use."""
        tokenizer = self._tokenizer()
        assert tokenizer is not None, "the tokenizer is gone"
        return tokenizer

    def parse(self, texts: Sequence[str], *, split: bool = False) -> list[list[int]]:
        """Ids of each text, nothing added; with ``split`` special tokens are ordinary text."""
        if not texts:
            return []
        with self._lock:
            encoded = self.tokenizer(
                list(texts),
                add_special_tokens=False,
                split_special_tokens=split,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        return [list(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, as it is."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def bos(self) -> tuple[int, ...]:
        """What the tokenizer puts before a plain text: its first token, or nothing."""
        first = self.tokenizer.bos_token_id
        if first is None or list(self.tokenizer.encode("a"))[:1] != [first]:
            return ()
        return (int(first),)

    def data(self, text: str, *, first: bool = False) -> list[int]:
        """Ids of data: control tokens in it become ordinary text.

        Args:
            text: the data.
            first: nothing stands before it, so that a tokenizer's own first space is right.

        Raises:
            BadRequest: the tokenizer makes a control token of it whatever is done.
        """
        ids = self._follow([text], split=True, first=first)[0]
        if self._clean(ids):
            return ids
        for pieces in (list(self._broken(text)), list(text)):
            ids = [i for each in self._follow(pieces, split=True, first=first) for i in each]
            if self._clean(ids):
                return ids
        found = self.pattern.search(text)
        raise BadRequest(
            f"The model's tokenizer can't take {found[0] if found else text[:40]!r} as ordinary "
            "text. Take it out of the message, or use --raw."
        )

    def encode(self, spans: Iterable[Span]) -> Encoded:
        """Ids of the spans one after the other; see the module's promises."""
        chunks = list(self._chunks(spans))
        led = [chunk for chunk in chunks if not chunk.known and (chunk.lead or not chunk.start)]
        free = [chunk for chunk in chunks if not chunk.known and chunk.start and not chunk.lead]
        for chunk, ids in zip(led, self.parse([c.text for c in led]), strict=True):
            chunk.ids = ids
        for chunk, ids in zip(free, self._follow([c.text for c in free]), strict=True):
            chunk.ids = ids
        for chunk in chunks:
            if not chunk.known and not self._whole(chunk):
                chunk.ids = self._apart(chunk)
        return Encoded(self, chunks)

    def _chunks(self, spans: Iterable[Span]) -> Iterator[_Chunk]:
        at = 0
        chunk = _Chunk(0)
        for span in spans:
            if span.ids is not None:
                yield chunk
                yield _Chunk(at, parts=[span], ids=span.ids, known=True)
                at += len(span.text)
                chunk = _Chunk(at)
                continue
            if span.data:
                chunk.parts.append(span)
                at += len(span.text)
                continue
            done = 0
            for found in self.pattern.finditer(span.text):
                chunk.parts.append(Span(span.text[done : found.start()]))
                yield chunk
                chunk = _Chunk(at + found.start(), lead=found[0])
                done = found.end()
            chunk.parts.append(Span(span.text[done:]))
            at += len(span.text)
        yield chunk

    def _whole(self, chunk: _Chunk) -> bool:
        """Whether encoding the chunk in one piece parsed its own control token and no other."""
        if not chunk.lead:
            return self._clean(chunk.ids)
        return chunk.ids[:1] == [self.control[chunk.lead]] and self._clean(chunk.ids[1:])

    def _apart(self, chunk: _Chunk) -> list[int]:
        ids = [self.control[chunk.lead]] if chunk.lead else []
        first = not chunk.start and not chunk.lead
        for part in chunk.parts:
            if part.text:
                ids += self.data(part.text, first=first)
                first = False
        return ids

    def _follow(
        self, texts: Sequence[str], *, split: bool = False, first: bool = False
    ) -> list[list[int]]:
        """Ids of texts that follow other text: without the space that some tokenizers put first.

        Such a tokenizer is given a newline to put its space before, whose ids are taken off.
        """
        if first or not self._prefixes:
            return self.parse(texts, split=split)
        size = len(self._newline)
        after = self.parse([f"\n{text}" for text in texts], split=split)
        plain = self.parse(texts, split=split)
        return [
            long[size:] if long[:size] == self._newline else short
            for long, short in zip(after, plain, strict=True)
        ]

    def _broken(self, text: str) -> Iterator[str]:
        """The text cut after the first character of every control token in it."""
        done = 0
        while found := self.pattern.search(text, done):
            yield text[done : found.start() + 1]
            done = found.start() + 1
        if text[done:]:
            yield text[done:]

    def _clean(self, ids: Iterable[int]) -> bool:
        return self._ids.isdisjoint(ids)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


_codecs: weakref.WeakKeyDictionary[Any, Codec] = weakref.WeakKeyDictionary()
_codecs_lock = threading.Lock()


def codec_of(tokenizer: Any) -> Codec:
    """The codec of a tokenizer, made once for each template it carries."""
    inner = getattr(tokenizer, "_tokenizer", None)
    if not hasattr(inner, "convert_tokens_to_ids"):
        inner = tokenizer
    template = _source(inner)
    with _codecs_lock:
        made = _codecs.get(inner)
        if made is None or made.template != template:
            made = _codecs[inner] = Codec(inner, template)
    return made


def _source(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        return "\n".join(str(each) for each in template.values())
    return template if isinstance(template, str) else ""


def _structural(text: str, special: bool, template: str) -> bool:
    if not text or special:
        return bool(text)
    tag = re.search(r"[<>|\[\]]", text) is not None
    return tag and (text in template or text in THINK_TAGS or text.startswith("<|"))
