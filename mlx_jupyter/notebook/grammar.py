"""The command line of ``%llm`` and ``%%llm`` as one frozen object; pure.

Promises: a line is a subcommand only if all of it parses as one, else it is a prompt; the prompt
is kept character for character; every mistake is one ``CommandError`` whose text is one line that
says what to do. Nothing here prints, exits or looks at a namespace.
"""

from __future__ import annotations

import argparse
import difflib
import io
import re
import shlex
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from mlx_jupyter.engine.request import Options
from mlx_jupyter.errors import LLMError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

View = Literal["md", "text", "tokens", "none"]
VIEWS: tuple[View, ...] = get_args(View)

_ARROW = re.compile(r"([^\W\d]\w*)\s*<<(?=\s|$)")
_BRANCH = re.compile(r"@(\w[\w.-]*)")
_ORIGIN = re.compile(r"@?(\w[\w.-]*?)(?:~(\d*))?")
_SLOT = re.compile(r"\{\{.*?\}\}")
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}


class CommandError(LLMError):
    """The command line is wrong; the text is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a branch starts: ``back`` turns before the tip of ``branch``."""

    branch: str
    back: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt with its options. Options that weren't given are None.

    A number may still be a ``{{name}}`` as text until ``filled`` has looked it up.
    """

    prompt: str
    branch: str | None = None
    origin: Origin | None = None
    system: str | None = None
    model: str | None = None
    temperature: float | str | None = None
    top_p: float | str | None = None
    top_k: int | str | None = None
    min_p: float | str | None = None
    max_tokens: int | str | None = None
    seed: int | str | None = None
    repetition_penalty: float | str | None = None
    stop: tuple[str, ...] = ()
    output: str | None = None
    view: View | None = None
    raw: bool = False
    literal: bool = False
    dry_run: bool = False

    def filled(self, fill: Callable[[str], str]) -> Ask:
        """The command with every ``{{name}}`` replaced by ``fill`` (unless ``--literal``).

        Raises:
            CommandError: a number's variable doesn't hold a number.
        """
        changes: dict[str, Any] = {}
        if not self.literal:
            changes = {
                "prompt": fill(self.prompt),
                "system": fill(self.system) if self.system is not None else None,
                "model": fill(self.model) if self.model is not None else None,
                "stop": tuple(fill(s) for s in self.stop),
            }
        for name, convert in _NUMBERS.items():
            value = getattr(self, name)
            if isinstance(value, str):
                text = value if self.literal else fill(value)
                try:
                    changes[name] = convert(text)
                except ValueError as error:
                    raise CommandError(f"{name} takes {_KINDS[convert]}, not {text!r}.") from error
        return replace(self, **changes)

    def options(self) -> Options:
        """The sampling options, checked.

        Raises:
            BadRequest: a value is out of range.
        """
        return Options.of(**{f.name: getattr(self, f.name) for f in fields(Options)})


@dataclass(frozen=True, slots=True)
class Load:
    """``load NAME``."""

    name: str


@dataclass(frozen=True, slots=True)
class Unload:
    """``unload [NAME]``."""

    name: str | None = None


@dataclass(frozen=True, slots=True)
class Models:
    """``models``."""


@dataclass(frozen=True, slots=True)
class Status:
    """``status``."""


@dataclass(frozen=True, slots=True)
class Tree:
    """``tree``."""


@dataclass(frozen=True, slots=True)
class Branches:
    """``branches``."""


@dataclass(frozen=True, slots=True)
class Log:
    """``log @b``."""

    branch: str


@dataclass(frozen=True, slots=True)
class Drop:
    """``drop @b``."""

    branch: str


@dataclass(frozen=True, slots=True)
class Help:
    """``help [TOPIC]`` and ``-h``."""

    topic: str | None = None


@dataclass(frozen=True, slots=True)
class Overview:
    """A bare ``%llm``."""


Command = (
    Ask | Load | Unload | Models | Status | Tree | Branches | Log | Drop | Help | Overview
)

SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "load": ("NAME", "load a model: an alias, a directory, a GGUF file or a Hugging Face id"),
    "unload": ("[NAME]", "give a model's memory back; all models without a name"),
    "models": ("", "the loaded models and the names that load knows"),
    "status": ("", "model, context length and memory in use"),
    "tree": ("", "the prefixes that are cached, as a picture"),
    "branches": ("", "the conversations and their lengths"),
    "log": ("@BRANCH", "the turns of a conversation"),
    "drop": ("@BRANCH", "forget a conversation"),
    "help": ("[TOPIC]", "this help, or more about one topic"),
}
"""Each subcommand with its argument and what it does."""

TOPICS: dict[str, str] = {
    "options": "",
    "variables": (
        "{{name}} in a prompt, a system prompt or an option's value is replaced by a variable.\n"
        "Paths may go into attributes and items: {{df.shape[0]}}, {{user['name']}}; no calls.\n"
        "Values are put in once: braces inside them stay as they are.\n"
        r"\{{ is a literal {{, and --literal turns all replacing off." "\n"
        "Single braces, $x and {% if %} are never touched."
    ),
    "branches": (
        "%%llm @name continues the conversation 'name', or begins it.\n"
        "Running a cell again replaces its turn instead of adding one.\n"
        "%%llm @other --from name~2 begins 'other' two turns before the end of 'name'.\n"
        "%llm branches lists them, %llm log @name shows one, %llm drop @name forgets one.\n"
        "Without @name each prompt stands alone, but shared beginnings are still reused."
    ),
    "results": (
        "-o NAME (or NAME <<) puts the Answer into a variable; without it, it is in _.\n"
        "An Answer has .text, .tokens, .finish, .usage, .timing, .messages and .why.\n"
        "An interrupted cell keeps its partial text, and .finish is 'cancelled'."
    ),
    "config": (
        "Defaults come from the options of the call, then %config LLMMagics.temperature = 0.7,\n"
        "then [tool.mlx-jupyter] in the nearest pyproject.toml, then the model's own.\n"
        "%config LLMMagics lists what can be set."
    ),
}
"""What ``help TOPIC`` knows; ``options`` is generated from the parser."""


# ------------------------------------------------------------------------------------- parsing


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
    found = _options(argv)
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
    found = _options(argv)
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
        case ["load", name] if not name.startswith("-"):
            return Load(name)
        case ["unload"]:
            return Unload()
        case ["unload", name] if not name.startswith("-"):
            return Unload(name)
        case ["models"]:
            return Models()
        case ["status"]:
            return Status()
        case ["tree"]:
            return Tree()
        case ["branches"]:
            return Branches()
        case ["log", branch] if _BRANCH.fullmatch(branch):
            return Log(branch[1:])
        case ["drop", branch] if _BRANCH.fullmatch(branch):
            return Drop(branch[1:])
        case ["help"]:
            return Help()
        case ["help", topic] if topic in TOPICS or topic in SUBCOMMANDS:
            return Help(topic)
    return None


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
    if slot := _SLOT.match(text, at):
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
        if re.compile(r"--(?=\s|$)").match(text, at):
            return argv, text[at + 2 :].lstrip()
        if arrow := _ARROW.match(text, at):
            argv.append(f"--output={arrow.group(1)}")
            at = arrow.end()
        elif (branch := _BRANCH.match(text, at)) and text[branch.end() :][:1].strip() == "":
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
    known = _known()
    try:
        word, at = _word(text, at)
    except ValueError as error:
        raise CommandError(f"A quote isn't closed: {_clip(text[start:])}") from error
    name, equals, value = word.partition("=")
    if name in known and name.startswith("--"):
        action = known[name]
    elif word[:2] in known and not word.startswith("--"):
        name, value, equals, action = word[:2], word[2:], word[2:], known[word[:2]]
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
    near = difflib.get_close_matches(shown, _known(), n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else " %llm help options lists them."
    return CommandError(
        f"Unknown option {_clip(shown)}.{hint} (Put -- before a prompt that begins with a dash.)"
    )


def _clip(text: str, room: int = 40) -> str:
    line = " ".join(text.split())
    return line if len(line) <= room else line[: room - 1] + "…"


# -------------------------------------------------------------------------------------- parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(message.removeprefix("argument ") + ".")


def _real(text: str) -> float | str:
    return _converted(text, float)


def _whole(text: str) -> int | str:
    return _converted(text, int)


def _converted(text: str, convert: Callable[[str], Any]) -> Any:
    if _SLOT.fullmatch(text):
        return text
    try:
        return convert(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"takes {_KINDS[convert]}, not {text!r}") from error


_KINDS: dict[Callable[[str], Any], str] = {float: "a number", int: "a whole number"}
_NUMBERS: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "seed": int,
    "repetition_penalty": float,
}


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("takes a text that isn't empty")
    return re.sub(r"\\[ntr\\]", lambda m: _ESCAPES[m.group()], text)


def _variable(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"takes a variable's name, not {text!r}")
    return text


def _view(text: str) -> str:
    if text not in VIEWS:
        raise argparse.ArgumentTypeError(f"is one of {', '.join(VIEWS)}, not {text!r}")
    return text


def _origin(text: str) -> Origin:
    found = _ORIGIN.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"takes a branch and how many turns to go back, such as main~2, not {text!r}"
        )
    branch, back = found.groups()
    return Origin(branch, 0 if back is None else int(back or 1))


@cache
def parser() -> argparse.ArgumentParser:
    """The options of ``%llm`` and ``%%llm``; also the source of the help and the completion."""
    made = _Parser(
        prog="%%llm [@branch]",
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=96),
    )
    made.color = False  # Python 3.14 would colour the help
    add = made.add_argument
    add("--branch", dest="branch", help=argparse.SUPPRESS)
    add("--from", dest="origin", type=_origin, metavar="BRANCH[~N]",
        help="begin the branch at another one, N turns back")
    add("-s", "--system", metavar="SYSTEM", help="system prompt")
    add("-m", "--model", metavar="MODEL", help="which model; loaded if it isn't")
    add("-t", "--temperature", type=_real, metavar="TEMP", help="0 always takes the likeliest token")
    add("--top-p", type=_real, metavar="P", help="sample from the likeliest tokens that add up to P")
    add("--top-k", type=_whole, metavar="K", help="sample from the K likeliest tokens")
    add("--min-p", type=_real, metavar="P", help="leave out tokens below P × the likeliest one")
    add("--max", "--max-tokens", dest="max_tokens", type=_whole, metavar="N",
        help="at most N tokens")
    add("--seed", type=_whole, metavar="N", help="the same seed gives the same answer")
    add("--repetition-penalty", type=_real, metavar="X", help="above 1 discourages repetition")
    add("--stop", action="append", type=_stop, metavar="S",
        help=r"end before this text (\n is a line end); may be given several times")
    add("-o", "--output", type=_variable, metavar="VAR", help="put the Answer into VAR (or: VAR <<)")
    add("--view", type=_view, metavar="{" + "|".join(VIEWS) + "}", help="how the answer is shown")
    add("--raw", action="store_true", help="no chat template: the prompt is continued as it is")
    add("--literal", action="store_true", help="leave {{name}} as it is")
    add("--dry-run", action="store_true", help="show what would be reused; send nothing")
    add("-h", "--help", dest="help", action="store_true", help="this help")
    return made


@cache
def _known() -> dict[str, argparse.Action]:
    """Every option's spelling → its action."""
    return {
        spelling: action
        for action in parser()._actions  # noqa: SLF001 - argparse has no public way to list them
        if action.help != argparse.SUPPRESS
        for spelling in action.option_strings
    }


def spellings(*, valued: bool | None = None) -> list[str]:
    """The options as they can be written; with ``valued`` only those with or without a value."""
    return [s for s, action in _known().items() if valued is None or (action.nargs != 0) == valued]


def _options(argv: Sequence[str]) -> argparse.Namespace:
    return parser().parse_args(list(argv))


# ---------------------------------------------------------------------------------------- help


def help_text(topic: str | None = None) -> str:
    """The help, generated from the parser and the table of subcommands."""
    if topic == "options":
        return parser().format_help().replace("usage: ", "", 1).rstrip()
    if topic in SUBCOMMANDS:
        argument, meaning = SUBCOMMANDS[topic]
        return f"%llm {topic} {argument}".rstrip() + f"\n    {meaning}"
    if topic is not None:
        return TOPICS[topic]
    rows = [(f"%llm {name} {argument}", meaning) for name, (argument, meaning) in SUBCOMMANDS.items()]
    width = max(len(call) for call, _ in rows) + 2
    lines = [
        "%%llm [@branch] [options]     the prompt is on the lines below",
        "%llm [@branch] [options] [--] prompt",
        "",
        *(f"{call.ljust(width)}{meaning}" for call, meaning in rows),
        "",
        "Topics: " + ", ".join(TOPICS) + ". A whole line that isn't one of these is a prompt.",
    ]
    return "\n".join(lines)
