"""Claims ``%%llm`` cells and ``%llm`` lines before IPython rewrites them.

IPython strips prompts, dedents, adds newlines and turns a final ``?`` into help before a magic
sees its cell. The cleanup transform runs first and carries the body over as a string literal, so
that the prompt is the cell's text minus its magic line and minus one final newline, exactly. The
token transform does the same for ``%llm`` lines anywhere in a cell, also indented or assigned.
``%llm?`` and ``%%llm?`` are left to IPython and show the help.
"""

from __future__ import annotations

import re
import tokenize
from typing import TYPE_CHECKING

from IPython.core.inputtransformer2 import (
    TokenTransformBase,
    assemble_continued_line,
    find_end_of_continued_line,
)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

MAGICS = "LLMMagics"

_REGISTRY = f"get_ipython().magics_manager.registry[{MAGICS!r}]"
_ABOVE = re.compile(r"(?:[^\S\r\n]*(?:#[^\r\n]*)?(?:\r\n|\n|\r))*")
_FIRST = re.compile(
    r"[^\S\r\n]*(?:>>>[ ]|In[ ]\[\d+\]:[ ])?%%llm(?:[^\S\r\n]([^\r\n]*))?(?:\r\n|\n|\r|\Z)"
)
_LINE = re.compile(r"%llm(?=\s|$)")


def claim_cell(lines: list[str]) -> list[str]:
    """Cleanup transform: a ``%%llm`` cell becomes one call that carries its text literally.

    Blank lines and comment lines above the magic line are let go.
    """
    cell = "".join(lines)
    first = _FIRST.match(cell, _above(cell))
    if first is None:
        return lines
    body = cell[first.end() :]
    return [f"{_REGISTRY}.show_cell({first.group(1) or ''!r}, {body!r})\n"]


claim_cell.has_side_effects = True  # type: ignore[attr-defined]
# So check_complete skips it, and a terminal goes on asking for lines below %%llm.


def _above(cell: str) -> int:
    """Where the first line begins that is neither blank nor a comment."""
    found = _ABOVE.match(cell)
    return found.end() if found else 0


class ClaimLine(TokenTransformBase):
    """Token transform: ``%llm …`` and ``x = %llm …`` become calls before IPython sees help in them.

    A bare line shows its answer and evaluates to nothing; an assigned one evaluates to it.
    """

    priority = 1  # before HelpEnd (5) and the escaped commands (10)

    def __init__(self, start: tuple[int, int], magic: tuple[int, int]) -> None:
        super().__init__(start)  # type: ignore[no-untyped-call]
        self.magic_line, self.magic_col = magic[0] - 1, magic[1]

    @classmethod
    def find(cls, tokens_by_line: list[list[tokenize.TokenInfo]]) -> ClaimLine | None:
        """The first such line, if there is one."""
        for line in tokens_by_line:
            tokens = [t for t in line if t.type not in {tokenize.INDENT, tokenize.DEDENT}]
            at = _magic_at(tokens)
            if at is not None:
                return cls(tokens[0].start, tokens[at].start)
        return None

    def transform(self, lines: list[str]) -> list[str]:
        """The lines with this one (and its continuation lines) replaced."""
        end = find_end_of_continued_line(lines, self.magic_line)
        magic = assemble_continued_line(lines, (self.magic_line, self.magic_col), end)
        text = magic[len("%llm") :].strip()
        before = lines[self.magic_line][: self.magic_col]
        if before.strip():
            call = f"get_ipython().run_line_magic('llm', {text!r})"
        else:
            call = f"{_REGISTRY}.show_line({text!r}, locals())"
        return [*lines[: self.magic_line], f"{before}{call}\n", *lines[end + 1 :]]


def _magic_at(tokens: list[tokenize.TokenInfo]) -> int | None:
    """Index of the ``%`` of ``%llm`` where a statement or an assigned value begins."""
    depth = 0
    for i, token in enumerate(tokens):
        if i == 0 and _is_magic(token):
            return 0
        if token.string in {"(", "[", "{"}:
            depth += 1
        elif token.string in {")", "]", "}"}:
            depth = max(0, depth - 1)
        elif token.string == "=" and not depth:
            follows = i + 1 < len(tokens) and _is_magic(tokens[i + 1])
            return i + 1 if follows else None
    return None


def _is_magic(token: tokenize.TokenInfo) -> bool:
    if token.string != "%":
        return False
    # The token's line can hold several physical lines when a bracket is open.
    return _LINE.match(token.line[token.start[1] :]) is not None


def install(shell: InteractiveShell) -> None:
    """Put both transforms in front of IPython's own."""
    uninstall(shell)
    shell.input_transformers_cleanup.insert(0, claim_cell)
    shell.input_transformer_manager.token_transformers.insert(0, ClaimLine)


def uninstall(shell: InteractiveShell) -> None:
    """Take them out again (also those of an earlier import of this module)."""
    manager = shell.input_transformer_manager
    for hooks in (manager.cleanup_transforms, manager.token_transformers):
        hooks[:] = [h for h in hooks if getattr(h, "__module__", "") != __name__]


def strip_final_newline(body: str) -> str:
    """The body without its last line end, if it has one."""
    return re.sub(r"(?:\r\n|\n|\r)\Z", "", body, count=1)
