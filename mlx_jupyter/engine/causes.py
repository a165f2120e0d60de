"""Why tokens are computed again, in terms of messages, models and templates.

A plan knows token ids only: it says from where on a prompt is unknown. What the owner (a cell, a
branch) asked before, and the texts on both sides of that place, tell why. A refined cause may be
split where its reason ends; the tokens of all causes still add up to those that are recomputed.

Works on a published view and never waits for the engine.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mlx_jupyter.cache.plan import Cause
from mlx_jupyter.cache.trie import common_prefix
from mlx_jupyter.engine.asked import NONE, number
from mlx_jupyter.engine.volatile import Ticking, ticking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_jupyter.cache.view import NodeView
    from mlx_jupyter.engine.asked import Asked, Asking

    Decode = Callable[[Sequence[int]], str]

BEFORE, AFTER, SLACK = 48, 96, 32
"""Tokens around a divergence that are looked at, and how much longer the former text may be."""

ROOM = 24
"""Characters of a text that a cause quotes."""

WORDS = 40
"""Words within which two texts must meet again for the difference to be more than a word each."""


def explained(
    why: tuple[Cause, ...],
    prompt: Asking,
    former: Asked | None,
    root: NodeView,
    decode: Decode | None,
) -> tuple[Cause, ...]:
    """A plan's causes with the last one refined.

    Args:
        why: the plan's.
        prompt: the prompt.
        former: what its owner asked before.
        root: of the view that the plan was made on.
        decode: ids to text; None where the prompt has none.
    """
    *made, last = why
    if last.code not in ("first", "diverged", "extended"):
        return why
    at, ids = last.at, prompt.ids
    if former is not None and (former.gone or former.model != prompt.model):
        upto = prompt.shared(former)
        if upto > at:
            made.append(Cause("model", _moved(former, prompt), upto - at, at))
            return (*made, *prompt.new(upto))
        former = None
    own = NONE
    if former is not None:
        common = common_prefix(former.path, ids)
        if common > at:
            made.append(Cause("evicted", f"forgotten from token {at:,} on", common - at, at))
            at = common
            if at == len(ids):
                return tuple(made)
        own = former.path[common:] if common == at else NONE
        if not len(own) and _adds(prompt, former, at, common):
            return (*made, *prompt.new(at))
    if not len(own) and last.code != "diverged":
        return (*made, *(prompt.new(at) if last.code == "extended" else (last,)))
    old = own if len(own) else stored(root, ids, at)
    refined = _refined(prompt, former if len(own) else None, at, old, decode)
    return (*made, *(refined or (last,)))


def _moved(former: Asked, prompt: Asking) -> str:
    if former.model == prompt.model:
        return f"computed before {former.model} was unloaded; its cache went with it"
    return f"computed with {former.model} before; {prompt.model} has its own cache"


def _adds(prompt: Asking, former: Asked, at: int, common: int) -> bool:
    """Whether what comes from ``at`` on only goes on where the former request ended."""
    if 0 < common == len(former.path):
        return True
    count = len(former.parts)
    if not prompt.ends or prompt.equal(former) < count or count == len(prompt.parts):
        return False
    return at >= prompt.ends[count]


def _refined(
    prompt: Asking, former: Asked | None, at: int, old: np.ndarray, decode: Decode | None
) -> tuple[Cause, ...]:
    """Causes from ``at`` on, where a stored sequence goes on with ``old``; () for no better one.

    ``former`` is the owner's last request, when ``old`` is what followed in it.
    """
    index = prompt.index(at)
    if decode is not None and index is not None:
        found = _ticking(prompt, index, at, old, decode)
        if found is not None:
            upto = _resumed(prompt, index, at, old)
            return (_volatile(prompt, index, at, upto, found), *prompt.new(upto))
    rendered = (
        former is not None
        and index is not None
        and prompt.equal(former) > index  # all that was said up to here
    )
    if not at and not rendered:
        return ()
    texts = _texts(prompt.ids, at, old, decode)
    was, now = differing(*texts)
    said, nth = prompt.said(index), number(index)
    size = len(prompt.ids) - at
    if not rendered:
        how = "changed" if former is not None else "differs from what is stored"
        text = f"{said} {how} at token {at:,}: {was!r} → {now!r}"
        return (Cause("diverged", text, size, at, nth, was, now),)
    assert former is not None
    upto = max(prompt.shared(former), at + 1)
    if texts[0].startswith(texts[1]) or texts[1].startswith(texts[0]):
        text = f"{said} is the same text in other tokens, from token {at:,}"
        return (Cause("diverged", text, upto - at, at, nth), *prompt.new(upto))
    tail = index is not None and at >= prompt.ends[-1]
    what = "the start of the answer" if tail else said
    text = f"the template renders {what} otherwise: {was!r} → {now!r}, from token {at:,}"
    return (Cause("template", text, upto - at, at, nth, was, now), *prompt.new(upto))


def _volatile(prompt: Asking, index: int, at: int, upto: int, found: Ticking) -> Cause:
    messages = prompt.request.messages or ()
    system = index >= 0 and messages[index].role == "system"
    where = "the system prompt" if system else "the template's own text"
    text = f"{found.name} in {where} changes: {found.was!r} → {found.now!r}, from token {at:,}"
    return Cause("volatile", text, upto - at, at, number(index), found.was, found.now)


# --- the texts on both sides ---------------------------------------------------------------------


def stored(root: NodeView, ids: np.ndarray, at: int) -> np.ndarray:
    """What follows ``ids[:at]`` in the stored sequence that was used last; empty at its end."""
    node = root
    while node.end < at:
        child = node.child(int(ids[node.end]))
        if child is None:
            return NONE
        node = child
    pieces = [node.tokens[at - node.start :]]
    while node.children:
        node = max(node.children, key=lambda child: child.last_used)
        pieces.append(node.tokens)
    return np.concatenate(pieces)


def _ticking(
    prompt: Asking, index: int, at: int, old: np.ndarray, decode: Decode
) -> Ticking | None:
    """What ticks in the system prompt or in the template's own text at ``at``."""
    start, end = prompt.ends[index] if index >= 0 else 0, prompt.ends[index + 1]
    if at >= end:
        return None
    start, upto = max(start, at - BEFORE), min(end, at + AFTER)
    now = decode(prompt.ids[start:upto].tolist())
    was = decode([*prompt.ids[start:at].tolist(), *old[: upto - at + SLACK].tolist()])
    found = ticking(was, now, whole=upto == end)
    if found is None or index < 0:
        return found
    message = (prompt.request.messages or ())[index]
    return None if message.role != "system" and found.now in message.content else found


def _resumed(prompt: Asking, index: int, at: int, old: np.ndarray) -> int:
    """Up to where ``old`` goes on as the prompt does, once the block at ``at`` has ended."""
    end = prompt.ends[index + 1]
    close = prompt.ids[end - 2 : end]
    for slip in sorted(range(-SLACK, SLACK + 1), key=abs):
        place = end - at + slip
        if place >= 2 and np.array_equal(old[place - 2 : place], close):
            return end + common_prefix(old[place:], prompt.ids[end:])
    return end


def _texts(ids: np.ndarray, at: int, old: np.ndarray, decode: Decode | None) -> tuple[str, str]:
    """What is around ``at``, before and now, cut off somewhere; ids where there is no text."""
    if decode is None:
        return " ".join(map(str, old[:1].tolist())), str(ids[at])
    lead = ids[max(0, at - BEFORE) : at].tolist()
    was, now = ([*lead, *part[:AFTER].tolist()] for part in (old, ids[at:]))
    return decode(was).rstrip("\ufffd"), decode(now).rstrip("\ufffd")


_UNIT = re.compile(r"<[^<>\s]{1,40}>|\w+(?:[:./-]\d\w*)*|\s+|[^\w\s]")


def differing(was: str, now: str) -> tuple[str, str]:
    """The first words in which two texts differ, clipped; both empty for equal texts.

    The texts may be cut off anywhere at their ends.
    """
    if was == now:
        return "", ""
    same = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), None)
    if same is None:
        same = min(len(was), len(now))
    if re.search(r"\w", was[same : same + 1] + now[same : same + 1]):
        word = re.search(r"[^\s>]*\Z", was[:same])
        same -= len(word[0]) if word and len(word[0]) <= ROOM else 0
    before, after = ([*_UNIT.findall(text[same:]), ""][:WORDS] for text in (was, now))
    meetings = [*_meetings(before, after), *((j, i) for i, j in _meetings(after, before))]
    i, j = min(meetings, key=sum, default=(_block(before), _block(after)))
    return _clipped("".join(before[:i])), _clipped("".join(after[:j]))


def _meetings(some: Sequence[str], others: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Places where two texts go on alike: by two units, or by a last word that may be cut off."""
    places = {pair: i for i, pair in reversed(list(enumerate(pairwise(others))))}
    for i, pair in enumerate(pairwise(some)):
        if pair in places:
            yield i, places[pair]
        elif not pair[1] and pair[0][:1].isalnum():
            for j, other in enumerate(others):
                if i + j and other.startswith(pair[0]):
                    yield i, j


def _block(units: Sequence[str]) -> int:
    """How many of them come before the first tag, which may itself come first."""
    return next(
        (i for i, unit in enumerate(units) if i and unit[:1] == "<" and unit[1:]), len(units)
    )


def _clipped(text: str) -> str:
    text = text.strip() or text
    return text if len(text) <= ROOM else text[: ROOM - 1] + "…"
