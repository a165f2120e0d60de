"""The context length in force, and the options that a model's files set as defaults."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

from mlx_jupyter.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

UNSTATED = 1 << 20
"""Tokens allowed when neither the model nor the user states a limit (recurrent models)."""

_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_positions",
    "n_ctx",
)


def config_of(model: Any) -> dict[str, Any]:
    """What a model object tells of its own configuration."""
    arguments = getattr(model, "args", None)
    config: dict[str, Any] = {}
    if is_dataclass(arguments) and not isinstance(arguments, type):
        config.update(asdict(arguments))
    for key in ("model_type", "vocab_size", *_KEYS):
        if key not in config and isinstance(value := getattr(model, key, None), int | str):
            config[key] = value
    return config


def vocabulary_of(config: Mapping[str, Any]) -> int:
    """The number of token ids that the model has embeddings for; 0 when it isn't stated."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if isinstance(size := part.get("vocab_size"), int):
            return size
    return 0


def context_of(config: Mapping[str, Any], tokenizer: Any, user: int | None) -> tuple[int, str]:
    """The context length in force and where it comes from: the smallest of what is stated.

    Args:
        config: the model's config.json.
        tokenizer: its tokenizer, or None.
        user: the user's own bound, or None.
    """
    stated = []
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        found = _model_limit(part)
        if found is not None:
            stated.append(found)
            break
    length = getattr(tokenizer, "model_max_length", None)
    if isinstance(length, int) and 0 < length < 1 << 30:  # transformers' "none" is 10**30
        stated.append((length, "the tokenizer (model_max_length)"))
    if user is not None:
        stated.append((user, "the context option"))
    if not stated:
        return UNSTATED, "mlx_jupyter (the model states none)"
    return min(stated, key=lambda limit: limit[0])


def _model_limit(config: Mapping[str, Any]) -> tuple[int, str] | None:
    for key in _KEYS:
        limit = config.get(key)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            return _stretched(config, limit, key)
    return None


def _stretched(config: Mapping[str, Any], limit: int, key: str) -> tuple[int, str]:
    """With position scaling that ``limit`` doesn't include yet.

    Linear, dynamic and YaRN scaling are added to a config without touching its stated length;
    llama3's and longrope's authors state the stretched one.
    """
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        kind = scaling.get("rope_type", scaling.get("type"))
        factor = scaling.get("factor")
        if kind in ("linear", "dynamic", "yarn") and isinstance(factor, int | float) and factor > 1:
            base = scaling.get("original_max_position_embeddings", limit)
            if isinstance(base, int) and base > 0:
                return max(limit, int(base * factor)), f"the model ({key} and rope_scaling)"
    return limit, f"the model ({key})"


def defaults_of(directory: Path) -> dict[str, Any]:
    """A model's sampling defaults from its generation_config.json, as options.

    Without ``do_sample`` its temperature and the like have no meaning and are left out; values
    that the options would refuse are left out too.
    """
    from mlx_jupyter.engine.request import Options

    try:
        config = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    wanted = {"repetition_penalty": config.get("repetition_penalty")}
    if config.get("do_sample") is True:
        wanted["temperature"] = config.get("temperature", 1.0)
        for key in ("top_p", "top_k", "min_p"):
            wanted[key] = config.get(key)
    found = {}
    for key, value in wanted.items():
        try:
            Options.of(**{key: value})
        except BadRequest:
            continue
        if value is not None:
            found[key] = value
    return found
