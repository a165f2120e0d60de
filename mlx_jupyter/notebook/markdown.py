"""A model's text as Markdown that can't do anything; pure.

Outputs of a trusted notebook are shown with their HTML active, so a model (or what it read) could
run script. Outside code each ``<`` that could begin a tag and each ``&`` that could begin an entity
is written as an entity (in math a blank after ``<`` does the same), pictures become links (no
request leaves the machine by itself) and script links lose their scheme. Inside code all signs
have to stay, so code is rewritten into forms that no Markdown reader can see otherwise: fences at
the left margin with blank lines around, and spans that open and close on one line; any other
backtick is escaped. Readers that know math might see a formula that ends inside code; if the code
could do harm then, the formula signs outside it are escaped. The text itself, copied or in
``text/plain``, is never changed.
"""

from __future__ import annotations

import re

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^`\n]*)$")
_RUN = re.compile(r"`+")
_SCHEME = re.compile(r"((?i:javascript|vbscript|data))(\\*:)")
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_ENTITY = re.compile(r"&(?=[A-Za-z#])")
_MATH = re.compile(r"(\$\$?)(?=\S)([^$]+)\1")
_FORMULA = re.compile(r"(\\*)(\$|begin\{|[\[(])")
_FORMULA_END = re.compile(r"\$|\\end\{|\\[\])]")
_RISKY = re.compile(rf"{_TAG.pattern}|!\[|{_SCHEME.pattern}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BREAK = "\u2060"  # word joiner: invisible, and no longer a URL scheme


def plain(text: str) -> str:
    r"""The text without control characters (``\n`` and ``\t`` stay).

    A terminal, and Jupyter's plain text, would obey escape sequences. C0 controls are shown as
    their pictures.
    """
    return _CONTROL.sub(_picture, text.replace("\r\n", "\n"))


def _picture(found: re.Match[str]) -> str:
    code = ord(found.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"


def safe_markdown(text: str) -> str:
    """Markdown that shows ``text`` and can't inject HTML, script or requests."""
    lines = plain(text).split("\n")
    out: list[str] = []
    code: list[str] = []  # all text that stays raw
    prose: list[int] = []  # indices into out of lines that aren't in a fence
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            prose.append(len(out))
            out.append(lines[at])
            code += [lines[at][start:end] for start, end in _code_spans(lines[at])]
            at += 1
            continue
        end = _closing(lines, at, fence.group(1))
        code += lines[at + 1 : end]
        out += _fenced(lines[at], lines[at + 1 : end], fence.group(2))
        at = end + 1
    formulas = not (any(map(_RISKY.search, code)) and any(map(_FORMULA_END.search, code)))
    in_math = False
    for i in prose:
        in_math ^= out[i].count("$$") % 2 == 1
        out[i] = _outside(out[i], math=in_math and formulas, formulas=formulas)
    return "\n".join(out)


def _closing(lines: list[str], at: int, mark: str) -> int:
    """Index of the line that closes the fence at ``at``; past the end when none does."""
    for i in range(at + 1, len(lines)):
        stripped = lines[i].strip()
        if len(stripped) >= len(mark) and not stripped.strip(mark[0]):
            return i
    return len(lines)


def _fenced(first: str, content: list[str], info: str) -> list[str]:
    """The code block at the left margin, its mark longer than any run inside it."""
    indent = len(first) - len(first.lstrip())
    body = [line[min(indent, len(line) - len(line.lstrip())) :] for line in content]
    longest = max((len(run) for line in body for run in _RUN.findall(line)), default=0)
    mark = "`" * max(3, longest + 1)
    language = re.sub(r"[^\w+#.-].*", "", info.strip())
    return ["", mark + language, *body, mark, ""]


def _outside(line: str, *, math: bool, formulas: bool) -> str:
    """A line that isn't in a fence; ``math`` when it is inside a ``$$`` block."""
    out: list[str] = []
    at = 0
    for start, end in _code_spans(line):
        out += [_text(line[at:start], math=math, formulas=formulas), line[start:end]]
        at = end
    return "".join([*out, _text(line[at:], math=math, formulas=formulas)])


def _code_spans(line: str) -> list[tuple[int, int]]:
    """The spans that may stay code."""
    spans = _spans(line)
    inside = [line[start:end] for start, end in spans]
    if any("|" in span for span in inside) and any(_RISKY.search(span) for span in inside):
        # A table splits its cells at | even in code, and would take the span apart.
        return []
    return spans


def _spans(line: str) -> list[tuple[int, int]]:
    """Code spans that open and close on this line."""
    found: list[tuple[int, int]] = []
    runs = [(m.start(), m.end()) for m in _RUN.finditer(line)]
    i = 0
    while i < len(runs):
        start, end = runs[i]
        escaped = (len(line[:start]) - len(line[:start].rstrip("\\"))) % 2 == 1
        partner = None
        if not escaped:
            for j in range(i + 1, len(runs)):
                if runs[j][1] - runs[j][0] == end - start:
                    partner = j
                    break
        if partner is None:
            i += 1
        else:
            found.append((start, runs[partner][1]))
            i = partner + 1
    return found


def _text(text: str, *, math: bool, formulas: bool) -> str:
    """Ordinary text: nothing in it is HTML, a code span, a picture or a script link."""
    text = re.sub(r"(\\*)(`+)", _escaped_run, text)
    if not formulas:
        text = _FORMULA.sub(_escaped_formula, text)
    elif math:
        text = _TAG.sub("< ", text)
    else:
        text = _MATH.sub(lambda found: _TAG.sub("< ", found.group()), text)
    text = _TAG.sub("&lt;", _ENTITY.sub("&amp;", text))
    text = re.sub(r"(\\*)!\[", _escaped_bang, text)
    return _SCHEME.sub(rf"\1{_BREAK}\2", text)


def _escaped_run(found: re.Match[str]) -> str:
    slashes, run = found.groups()
    # An odd backslash escapes the first backtick already.
    first = "`" if len(slashes) % 2 else "\\`"
    return slashes + first + "\\`" * (len(run) - 1)


def _escaped_bang(found: re.Match[str]) -> str:
    slashes = found.group(1)
    return slashes + ("![" if len(slashes) % 2 else "\\![")


def _escaped_formula(found: re.Match[str]) -> str:
    slashes, sign = found.groups()
    if sign == "$":
        return slashes + ("$" if len(slashes) % 2 else "\\$")
    if not slashes:
        return sign
    return slashes + _BREAK + sign
