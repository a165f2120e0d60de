"""Defaults of the magics: ``%config LLMMagics``, then ``[tool.mlx-jupyter]`` in pyproject.toml.

Precedence: the call's own option, ``%config``, the nearest pyproject.toml, the model's default.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traitlets import Bool, Enum, Float, Int, List, TraitError, Unicode, Union, validate
from traitlets.config import Configurable

from mlx_jupyter.engine.filters import DEFAULT, KNOWN, checked_filters
from mlx_jupyter.engine.request import Options
from mlx_jupyter.errors import BadRequest
from mlx_jupyter.notebook.commands import VIEWS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_jupyter.notebook.commands import Ask

TABLE = "mlx-jupyter"
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "repetition_penalty",
)
ENGINE = ("cache_bytes", "memory_limit", "store", "store_bytes")
STANDING: dict[str, Any] = {"exact": False, "context": None, "filters": DEFAULT}
"""What an engine can be told at any time, with its own default."""


class Settings(Configurable):
    """What ``%config LLMMagics`` and the project's file can set; None leaves it open."""

    model = Unicode(None, allow_none=True, help="Which model answers.").tag(config=True)
    system = Unicode(None, allow_none=True, help="System prompt.").tag(config=True)
    temperature = Float(None, allow_none=True, help="0 takes the likeliest token.").tag(config=True)
    top_p = Float(None, allow_none=True, help="Nucleus sampling, above 0 to 1.").tag(config=True)
    top_k = Int(None, allow_none=True, help="Sample from the K likeliest tokens.").tag(config=True)
    min_p = Float(None, allow_none=True, help="Leave out less likely tokens.").tag(config=True)
    max_tokens = Int(None, allow_none=True, help="At most so many tokens.").tag(config=True)
    seed = Int(None, allow_none=True, help="Of the sampling.").tag(config=True)
    repetition_penalty = Float(None, allow_none=True, help="Above 1 discourages it.").tag(
        config=True
    )
    view = Enum(VIEWS, default_value=None, allow_none=True, help="How answers are shown.").tag(
        config=True
    )
    cache_bytes = Int(
        None, allow_none=True, help="What the cache may take; before the engine's first use."
    ).tag(config=True)
    memory_limit = Int(
        None, allow_none=True, help="MLX's memory limit; before the engine's first use."
    ).tag(config=True)
    context = Int(
        None, allow_none=True, help="Prompt and answer together take at most so many tokens."
    ).tag(config=True)

    exact = Bool(
        None,
        allow_none=True,
        help="Reuse only what makes an answer bit-equal to a cold run of the same passes.",
    ).tag(config=True)
    filters = List(
        Unicode(),
        default_value=None,
        allow_none=True,
        help=f"What keeps prompts alike; known: {', '.join(KNOWN)}. [] turns all off.",
    ).tag(config=True)
    store = Union(
        [Bool(), Unicode()],
        default_value=None,
        allow_none=True,
        help="Directory that cached tokens outlive the kernel in, or False; before the engine's "
        "first use.",
    ).tag(config=True)
    store_bytes = Int(
        None, allow_none=True, min=0, help="What the store may take; before the engine's first use."
    ).tag(config=True)

    @validate("filters")
    def _known(self, proposal: Any) -> Any:
        try:
            return None if proposal.value is None else list(checked_filters(proposal.value))
        except BadRequest as error:
            raise TraitError(str(error)) from None

    @validate(*SAMPLING, "context")
    def _in_range(self, proposal: Any) -> Any:
        if proposal.value is not None:
            try:
                Options.of(**{proposal.trait.name: proposal.value})
            except BadRequest as error:
                raise TraitError(str(error)) from None
        return proposal.value


NAMES: tuple[str, ...] = tuple(Settings.class_own_traits(config=True))


@dataclass(frozen=True, slots=True)
class Project:
    """What the nearest pyproject.toml says.

    Attributes:
        path: the file; None when no file has the table.
        values: the valid settings.
        faults: one line for each that isn't.
    """

    path: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


def project(start: Path) -> Project:
    """The settings of the nearest pyproject.toml at or above ``start``. Never raises."""
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        try:
            if not path.is_file():
                continue
            table = tomllib.loads(path.read_text("utf-8")).get("tool", {}).get(TABLE)
        except (OSError, ValueError, AttributeError) as error:
            return Project(path, {}, (f"{path} can't be read: {error}",))
        if table is None:
            return Project(path)
        if not isinstance(table, dict):
            return Project(path, {}, (f"{path}: tool.{TABLE} isn't a table.",))
        return _checked(path, table)
    return Project()


def _checked(path: Path, table: Mapping[str, Any]) -> Project:
    values: dict[str, Any] = {}
    faults = []
    for key, value in table.items():
        name = key.replace("-", "_")
        where = f"{path}: tool.{TABLE}.{key}"
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(NAMES))}."
            faults.append(f"{where} is no setting; {hint}")
            continue
        try:
            values[name] = checked(name, value)
        except ValueError as error:
            faults.append(f"{where}: {error}")
            continue
        if name == "store" and isinstance(value, str):
            values[name] = str(path.parent / Path(value).expanduser())
    return Project(path, values, tuple(faults))


def checked(name: str, value: Any) -> Any:
    """The value as the setting's trait has it.

    Raises:
        ValueError: it has the wrong type or is out of range; one line.
    """
    probe = Settings()
    try:
        setattr(probe, name, value)
    except TraitError as error:
        if isinstance(error.__context__, BadRequest):
            raise ValueError(str(error)) from None
        wanted = Settings.class_own_traits()[name].info()
        raise ValueError(f"{name} takes {wanted}, not {value!r}.") from None
    return getattr(probe, name)


def setting(name: str, settings: Any, project: Project) -> Any:
    """The value in force: ``%config``'s, else the project's, else None."""
    value = getattr(settings, name)
    return value if value is not None else project.values.get(name)


def complete(command: Ask, settings: Any, project: Project) -> dict[str, Any]:
    """The fields of ``command`` that it leaves open and a setting fills."""
    filled: dict[str, Any] = {}
    model = setting("model", settings, project)
    if model is not None and not command.models:
        filled["models"] = (model,)
    for name in (*SAMPLING, "system", "view"):
        if name == "system" and command.raw:
            continue  # a raw text has no system prompt, whatever the default is
        if getattr(command, name) is None:
            value = setting(name, settings, project)
            if value is not None:
                filled[name] = value
    return filled


def keep(engine: Any, settings: Any, project: Project) -> None:
    """Tell the engine what is set of its standing options."""
    for name in STANDING:
        value = setting(name, settings, project)
        if value is not None:
            setattr(engine, name, value)


def engine_settings(settings: Any, project: Project) -> dict[str, Any]:
    """Keyword arguments for the engine that are set somewhere."""
    values = {name: setting(name, settings, project) for name in ENGINE}
    return {name: value for name, value in values.items() if value is not None}
