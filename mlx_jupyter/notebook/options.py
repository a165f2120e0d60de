"""The options of the magics as an argparse parser, and the help that is generated from it; pure."""

from __future__ import annotations

import argparse
import re
from functools import cache
from typing import TYPE_CHECKING, NoReturn, TypeVar

from mlx_jupyter.notebook.commands import KINDS, VIEWS, CommandError, Origin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_N = TypeVar("_N", float, int)

BRANCH = re.compile(r"@(\w[\w.-]*)")
SLOT = re.compile(r"\{\{.*?\}\}")

_ORIGIN = re.compile(r"@?(\w[\w.-]*?)(?:~(\d*))?")
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}

SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "load": ("NAME …", "load models: aliases, directories, GGUF files, Hugging Face ids"),
    "unload": ("[NAME]", "give a model's memory back; the current one's without a name"),
    "models": ("", "the loaded models and the names that load knows"),
    "status": ("", "model, context length and memory in use"),
    "ps": ("", "what each model holds, when it was used, and what would go next"),
    "tree": ("", "the prefixes that are cached, as a picture"),
    "pages": ("", "every page of the cache and the memory in use; change the budget there"),
    "branches": ("", "the conversations and their lengths"),
    "log": ("@BRANCH", "the turns of a conversation"),
    "drop": ("@BRANCH", "forget a conversation"),
    "save": ("@BRANCH [FILE]", "keep a conversation, with its cached tokens, for another day"),
    "restore": ("@BRANCH [FILE]", "bring a kept conversation back"),
    "forget": ("@BRANCH", "remove a conversation for good, in memory and on disk"),
    "store": ("[clear]", "what is kept on disk; clear removes it"),
    "pin": ("@BRANCH | NAME", "never give up what a conversation has cached, or a model"),
    "unpin": ("@BRANCH | NAME", "let it be given up again when room is needed"),
    "verify": ("", "compute something cached again, cold, and compare"),
    "help": ("[TOPIC]", "this help, or more about one topic"),
}
"""Each subcommand with its argument and what it does."""

TOPICS: dict[str, str] = {
    "options": "",
    "variables": (
        "{{name}} in a prompt, a system prompt or an option's value is replaced by a variable.\n"
        "Paths may go into attributes and items: {{df.shape[0]}}, {{user['name']}}; no calls.\n"
        "Values are put in once: braces inside them stay as they are.\n"
        r"\{{ is a literal {{, and --literal turns all replacing off."
        "\n"
        "Single braces, $x and {% if %} are never touched."
    ),
    "branches": (
        "%%llm @name continues the conversation 'name', or begins it.\n"
        "Running a cell again replaces its turn instead of adding one.\n"
        "%%llm @other --from name~2 begins 'other' two turns before the end of 'name'.\n"
        "%llm branches lists them, %llm log @name shows one, %llm drop @name forgets one.\n"
        "Without @name each prompt stands alone, but shared beginnings are still reused."
    ),
    "several": (
        "-m NAME asks another model; it is loaded if it isn't. %llm load a-1 b-2 loads several\n"
        "(then each name has a digit, a dot, a dash or a slash; else the line is a prompt).\n"
        "-m a -m b asks both the same, one after the other, and shows the answers side by side;\n"
        "_ is a tuple of Answers. On @name, a's answer is the turn, and b's goes to @name.b: go\n"
        "on with the one you like. A branch may change models at any turn.\n"
        "--adapter DIR puts LoRA weights of mlx-lm's on top; the model is then NAME+DIR, with a\n"
        "cache of its own: %llm load NAME --adapter DIR.\n"
        "The context is the smallest of what the model, its tokenizer, %config LLMMagics.context,\n"
        "--ctx N and memory allow; %llm status says which. A longer prompt is an error."
    ),
    "filters": (
        "Filters keep the beginnings of prompts alike, so that they are reused. They touch system\n"
        "prompts and templates only, and each answer's last line says what they did.\n"
        "billing-header (on): no x-anthropic-billing-header lines at a system prompt's head.\n"
        "frozen-clock (off): a template's clock stands still at the time of the engine's start.\n"
        "%config LLMMagics.filters = ['billing-header', 'frozen-clock'] turns both on, [] none."
    ),
    "keeping": (
        "%llm save @name keeps a conversation in a private place; %llm restore @name brings it\n"
        "back in any kernel. With a FILE it goes where you say (.llm.safetensors is added), and\n"
        "can be given to others: %llm restore @name FILE.\n"
        "The cached tokens in a file are used where the model is exactly the one that made them.\n"
        "Those from a FILE are compared with it in a sample, and used by that conversation alone.\n"
        "%llm drop @name lets go of a conversation; %llm forget @name also removes all of it from\n"
        "memory and from disk, earlier versions of its cells included.\n"
        "%llm store shows what outlives the kernel, %llm store clear removes it."
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(message.removeprefix("argument ") + ".")


def _real(text: str) -> float | str:
    return _number(text, float)


def _whole(text: str) -> int | str:
    return _number(text, int)


def _number(text: str, convert: Callable[[str], _N]) -> _N | str:
    if SLOT.fullmatch(text):
        return text
    try:
        return convert(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"takes {KINDS[convert]}, not {text!r}") from error


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
    made.__dict__["color"] = False  # Python 3.14 would colour the help
    add = made.add_argument
    add("--branch", dest="branch", help=argparse.SUPPRESS)
    add(
        "--from",
        dest="origin",
        type=_origin,
        metavar="BRANCH[~N]",
        help="begin the branch at another one, N turns back",
    )
    add("-s", "--system", metavar="SYSTEM", help="system prompt")
    add(
        "-m",
        "--model",
        dest="models",
        action="append",
        metavar="MODEL",
        help="which model; loaded if it isn't; several give their answers side by side",
    )
    add("--adapter", metavar="DIR", help="LoRA weights of mlx-lm's on top of the model")
    add(
        "-t", "--temperature", type=_real, metavar="TEMP", help="0 always takes the likeliest token"
    )
    add(
        "--top-p", type=_real, metavar="P", help="sample from the likeliest tokens that add up to P"
    )
    add("--top-k", type=_whole, metavar="K", help="sample from the K likeliest tokens")
    add("--min-p", type=_real, metavar="P", help="leave out tokens below P × the likeliest one")
    add(
        "--max",
        "--max-tokens",
        dest="max_tokens",
        type=_whole,
        metavar="N",
        help="at most N tokens",
    )
    add(
        "--ctx",
        "--context",
        dest="context",
        type=_whole,
        metavar="N",
        help="prompt and answer together take at most N tokens",
    )
    add("--seed", type=_whole, metavar="N", help="the same seed gives the same answer")
    add("--repetition-penalty", type=_real, metavar="X", help="above 1 discourages repetition")
    add(
        "--stop",
        action="append",
        type=_stop,
        metavar="S",
        help=r"end before this text (\n is a line end); may be given several times",
    )
    add(
        "-o", "--output", type=_variable, metavar="VAR", help="put the Answer into VAR (or: VAR <<)"
    )
    add("--view", type=_view, metavar="{" + "|".join(VIEWS) + "}", help="how the answer is shown")
    add("--raw", action="store_true", help="no chat template: the prompt is continued as it is")
    add("--literal", action="store_true", help="leave {{name}} as it is")
    add("--dry-run", action="store_true", help="show what would be reused; send nothing")
    add("-h", "--help", dest="help", action="store_true", help="this help")
    return made


@cache
def known() -> dict[str, argparse.Action]:
    """Every option's spelling → its action."""
    return {
        spelling: action
        for action in parser()._actions  # noqa: SLF001 - argparse has no public way to list them
        if action.help != argparse.SUPPRESS
        for spelling in action.option_strings
    }


def spellings(*, valued: bool | None = None) -> list[str]:
    """The options as they can be written; with ``valued`` only those with or without a value."""
    return [s for s, action in known().items() if valued is None or (action.nargs != 0) == valued]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of one call, each with a value or None."""
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
    rows = [
        (f"%llm {name} {argument}", meaning) for name, (argument, meaning) in SUBCOMMANDS.items()
    ]
    width = max(len(call) for call, _ in rows) + 2
    lines = [
        "%%llm [@branch] [options]     the prompt is on the lines below",
        "%llm [@branch] [options] [--] prompt",
        "",
        *(f"{call.ljust(width)}{meaning}" for call, meaning in rows),
        "",
        "Topics: " + ", ".join(TOPICS) + ".",
        "A whole line that isn't one of these is a prompt.",
    ]
    return "\n".join(lines)
