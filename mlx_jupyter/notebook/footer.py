"""The line under an answer, in words; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_jupyter.cache.plan import Cause, Plan
    from mlx_jupyter.conversation.answer import Answer

# Reasons that name work which a bigger budget, another layout or another text would have saved.
_AVOIDABLE = {"evicted", "snapshot", "volatile", "template", "model"}
WORTH_TELLING = 16  # tokens


def footer(answer: Answer, *, rate: float = 0.0, continued: bool = False) -> str:
    """What was reused, how fast it went, and why not more was reused.

    Args:
        answer: a finished or cancelled answer.
        rate: prompt tokens a second that this model reads, as far as known; for the time saved.
        continued: the prompt goes on where an earlier turn ended, so that a divergence is news.
    """
    parts = []
    if answer.finish == "cancelled":
        parts.append("interrupted")
    if answer.usage.prompt:
        parts.append(_reused(answer, rate))
    made = _count(answer.usage.generated or len(answer.tokens), "token")
    speed = answer.timing.decode_tps
    if answer.tokens:
        parts.append(f"{made} at {_rate(speed)}/s" if speed else made)
    if answer.timing.ttft:
        parts.append(f"first after {duration(answer.timing.ttft)}")
    if answer.finish == "length":
        parts.append("cut at the token limit")
    cause = main_cause(answer.why, continued=continued)
    if cause is not None:
        parts.append(f"{_count(cause.tokens, 'token')} read again: {cause.text}")
    parts += [cause.text for cause in answer.why if cause.code == "filtered"]
    return " · ".join(parts)


def main_cause(why: tuple[Cause, ...], *, continued: bool = False) -> Cause | None:
    """The reason that cost most among those for tokens that could have been reused."""
    codes = _AVOIDABLE | ({"diverged"} if continued else set())
    told = [c for c in why if c.code in codes and c.tokens >= WORTH_TELLING]
    return max(told, key=lambda c: c.tokens, default=None)


def plan_line(plan: Plan) -> str:
    """A plan in words, one reason a line."""
    first = (
        f"{_count(plan.prompt, 'token')}: {plan.reused:,} stay in place, {plan.restored:,} are "
        f"read back, {plan.recomputed:,} are computed"
    )
    told = (c.text if c.code == "filtered" else f"{c.tokens:,}: {c.text}" for c in plan.why)
    return "\n".join([first, *(f"  {line}" for line in told)])


def duration(seconds: float) -> str:
    """Seconds for people: ``"40 ms"``, ``"0.2 s"``, ``"9 s"``, ``"3 min"``."""
    if seconds < 0.095:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _reused(answer: Answer, rate: float) -> str:
    cached, prompt = answer.usage.cached, answer.usage.prompt
    if not cached:
        return f"read {_count(prompt, 'token')}"
    text = f"reused {cached:,} of {_count(prompt, 'token')}"
    saved = cached / rate - answer.timing.restore if rate else 0.0
    return f"{text} (saved {duration(saved)})" if saved >= 0.05 else text


def _rate(per_second: float) -> str:
    return f"{per_second:.1f}" if per_second < 10 else f"{per_second:,.0f}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
