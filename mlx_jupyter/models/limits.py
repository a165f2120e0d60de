"""What bounds the context, and the options that a model's files set as defaults.

Limits come from the model's config, its tokenizer, the user and memory; ``engine/context.py`` takes
the smallest of all that hold for a request.
"""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_jupyter.errors import BadRequest
from mlx_jupyter.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

UNSTATED = 1 << 20
"""Tokens allowed when neither the model nor the user states a limit (recurrent models)."""

STEP = 256
"""Memory's limit is a multiple of it: free bytes differ from one look to the next."""

OPTION = "the context option"

_KEYS = (
    "max_position_embeddings",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_positions",
    "n_ctx",
)


class Limit(NamedTuple):
    """A bound on the context and where it comes from, such as ``"the model (n_ctx)"``."""

    tokens: int
    origin: str


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


def stated(config: Mapping[str, Any], tokenizer: Any) -> tuple[Limit, ...]:
    """Every limit that a model's own files state, the smallest first.

    A sliding window is no limit: what a layer no longer sees has passed through it, and the places
    in the text go on to ``max_position_embeddings``.

    Args:
        config: the model's config.json.
        tokenizer: its tokenizer, or None.
    """
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    models = (_model_limit(part) for part in parts)
    own = next((found for found in models if found is not None), None) or _family_limit(parts)
    found = [] if own is None else [own]
    length = getattr(tokenizer, "model_max_length", None)
    if isinstance(length, int) and 0 < length < 1 << 30:  # transformers' "none" is 10**30
        found.append(Limit(length, "the tokenizer (model_max_length)"))
    if not found:
        return (Limit(UNSTATED, "mlx_jupyter (the model states none)"),)
    return tuple(sorted(found, key=lambda limit: limit.tokens))


def context_of(config: Mapping[str, Any], tokenizer: Any, user: int | None) -> Limit:
    """The smallest limit that is stated, with where it comes from.

    Args:
        config: the model's config.json.
        tokenizer: its tokenizer, or None.
        user: the user's own bound, or None.
    """
    limits = list(stated(config, tokenizer))
    if user is not None:
        limits.append(Limit(user, OPTION))
    return smallest(limits)


def smallest(limits: Iterable[Limit]) -> Limit:
    """The limit in force; of equal ones the first."""
    return min(limits, key=lambda limit: limit.tokens)


def by_memory(row_bytes: int, free: int) -> Limit | None:
    """The tokens whose rows memory has room for; None where that isn't known.

    Args:
        row_bytes: what a token takes in the caches of all full layers together; layers with a
            window or a state take the same for any length.
        free: bytes that rows may take, what caches hold and can give up included.
    """
    if row_bytes <= 0:
        return None
    tokens = max(free // row_bytes // STEP * STEP, STEP)
    origin = f"memory ({human_bytes(free)} for rows of {human_bytes(row_bytes)} a token)"
    return Limit(tokens, origin)


def _model_limit(config: Mapping[str, Any]) -> Limit | None:
    for key in _KEYS:
        limit = config.get(key)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            return _stretched(config, limit, key)
    return None


def _family_limit(parts: Iterable[Mapping[str, Any]]) -> Limit | None:
    """What a model's family has where its config leaves it out, as Gemma 3's do."""
    for part in parts:
        family = part.get("model_type")
        limit = _default_of(family) if isinstance(family, str) else None
        if limit is not None:
            return Limit(limit, f"the model (max_position_embeddings of {family} by default)")
    return None


def _default_of(family: str) -> int | None:
    from transformers import CONFIG_MAPPING

    try:
        limit = getattr(CONFIG_MAPPING[family](), "max_position_embeddings", None)
    except Exception:  # another's code: an unknown family, a missing package
        return None
    return limit if isinstance(limit, int) and limit > 0 else None


def _stretched(config: Mapping[str, Any], limit: int, key: str) -> Limit:
    """With position scaling that ``limit`` doesn't include yet.

    Linear, dynamic and YaRN scaling are added to a config without touching its stated length;
    llama3's, longrope's and Gemma 3's authors state the stretched one.
    """
    scaling = _scaling(config)
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor")
    included = str(config.get("model_type")).startswith("gemma3")
    if (
        kind in ("linear", "dynamic", "yarn")
        and isinstance(factor, int | float)
        and factor > 1
        and not included
    ):
        base = scaling.get("original_max_position_embeddings", limit)
        if isinstance(base, int) and base > 0:
            return Limit(max(limit, int(base * factor)), f"the model ({key} and rope_scaling)")
    return Limit(limit, f"the model ({key})")


def _scaling(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How positions are scaled: in either of its two spellings, for the full layers."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key)
        if isinstance(scaling, dict):
            full = scaling.get("full_attention")
            return full if isinstance(full, dict) else scaling
    return {}


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
