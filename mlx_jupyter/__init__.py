"""A kernel-resident MLX engine for notebooks, with a prefix-trie KV cache shared by all cells.

Importing this package is cheap and doesn't import MLX; the public names are fetched when used.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

import mlx_jupyter.engine as _engine_room

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from mlx_jupyter.conversation.answer import Answer as Answer
    from mlx_jupyter.conversation.conversation import Conversation as Conversation
    from mlx_jupyter.engine.engine import Engine as Engine

__version__ = "0.1.0"

_HOMES = {
    "Engine": "mlx_jupyter.engine.engine",
    "Conversation": "mlx_jupyter.conversation.conversation",
    "Answer": "mlx_jupyter.conversation.answer",
    **dict.fromkeys(
        (
            "LLMError",
            "BadRequest",
            "ContextOverflow",
            "ModelNotFound",
            "BadModel",
            "ModelDoesNotFit",
            "EngineClosed",
            "ComputeError",
            "OutOfMemory",
            "Cancelled",
        ),
        "mlx_jupyter.errors",
    ),
}
_ROOMS = {"widgets", "runtime", "errors", "blas"}

__all__ = ["__version__", "engine", *_HOMES]


class _EngineRoom(types.ModuleType):
    """``mlx_jupyter.engine`` is a package and, called, the kernel's engine."""

    def __call__(self) -> Any:
        """The kernel's engine, made on first use."""
        from mlx_jupyter import runtime

        return runtime.engine()


_engine_room.__class__ = _EngineRoom


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        if name in {"Engine", "Conversation"}:
            from mlx_jupyter import blas

            blas.ensure()  # before mlx is imported
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})


def load_ipython_extension(shell: InteractiveShell) -> None:
    """``%load_ext mlx_jupyter``: the magics, completion and configuration."""
    _require_backend()
    from mlx_jupyter.notebook import extension

    extension.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """``%unload_ext mlx_jupyter``: takes the magics out; the engine lives on."""
    from mlx_jupyter.notebook import extension

    extension.unload(shell)


def _require_backend() -> None:
    """Raise a one-line ``UsageError`` when MLX itself can't be imported."""
    from mlx_jupyter import blas

    blas.ensure()  # before mlx is imported
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        from IPython.core.error import UsageError

        remedy = (
            "Run %pip install 'mlx-jupyter[cpu]' (or [cuda12], [cuda13] for an NVIDIA GPU)"
            if sys.platform == "linux"
            else "Run %pip install --force-reinstall mlx"
        )
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"MLX has no backend here ({detail}). {remedy}, then restart the kernel."
        ) from None
