"""Texts that differ only by what a machine writes anew each time: clocks, dates, ids. Pure.

The set of patterns is closed, and chosen so that an ordinary edit doesn't look like one: a short
number, a year or a weekday by itself, a version or a plain word never counts. What it can't tell
apart: a verse or a score with two digits behind the colon (``23:14``) passes for a clock, a phone
number for a number.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_YEAR = r"(?:19|20)\d\d"
_CLOCK = (
    r"(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?"
    r"(?:\s?[AaPp][Mm]\b)?(?:\s?(?:Z|UTC|GMT|[+-]\d\d:?\d\d)\b)?(?![\d:])"
)
_DAY = r"(?:0?[1-9]|[12]\d|3[01])(?!\d)"
_NTH = rf"{_DAY}(?:st|nd|rd|th)?"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|"
    r"Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b"
)
_WEEKDAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,?\s+)?"
_ISO = rf"{_YEAR}[-/](?:0?[1-9]|1[0-2])[-/]{_DAY}"
_COMPACT = rf"{_YEAR}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
_SHORT = rf"\d\d?/\d\d?/(?:{_YEAR}|\d\d)|\d\d?\.\d\d?\.{_YEAR}"
_WORDS = rf"(?:{_NTH}\.?\s+{_MONTH}|{_MONTH}\.?\s+{_NTH})(?:,?\s+{_YEAR}(?!\d))?"

_PATTERN = re.compile(
    "|".join(
        (
            r"(?P<uuid>\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b)",
            rf"(?P<stamp>(?<![\w.])(?:{_ISO}|{_COMPACT})[T ]{_CLOCK})",
            rf"(?P<date>\b{_WEEKDAY}(?:{_ISO}|{_COMPACT}|{_SHORT}|{_WORDS})(?!\w))",
            rf"(?P<clock>(?<![\w:.]){_CLOCK})",
            r"(?P<number>(?<![\w.])\d{10,}(?:\.\d+)?(?!\w))",
            r"(?P<hex>\b(?=[A-Fa-f]*\d)(?=\d*[A-Fa-f])[0-9A-Fa-f]{8,}\b)",
        )
    )
)
_CUT = re.compile(r"[\w:./+-]*\Z", re.ASCII)
_NAMES = {
    "uuid": "an id",
    "hex": "an id",
    "stamp": "a time stamp",
    "date": "a date",
    "clock": "a clock",
    "number": "a long number",
}


class Ticking(NamedTuple):
    """What differs between two versions of a text: its name with an article, before, now."""

    name: str
    was: str
    now: str


def ticking(was: str, now: str, *, whole: bool = True) -> Ticking | None:
    """The first thing in which two texts differ, if such things are all they differ by.

    Args:
        was: the former text; what goes on behind the end of ``now`` doesn't count.
        now: the text now.
        whole: ``now`` isn't cut off in the middle of something.
    """
    before, after = list(_PATTERN.finditer(was)), list(_PATTERN.finditer(now))
    frame = _PATTERN.sub(_sign, now)
    if not whole:
        frame = _CUT.sub("", frame)
    if not frame or not _PATTERN.sub(_sign, was).startswith(frame):
        return None
    for old, new in zip(before, after, strict=False):
        if old[0] != new[0]:
            return Ticking(_NAMES[str(new.lastgroup)], old[0], new[0])
    return None


def _sign(found: re.Match[str]) -> str:
    return f"\0{_NAMES[str(found.lastgroup)]}\0"
