"""Drives a prefix cache with the real pipeline on this thread, without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from fakes import EOS
from mlx_jupyter.cache.prefix_cache import PrefixCache
from mlx_jupyter.engine.pipeline import Run
from mlx_jupyter.engine.request import DEFAULTS, Request, Ticket
from mlx_jupyter.engine.sampling import Sampling
from mlx_jupyter.engine.text import TextStream

if TYPE_CHECKING:
    from collections.abc import Sequence


def new_cache(model, budget: int = 1 << 30) -> PrefixCache:
    return PrefixCache(lambda: make_prompt_cache(model), budget=budget, name="fake")


def ask(
    cache: PrefixCache,
    model,
    ids: Sequence[int],
    count: int = 4,
    *,
    chunk: int = 16,
    owner: str | None = None,
    marks: Sequence[tuple[int, str]] = (),
    ticket: Ticket | None = None,
    think_end: tuple[int, ...] = (),
) -> Run:
    """Serve one request; the run, with what it generated and counted."""
    ids = tuple(int(i) for i in ids)
    ticket = ticket or Ticket(Request(tokens=ids))
    run = Run(
        model=model,
        ids=ids,
        limit=1 << 20,
        max_tokens=count,
        chunk=chunk,
        ends=frozenset({EOS}),
        sampling=Sampling(DEFAULTS, 0, ids),
        text=TextStream(None),
        ticket=ticket,
        clock=iter(range(1 << 30)).__next__,
        submitted=0,
        started=0,
        think_end=think_end,
    )
    room = count
    with cache.open(np.array(ids, np.int32), room=room, owner=owner, marks=marks) as session:
        run(session)
    return run
