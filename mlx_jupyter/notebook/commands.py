"""What ``%llm`` and ``%%llm`` can be told, as frozen values; pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from mlx_jupyter.errors import LLMError

if TYPE_CHECKING:
    from collections.abc import Callable

View = Literal["md", "text", "tokens", "none"]
VIEWS: tuple[View, ...] = get_args(View)


class CommandError(LLMError):
    """The command line is wrong; the text is one line that says what to do."""


KINDS: dict[Callable[[str], Any], str] = {float: "a number", int: "a whole number"}
NUMBERS: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "max_tokens": int,
    "context": int,
    "seed": int,
    "repetition_penalty": float,
}


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
    models: tuple[str, ...] = ()
    adapter: str | None = None
    temperature: float | str | None = None
    top_p: float | str | None = None
    top_k: int | str | None = None
    min_p: float | str | None = None
    max_tokens: int | str | None = None
    context: int | str | None = None
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
                "models": tuple(fill(model) for model in self.models),
                "adapter": fill(self.adapter) if self.adapter is not None else None,
                "stop": tuple(fill(s) for s in self.stop),
            }
        for name, convert in NUMBERS.items():
            value = getattr(self, name)
            if isinstance(value, str):
                text = value if self.literal else fill(value)
                try:
                    changes[name] = convert(text)
                except ValueError as error:
                    raise CommandError(f"{name} takes {KINDS[convert]}, not {text!r}.") from error
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Load:
    """``load NAME … [--adapter DIR]``."""

    names: tuple[str, ...]
    adapter: str | None = None


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
class Ps:
    """``ps``."""


@dataclass(frozen=True, slots=True)
class Tree:
    """``tree``."""


@dataclass(frozen=True, slots=True)
class Pages:
    """``pages``."""


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
class Save:
    """``save @b [FILE]``."""

    branch: str
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Restore:
    """``restore @b [FILE]``."""

    branch: str
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Forget:
    """``forget @b``."""

    branch: str


@dataclass(frozen=True, slots=True)
class Store:
    """``store`` and ``store clear``."""

    clear: bool = False


@dataclass(frozen=True, slots=True)
class Pin:
    """``pin @b`` and ``unpin @b``."""

    branch: str
    on: bool = True


@dataclass(frozen=True, slots=True)
class PinModel:
    """``pin NAME`` and ``unpin NAME``."""

    name: str
    on: bool = True


@dataclass(frozen=True, slots=True)
class Verify:
    """``verify``."""


@dataclass(frozen=True, slots=True)
class Help:
    """``help [TOPIC]`` and ``-h``."""

    topic: str | None = None


@dataclass(frozen=True, slots=True)
class Overview:
    """A bare ``%llm``."""


Command = (
    Ask
    | Load
    | Unload
    | Models
    | Status
    | Ps
    | Tree
    | Pages
    | Branches
    | Log
    | Drop
    | Save
    | Restore
    | Forget
    | Store
    | Pin
    | PinModel
    | Verify
    | Help
    | Overview
)
