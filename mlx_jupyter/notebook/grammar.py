"""The command line of ``%llm`` and ``%%llm`` as one frozen object; pure.

Promises: a line is a subcommand only if all of it parses as one, else it is a prompt; the prompt
is kept character for character; every mistake is one ``CommandError`` whose text is one line that
says what to do. Nothing here prints, exits or looks at a namespace.
"""

from __future__ import annotations

import difflib
import io
import re
import shlex
from typing import TYPE_CHECKING

from mlx_jupyter.notebook.commands import (
    Ask,
    Branches,
    Command,
    CommandError,
    Drop,
    Forget,
    Help,
    Load,
    Log,
    Models,
    Overview,
    Pages,
    Pin,
    PinModel,
    Ps,
    Restore,
    Save,
    Status,
    Store,
    Tree,
    Unload,
    Verify,
)
from mlx_jupyter.notebook.options import BRANCH, SLOT, SUBCOMMANDS, TOPICS, known, parse

if TYPE_CHECKING:
    import argparse

_ARROW = re.compile(r"([^\W\d]\w*)\s*<<(?=\s|$)")
_MODEL = re.compile(r"[\d/.]|\w-\w")  # what nearly every model's name has, and few words of prose
_DASHES = re.compile(r"--(?=\s|$)")


def parse_line(line: str) -> Command:
    """The command of ``%llm line``.

    Raises:
        CommandError: an option is unknown or malformed, or there is no prompt.
    """
    text = line.strip()
    command = _subcommand(text)
    if command is not None:
        return command
    argv, rest = _split(text)
    found = parse(argv)
    if found.help:
        return Help("options")
    if not rest.strip():
        raise CommandError("There is no prompt: write it after the options, %llm [options] prompt.")
    return _ask(found, rest)


def parse_cell(line: str, body: str) -> Command:
    """The command of a ``%%llm line`` cell whose remaining lines are ``body``.

    Raises:
        CommandError: the first line has something that isn't an option, or the body is blank.
    """
    argv, rest = _split(line.strip())
    found = parse(argv)
    if found.help:
        return Help("options")
    if rest:
        raise CommandError(
            f"The first line of %%llm takes options only, not {_clip(rest)!r}: "
            "the prompt goes on the lines below (or use %llm for a prompt on one line)."
        )
    if not body.strip():
        raise CommandError("There is no prompt: write it on the lines below %%llm.")
    return _ask(found, body)


def _ask(found: argparse.Namespace, prompt: str) -> Ask:
    values = {name: value for name, value in vars(found).items() if name != "help"}
    values["stop"] = tuple(values["stop"] or ())
    models = values["models"] = tuple(values["models"] or ())
    twice = next((m for i, m in enumerate(models) if m in models[:i]), None)
    if twice is not None:
        raise CommandError(f"-m names {_clip(twice)} twice: give each model once.")
    if values["adapter"] is not None and len(models) > 1:
        raise CommandError(
            "--adapter goes with one model: load the model with it first "
            "(%llm load NAME --adapter DIR), then give -m NAME+ADAPTER beside the others."
        )
    if values["origin"] is not None and values["branch"] is None:
        raise CommandError(
            "--from says where a branch begins: name the branch too, "
            f"such as @new --from {values['origin'].branch}."
        )
    return Ask(prompt=prompt, **values)


def _subcommand(text: str) -> Command | None:
    """The subcommand if all of ``text`` is one."""
    try:
        words = _words(text)
    except ValueError:
        return None
    match words:
        case []:
            return Overview()
        case ["load", *rest]:
            return _load(rest)
        case ["unload"]:
            return Unload()
        case ["unload", name] if not name.startswith("-"):
            return Unload(name)
        case ["models"]:
            return Models()
        case ["status"]:
            return Status()
        case ["ps"]:
            return Ps()
        case ["tree"]:
            return Tree()
        case ["pages"]:
            return Pages()
        case ["branches"]:
            return Branches()
        case ["log", branch] if BRANCH.fullmatch(branch):
            return Log(branch[1:])
        case ["drop", branch] if BRANCH.fullmatch(branch):
            return Drop(branch[1:])
        case ["save", branch, *rest] if BRANCH.fullmatch(branch) and _file(rest):
            return Save(branch[1:], *rest)
        case ["restore", branch, *rest] if BRANCH.fullmatch(branch) and _file(rest):
            return Restore(branch[1:], *rest)
        case ["forget", branch] if BRANCH.fullmatch(branch):
            return Forget(branch[1:])
        case ["store"]:
            return Store()
        case ["store", "clear"]:
            return Store(clear=True)
        case ["pin" | "unpin" as word, branch] if BRANCH.fullmatch(branch):
            return Pin(branch[1:], on=word == "pin")
        case ["pin" | "unpin" as word, name] if name[:1] not in ("-", "@", ""):
            return PinModel(name, on=word == "pin")
        case ["verify"]:
            return Verify()
        case ["help"]:
            return Help()
        case ["help", topic] if topic in TOPICS or topic in SUBCOMMANDS:
            return Help(topic)
    return None


def _load(rest: list[str]) -> Load | None:
    """What ``load`` is told; None where the line may as well be a prompt, as in "load the van"."""
    adapter = None
    if "--adapter" in rest:
        at = rest.index("--adapter")
        found = rest[at + 1 : at + 2]
        if not found or found[0].startswith("-"):
            raise CommandError("--adapter needs a value: --adapter DIR.")
        adapter, rest = found[0], [*rest[:at], *rest[at + 2 :]]
        if len(rest) != 1:
            raise CommandError("--adapter goes with one model: %llm load NAME --adapter DIR.")
    names = tuple(rest)
    if not names or any(name.startswith("-") for name in names):
        return None
    if len(names) > 1 and not all(_MODEL.search(name) for name in names):
        return None
    return Load(names, adapter)


def _file(rest: list[str]) -> bool:
    """Whether nothing follows, or what may be a file's name."""
    return not rest or (len(rest) == 1 and bool(rest[0]) and rest[0][0] not in "-@")


def _words(text: str) -> list[str]:
    """Shell words up to a comment."""
    words = []
    at = _skip_blanks(text, 0)
    while at < len(text) and text[at] != "#":
        word, at = _word(text, at)
        words.append(word)
        at = _skip_blanks(text, at)
    return words


def _word(text: str, at: int) -> tuple[str, int]:
    """The shell word at ``at`` and where it ends (a ``{{…}}`` may have blanks inside).

    Raises:
        ValueError: a quote isn't closed.
    """
    if slot := SLOT.match(text, at):
        end = slot.end()
        if end == len(text) or text[end].isspace():
            return slot.group(), end
    stream = io.StringIO(text[at:])
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    word = lexer.get_token()
    return word or "", at + stream.tell()


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _split(text: str) -> tuple[list[str], str]:
    """The options in front, as argparse wants them, and the rest as it was written."""
    argv: list[str] = []
    at = _skip_blanks(text, 0)
    while at < len(text):
        if text[at] == "#":
            return argv, ""
        if _DASHES.match(text, at):
            return argv, text[at + 2 :].lstrip()
        if arrow := _ARROW.match(text, at):
            argv.append(f"--output={arrow.group(1)}")
            at = arrow.end()
        elif (branch := BRANCH.match(text, at)) and text[branch.end() :][:1].strip() == "":
            argv.append(f"--branch={branch.group(1)}")
            at = branch.end()
        elif text[at] == "-" and len(text) > at + 1 and not text[at + 1].isspace():
            at = _take_option(text, at, argv)
        else:
            return argv, text[at:]
        at = _skip_blanks(text, at)
    return argv, ""


def _take_option(text: str, at: int, argv: list[str]) -> int:
    """Append the option at ``at`` with its value to ``argv``; where it ends."""
    start = at
    spellings = known()
    try:
        word, at = _word(text, at)
    except ValueError as error:
        raise CommandError(f"A quote isn't closed: {_clip(text[start:])}") from error
    name, equals, value = word.partition("=")
    if name in spellings and name.startswith("--"):
        action = spellings[name]
    elif word[:2] in spellings and not word.startswith("--"):
        name, action = word[:2], spellings[word[:2]]
        equals, value = word[2:], word[2:].removeprefix("=")
    else:
        raise _unknown(word)
    long = action.option_strings[-1]
    if action.nargs == 0:
        if equals:
            raise CommandError(f"{name} takes no value.")
        argv.append(long)
        return at
    if not equals:
        at = _skip_blanks(text, at)
        if at >= len(text):
            raise CommandError(f"{name} needs a value: {name} {action.metavar}.")
        try:
            value, at = _word(text, at)
        except ValueError as error:
            raise CommandError(f"The quote after {name} isn't closed.") from error
    argv.append(f"{long}={value}")
    return at


def _unknown(word: str) -> CommandError:
    shown = word.partition("=")[0]
    near = difflib.get_close_matches(shown, known(), n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else " %llm help options lists them."
    return CommandError(
        f"Unknown option {_clip(shown)}.{hint} (Put -- before a prompt that begins with a dash.)"
    )


def _clip(text: str, room: int = 40) -> str:
    line = " ".join(text.split())
    return line if len(line) <= room else line[: room - 1] + "…"
