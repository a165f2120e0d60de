"""``{{path}}`` and everything that has to be left alone (case 34)."""

from types import SimpleNamespace

import pytest

from mlx_jupyter.notebook.interpolate import InterpolationError, interpolate


class Broken:
    @property
    def value(self):
        raise RuntimeError("no")

    def __str__(self):
        raise RuntimeError("no text")


NAMES = {
    "name": "Ada",
    "d": {"k": 1, "a b": 2, "nested": {"x": [10, 20]}},
    "xs": [1, 2, 3],
    "o": SimpleNamespace(attr="A", rows=[SimpleNamespace(id=7)]),
    "braces": "{{name}} {x} $y",
    "größe": 3,
    "broken": Broken(),
    "_hidden": 1,
    "f": len,
}

FILLED = [
    ("{{name}}", "Ada"),
    ("{{ name }}!", "Ada!"),
    ("{{name}}{{name}}", "AdaAda"),
    ("{{d['k']}} {{d[\"a b\"]}} {{ d [ 'k' ] }}", "1 2 1"),
    ("{{xs[0]}} {{xs[-1]}}", "1 3"),
    ("{{o.attr}} {{o.rows[0].id}}", "A 7"),
    ("{{d['nested']['x'][1]}}", "20"),
    ("{{größe}}", "3"),
    ("{{braces}}", "{{name}} {x} $y"),  # braces inside a value aren't touched
    ("{{xs}}", "[1, 2, 3]"),
    (r"\{{name}}", "{{name}}"),
    (r"\{{name}} {{name}}", "{{name}} Ada"),
]

UNTOUCHED = [
    "{v:k for k,v in d.items()}",
    r"\frac{1}{2}",
    "$x ${x} $$",
    "{% if name %}x{% endif %}",
    '{"a": {"b": 1}}',
    "{{ not closed",
    "closed only }}",
    "{{}}",
    "f'{name!r:>{width}}'",
    "{{spread\nover lines}}",
    "%s %(name)s {0}",
]

MISTAKES = [
    ("{{nmae}}", "there is no variable 'nmae'; did you mean name?"),
    ("{{nothing_like_it}}", "there is no variable 'nothing_like_it' ("),
    ("{{o.atr}}", "has no attribute 'atr'; did you mean attr?"),
    ("{{xs[9]}}", "index 9 is out of range (length 3)"),
    ("{{d['kk']}}", "dict has no item 'kk'; did you mean k?"),
    ("{{d[0]}}", "dict has no item 0"),
    ("{{f(xs)}}", "no calls, no expressions"),
    ("{{name | upper}}", "no calls, no expressions"),
    ("{{1}}", "isn't a name"),
    ("{{xs[i]}}", "isn't a name"),
    ("{{name[0].x}}", "str has no attribute 'x'"),
    ("{{größe[0]}}", "int[0] failed"),
    ("{{broken.value}}", ".value failed"),
    ("{{broken}}", "str() of it failed"),
]


@pytest.mark.parametrize(("text", "wanted"), FILLED)
def test_filled(text, wanted):
    assert interpolate(text, NAMES) == wanted


@pytest.mark.parametrize("text", UNTOUCHED)
def test_untouched(text):
    assert interpolate(text, NAMES) == text


@pytest.mark.parametrize(("text", "told"), MISTAKES)
def test_mistake(text, told):
    with pytest.raises(InterpolationError) as caught:
        interpolate(text, NAMES)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hidden_names_are_not_suggested():
    with pytest.raises(InterpolationError) as caught:
        interpolate("{{hidden}}", NAMES)
    assert "did you mean" not in str(caught.value)
