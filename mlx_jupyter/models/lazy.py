"""Evaluates all arrays of a model that was built in another thread.

Lazy arrays can be evaluated by the thread that made them only. Besides its parameters a model has
arrays in private attributes (the frequencies of a position embedding) and in plain objects.
"""

from __future__ import annotations

import types
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import mlx.core as mx

_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float)


def evaluate(model: Any) -> None:
    """Evaluate every array that can be reached from a model, private attributes included."""
    import mlx.core as mx

    mx.eval(arrays_of(model))


def arrays_of(root: Any) -> list[mx.array]:
    """The arrays in an object: in its attributes, containers and closures, at any depth."""
    import mlx.core as mx

    found = []
    seen: dict[int, Any] = {}  # keeps what it has seen, so that no id is used twice
    left = [root]
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, _OPAQUE):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, mx.array):
            found.append(thing)
        else:
            left.extend(_parts(thing))
    return found


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, dict):  # a module is one, with attributes besides
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif isinstance(thing, partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, types.MethodType):
        yield thing.__self__
    elif isinstance(thing, types.FunctionType):
        for cell in thing.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                continue  # not filled yet
        return
    yield from getattr(thing, "__dict__", {}).values()
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(thing, name, None)
