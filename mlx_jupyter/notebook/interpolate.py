r"""``{{dotted.path[0]}}`` in a prompt, looked up in a namespace; pure.

One pass over the text: braces inside a value are never looked at. Attribute and item access only,
no calls. ``\{{`` is a literal ``{{``. Single braces, ``$x``, ``{% if %}`` and LaTeX are left alone.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from mlx_jupyter.errors import LLMError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_SLOT = re.compile(r"\\\{\{|\{\{([^\n]+?)\}\}")
_NAME = re.compile(r"\s*([^\W\d]\w*)")
_STEP = re.compile(
    r"""\s*(?: \.\s*(?P<attribute>[^\W\d]\w*)
            | \[\s*(?: (?P<index>-?\d+) | '(?P<single>[^'\\]*)' | "(?P<double>[^"\\]*)" )\s*\] )""",
    re.VERBOSE,
)
_LITERALLY = r"write \{{ for literal braces, or give --literal"


class InterpolationError(LLMError):
    """A ``{{…}}`` can't be looked up; the text is one line that says why."""


def interpolate(text: str, namespace: Mapping[str, Any]) -> str:
    """``text`` with every ``{{path}}`` replaced by its value's ``str``.

    Raises:
        InterpolationError: a name, attribute or item isn't there, or it isn't a path at all.
    """

    def value(found: re.Match[str]) -> str:
        return "{{" if found.group(1) is None else _text_of(found.group(1), namespace)

    return _SLOT.sub(value, text)


def _text_of(path: str, namespace: Mapping[str, Any]) -> str:
    head = _NAME.match(path)
    if head is None:
        raise _not_a_path(path)
    name = head.group(1)
    if name not in namespace:
        raise InterpolationError(
            f"{{{{{path}}}}}: there is no variable {name!r}{_near(name, namespace)} ({_LITERALLY})."
        )
    value = namespace[name]
    at = head.end()
    while path[at:].strip():
        step = _STEP.match(path, at)
        if step is None:
            raise _not_a_path(path)
        value = _follow(value, step, path)
        at = step.end()
    try:
        return str(value)
    except Exception as error:
        raise InterpolationError(f"{{{{{path}}}}}: str() of it failed: {error!r}.") from error


def _follow(value: Any, step: re.Match[str], path: str) -> Any:
    """The attribute or item of ``value`` that ``step`` names."""
    kind = type(value).__name__
    if (attribute := step["attribute"]) is not None:
        try:
            return getattr(value, attribute)
        except AttributeError as error:
            near = _near(attribute, dir(value))
            raise InterpolationError(
                f"{{{{{path}}}}}: {kind} has no attribute {attribute!r}{near}."
            ) from error
        except Exception as error:
            raise InterpolationError(f"{{{{{path}}}}}: .{attribute} failed: {error!r}.") from error
    key: Any
    if step["index"] is not None:
        key = int(step["index"])
    else:
        key = step["single"] if step["single"] is not None else step["double"]
    try:
        return value[key]
    except IndexError as error:
        raise InterpolationError(
            f"{{{{{path}}}}}: index {key} is out of range (length {len(value)})."
        ) from error
    except KeyError as error:
        near = _near(key, [k for k in value if isinstance(k, str)]) if isinstance(key, str) else ""
        raise InterpolationError(f"{{{{{path}}}}}: {kind} has no item {key!r}{near}.") from error
    except Exception as error:
        raise InterpolationError(f"{{{{{path}}}}}: {kind}[{key!r}] failed: {error}.") from error


def _near(name: str, names: Iterable[str]) -> str:
    hidden = name.startswith("_")
    near = difflib.get_close_matches(
        name, [n for n in names if hidden or not n.startswith("_")], n=3, cutoff=0.6
    )
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _not_a_path(path: str) -> InterpolationError:
    return InterpolationError(
        f"{{{{{path}}}}} isn't a name with attributes and items (no calls, no expressions): "
        f"put the value into a variable first, {_LITERALLY}."
    )
