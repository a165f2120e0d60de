"""Completion of the magic line: options, values, subcommands, branches, models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlx_jupyter.notebook import options
from mlx_jupyter.notebook.commands import VIEWS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from IPython.core.interactiveshell import InteractiveShell


class Completer:
    """IPython's ``complete_command`` hook for ``%llm`` and ``%%llm``.

    Args:
        branches: names of the branches, asked for when needed.
        models: names that ``load`` and ``-m`` take.
        variables: names in the user's namespace.
        saved: names of the conversations that are kept.
    """

    def __init__(
        self,
        branches: Callable[[], Sequence[str]],
        models: Callable[[], Sequence[str]],
        variables: Callable[[], Sequence[str]],
        saved: Callable[[], Sequence[str]],
    ) -> None:
        self._branches = branches
        self._models = models
        self._variables = variables
        self._saved = saved

    def __call__(self, _shell: InteractiveShell, event: Any) -> list[str]:
        """The hook; IPython keeps those that begin with what is typed."""
        before = event.text_until_cursor
        if not re.match(r"(?:[^%#]*=)?\s*%%?llm\s", before):
            return []
        # The completer's word has lost an @ in front of it, since @ separates words there.
        return self.candidates(before, cut_at="@" not in event.symbol)

    def candidates(self, before: str, *, cut_at: bool = False) -> list[str]:
        """What can come at the end of ``before``, as whole words.

        Args:
            before: the line up to the cursor, with the magic's name.
            cut_at: give branches without their ``@``.
        """
        is_cell = "%%llm" in before
        text = re.split(r"%%?llm\s", before, maxsplit=1)[1]
        words = text.split()
        typed = "" if not words or text[-1].isspace() else words.pop()
        previous = words[-1] if words else ""
        at = "" if cut_at else "@"
        known = self._values(previous, at, first=len(words) == 1)
        if known is not None:
            return known
        if typed.startswith("-"):
            return options.spellings()
        if typed.startswith("@"):
            return [at + b for b in self._branches()]
        if words and not _only_options(words):
            return []  # in the prompt
        found = [*options.spellings(), *("@" + b for b in self._branches())]
        if not words and not is_cell:
            found = [*options.SUBCOMMANDS, *found]
        return found

    def _values(self, previous: str, at: str, *, first: bool) -> list[str] | None:
        """Values of the option or subcommand before the cursor; None when it takes none."""
        match previous:
            case "-m" | "--model":
                return list(self._models())
            case "--from":
                return list(self._branches())
            case "-o" | "--output":
                return [v for v in self._variables() if not v.startswith("_")]
            case "--view":
                return list(VIEWS)
            case "load" | "unload" if first:
                return list(self._models())
            case "log" | "drop" | "save" | "pin" | "unpin" if first:
                return [at + b for b in self._branches()]
            case "restore" if first:
                return [at + b for b in self._saved()]
            case "forget" if first:
                return [at + b for b in dict.fromkeys([*self._branches(), *self._saved()])]
            case "store" if first:
                return ["clear"]
            case "help" if first:
                return [*options.TOPICS, *options.SUBCOMMANDS]
        return [] if previous in options.spellings(valued=True) else None


def _only_options(words: Sequence[str]) -> bool:
    """Whether the words so far are options with their values, and a branch."""
    valued, flags = options.spellings(valued=True), options.spellings(valued=False)
    i = 0
    while i < len(words):
        word = words[i]
        if word in valued:
            i += 1
        elif not (
            word in flags or word.startswith(("@", "--")) or "<<" in (word, *words[i + 1 : i + 2])
        ):
            return False
        i += 1
    return "--" not in words
