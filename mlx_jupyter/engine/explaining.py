"""Why a plan is as it is, in terms of messages: what is remembered of each owner's last request."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from mlx_jupyter.engine.asked import Asking, Memory
from mlx_jupyter.engine.causes import explained
from mlx_jupyter.latch import holding
from mlx_jupyter.models.codec import codec_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from mlx_jupyter.cache.plan import Cause
    from mlx_jupyter.cache.view import MarkKind, TreeView
    from mlx_jupyter.conversation.answer import Answer
    from mlx_jupyter.engine.request import Request
    from mlx_jupyter.models.pool import LoadedModel

log = logging.getLogger(__name__)


class Explaining:
    """The half of the workshop that explains.

    Attributes:
        memory: what each owner asked last.
        tokenizing: held around tokenizers: fast ones can't be used by two threads at once.
    """

    def __init__(self) -> None:
        self.memory = Memory()
        self.tokenizing = threading.RLock()

    def explained(
        self,
        why: tuple[Cause, ...],
        loaded: LoadedModel,
        request: Request,
        ids: np.ndarray,
        marks: Sequence[tuple[int, MarkKind]],
        tree: TreeView,
    ) -> tuple[Cause, ...]:
        """A plan's causes with what is known beyond token ids, or as they are. From any thread.

        Args:
            why: the plan's.
            loaded: the model that serves it.
            request: what was asked.
            ids: the prompt's, int32, shape (prompt,).
            marks: (offset, kind) where blocks end in it.
            tree: the view that the plan was made on.
        """
        tokenizer = loaded.tokenizer if request.tokens is None else None

        def decode(some: Sequence[int]) -> str:
            return holding(self.tokenizing, lambda: codec_of(tokenizer).decode(some))

        try:
            asking = Asking.of(loaded.info.name, request, ids, marks)
            former = self.memory.of(request.owner)
            return explained(
                why, asking, former, tree.root, decode if tokenizer is not None else None
            )
        except Exception:  # no prompt fails because of its explanation
            log.debug("a cause couldn't be refined", exc_info=True)
            return why

    def remember(
        self,
        loaded: LoadedModel,
        request: Request,
        ids: np.ndarray,
        marks: Sequence[tuple[int, MarkKind]],
        answer: Answer,
        tree: TreeView,
    ) -> None:
        """Keep what the owner's next request will be compared with; arguments as above.

        ``tree`` is the view after the request.
        """
        try:
            asking = Asking.of(loaded.info.name, request, ids, marks)
            root = tree.root
            self.memory.keep(asking, answer.text, answer.tokens, root)
        except Exception:
            log.debug("a request couldn't be remembered", exc_info=True)
