"""From a model's files to what can run: mlx-lm's loaders without their side effects.

On the engine thread only: what is made here belongs to the thread that made it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from typing import TYPE_CHECKING, Any

from mlx_jupyter.errors import BadModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_jupyter.models.sources import Source


def wrapped(tokenizer: Any) -> Any:
    """A tokenizer as mlx-lm wraps it; None stays None."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    if tokenizer is None or isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    return TokenizerWrapper(tokenizer)


def read(source: Source) -> tuple[Any, Any, dict[str, Any]]:
    """The model, lazily, with its tokenizer and its config.

    Raises:
        BadModel: whatever is wrong with the files, as one line.
    """
    from mlx_lm.utils import load_model, load_tokenizer

    trust = source.trust_remote_code
    try:
        with _quiet_transformers(), _random_as_it_was():
            model, config = load_model(source.path, lazy=True, trust_remote_code=trust)
            tokenizer = load_tokenizer(
                source.path,
                {"trust_remote_code": trust},
                eos_token_ids=config.get("eos_token_id"),
            )
    except MemoryError:
        raise
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise BadModel(source.path, f"can't be loaded: {first or type(error).__name__}") from error
    return model, tokenizer, config


def cache_layers(model: Any) -> tuple[tuple[str, int], ...]:
    """(kind, count) of a model's leaf caches."""
    from mlx_lm.models.cache import make_prompt_cache

    from mlx_jupyter.cache.layers import Leaves

    return Leaves.of(make_prompt_cache(model)).counts


def warm_up(model: Any) -> int:
    """Run a few tokens, so that kernels are compiled now and not under a user's interrupt.

    Returns:
        Bytes that a token's rows take in the caches of all full layers.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from mlx_jupyter.cache.layers import Leaves

    cache = make_prompt_cache(model)
    for count in (3, 1, 1):
        mx.eval(model(mx.zeros((1, count), mx.int32), cache=cache))
    rows = [layer for layer in Leaves.of(cache).rows if layer.capacity]
    return sum(sum(a.nbytes for a in layer.arrays) // layer.capacity for layer in rows)


_imported = False


def import_mlx_lm() -> None:
    """Import mlx-lm without its side effects on the process.

    Its import takes seconds, lowers the limits of open files for good and talks about PyTorch.
    """
    global _imported
    if _imported:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        import mlx_lm  # noqa: F401
    finally:
        resource.setrlimit = setrlimit
    _imported = True


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' remarks off the user's cell."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _random_as_it_was() -> Iterator[None]:
    """Leave MLX's random numbers where they stood.

    A model's layers draw weights before they get their own. Nothing evaluates those, so each load
    would leave a chain of some hundred splits of the key behind, about a megabyte, for good.
    """
    import mlx.core as mx

    state: Any = mx.random.state
    high, low = state[0].tolist()
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)
