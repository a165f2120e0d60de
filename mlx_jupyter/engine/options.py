"""Sampling options and limits of a request: their names, checks and defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from numbers import Real
from operator import index
from typing import Any

from mlx_jupyter.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Options:
    """Sampling options and limits. ``None`` means the model's default, then ours.

    Attributes:
        max_tokens: exact upper bound of generated tokens.
        temperature: 0 is greedy.
        top_p: nucleus sampling, in (0, 1].
        top_k: 0 is off.
        min_p: in [0, 1]; 0 is off.
        repetition_penalty: > 0; 1 is off. Sees the last 256 tokens of the whole context, cached
            ones included.
        seed: of the sampling; drawn at random when not given.
        stop: generation ends before any of these strings.
        context: prompt and answer together take at most so many tokens, where that is less than
            what the model, the engine and memory allow.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    context: int | None = None

    @classmethod
    def of(cls, **options: Any) -> Options:
        """Options by name, checked; numbers of NumPy and the like become Python's.

        Raises:
            BadRequest: an unknown name, a wrong type or a value out of range.
        """
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise BadRequest(f"Unknown option {name!r}. Known: {', '.join(sorted(known))}.")
        return cls(**options).checked()

    def checked(self) -> Options:
        """The options with plain Python values.

        Raises:
            BadRequest: a value has a wrong type or is out of range.
        """
        return Options(
            max_tokens=_integer("max_tokens", self.max_tokens, 1),
            temperature=_number("temperature", self.temperature, 0, 100),
            top_p=_number("top_p", self.top_p, 0, 1, open_low=True),
            top_k=_integer("top_k", self.top_k, 0),
            min_p=_number("min_p", self.min_p, 0, 1),
            repetition_penalty=_number(
                "repetition_penalty", self.repetition_penalty, 0, 100, open_low=True
            ),
            seed=_integer("seed", self.seed, 0, 2**64 - 1),
            stop=_stops(self.stop),
            context=_integer("context", self.context, 1),
        )

    def over(self, defaults: Options) -> Options:
        """These options, with what they leave open taken from ``defaults``."""
        left_open = {
            f.name: getattr(defaults, f.name)
            for f in fields(self)
            if getattr(self, f.name) in (None, ())
        }
        return replace(self, **left_open)


DEFAULTS = Options(
    max_tokens=1024, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0
)
"""Ours: greedy, so that rerunning a cell gives the same answer unless asked otherwise."""


def _number(
    name: str, value: Any, low: float, high: float, *, open_low: bool = False
) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise BadRequest(f"{name} takes a number, not {value!r}.")
    number = float(value)
    if not low <= number <= high or (open_low and number == low):
        raise BadRequest(
            f"{name} must be {'above' if open_low else 'from'} {low} to {high}, not {value}."
        )
    return number


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int | None:
    if value is None:
        return None
    number = whole(value)
    if number is None:
        raise BadRequest(f"{name} takes a whole number, not {value!r}.")
    if high is not None and not low <= number <= high:
        raise BadRequest(f"{name} must be from {low} to {high}, not {value}.")
    if number < low:
        raise BadRequest(f"{name} must be at least {low}, not {value}.")
    return number


def whole(value: Any) -> int | None:
    """The value as an ``int`` if it is a whole number of any library, None if it isn't."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def _stops(value: Any) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) and value else value or ()
    if not isinstance(given, list | tuple | set | frozenset):
        raise BadRequest(f"stop takes a string or a list of strings, not {value!r}.")
    for each in given:
        if not isinstance(each, str) or not each:
            raise BadRequest(f"stop takes non-empty strings, not {each!r}.")
    return tuple(given)
