"""The prefix cache of one model: a trie of pages and snapshots around one live cache.

Used on the engine thread only. What holds between sessions (``check`` raises otherwise):

* every layer of the live cache stands at the same offset, ``len(live_ids)``;
* the path of ``live_ids`` is in the trie, and its pages up to that offset are exactly the
  ``live`` pages;
* bytes are counted from the buffers themselves; live cache, pages and snapshots together stay
  within the budget.

A request opens a session (``session.py``), which moves the live cache to where the plan says,
lets the pipeline run, and records what was really computed.
"""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_jupyter.cache import layers as ly
from mlx_jupyter.cache import retention
from mlx_jupyter.cache.describe import describe, items
from mlx_jupyter.cache.match import Match, decide, match
from mlx_jupyter.cache.pages import Groups, Mark, Page, Tally, group_layers, joined
from mlx_jupyter.cache.session import Session
from mlx_jupyter.cache.trie import Node, Trie

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_jupyter.cache.plan import Plan
    from mlx_jupyter.cache.view import MarkKind, TreeView

log = logging.getLogger(__name__)

GHOST_TOKENS = 1 << 14
GHOST_NODES = 128
"""How much of given-up paths stays known, so that a later miss can be explained."""


class PrefixCache:
    """See the module.

    Args:
        make: makes an empty mlx-lm cache for the model.
        budget: bytes that live cache, pages and snapshots may take together.
        name: the model's short name, for descriptions.
    """

    def __init__(self, make: Callable[[], list[Any]], *, budget: int, name: str = "") -> None:
        self._make = make
        self.budget = budget
        self.name = name
        self.live: list[Any] = make()
        self.layout = ly.Layout.of(self.live)
        self.live_ids = array("i")
        self.trie = self._empty_trie()
        self.groups: Groups = ()
        self.clock = 0
        self.version = 0
        self.needed: set[int] = set()
        self._tip_mark: Mark | None = None

    def _empty_trie(self) -> Trie[Page, Mark]:
        self._tally = tally = Tally()
        return Trie(lambda start, end: Page(start, end, tally))

    # --- asking ------------------------------------------------------------------------------

    @property
    def stateful(self) -> bool:
        """Whether some layer can be restored only at snapshots."""
        return bool(self.layout.states)

    def live_array(self) -> np.ndarray:
        """The ids that the live cache holds, int32, a copy."""
        return np.array(self.live_ids, np.int32)

    def match(self, ids: np.ndarray) -> Match:
        """What is known of a prompt."""
        path = {id(n) for n in self._live_path()}
        return match(self.trie.root, ids, len(self.live_ids), lambda n: id(n) in path)

    def plan(self, ids: np.ndarray) -> Plan:
        """How a prompt would be served now."""
        return decide(self.match(ids), stateful=self.stateful)

    def _live_path(self) -> list[Node[Page, Mark]]:
        """The trie's nodes along the live cache's ids, as far as they are recorded."""
        return self.trie.match(self.live_array())[0].path()

    def live_bytes(self) -> int:
        """Bytes of the live cache's buffers, spare rows included."""
        return ly.nbytes(self.live)

    def stored_bytes(self) -> int:
        """Bytes of pages and snapshots outside the live cache."""
        return self._tally.nbytes

    def view(self) -> TreeView:
        """An immutable description of now."""
        self.version += 1
        return describe(self, {id(n) for n in self._live_path()})

    # --- working -----------------------------------------------------------------------------

    def open(
        self,
        ids: Sequence[int] | np.ndarray,
        *,
        room: int = 0,
        marks: Sequence[tuple[int, MarkKind]] = (),
        owner: str | None = None,
    ) -> Session:
        """A session for a prompt; use it as a context manager.

        Args:
            ids: the prompt, at least one token.
            room: tokens that may be generated; rows for them are reserved.
            marks: (offset, kind) where a conversation will come back to.
            owner: the cell or branch that keeps the result reachable.
        """
        self.clock += 1
        return Session(self, np.asarray(ids, np.int32), room=room, marks=marks, owner=owner)

    def vacate(self, keep: int) -> None:
        """Move what the live cache holds beyond ``keep`` tokens into pages of its own.

        What the policy finds least worth its bytes is given up instead. The states of the tip,
        which the next token changes, are copied.
        """
        path = self._live_path()
        for node in path:
            if node.start < keep < node.end:
                self.trie.split_pages(node, keep)
        leaving = [p for n in path for p in n.pages if p.start >= keep and p.residence == "live"]
        row_bytes = self._row_bytes()
        sizes = {id(p): p.tokens * row_bytes for p in leaving}
        over = self.live_bytes() + self.stored_bytes() + sum(sizes.values()) - self.budget
        if over > 0:
            self._give_up(over, sizes)
        for page in leaving:
            if page.residence == "live":
                page.capture(self.live, self.groups)
        if self._tip_mark is not None:
            tip, self._tip_mark = self._tip_mark, None
            taken = Mark.take(tip.at, tip.kind, self.live, self.layout.states)
            tip.states, tip.nbytes = taken.states, taken.nbytes
            self._tally.nbytes += tip.nbytes

    def _row_bytes(self) -> int:
        """Bytes of one token's rows over all row layers."""
        total = 0
        for index in self.layout.rows:
            layer = self.live[index]
            if layer.keys is not None:
                total += (layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[2]
        return total

    def rewind(self, keep: int) -> None:
        """Cut the live row layers to ``keep`` tokens; states are the caller's to set."""
        for index in self.layout.rows:
            ly.rewind(self.live[index], keep)
        del self.live_ids[keep:]

    def read_in(self, pages: Sequence[Page], until: int, total: int) -> None:
        """Append stored rows to the live cache, up to position ``until``.

        Args:
            pages: consecutive, the first reaches over the live offset.
            until: the last one may be used in part.
            total: rows to have room for.
        """
        at = len(self.live_ids)
        parts: dict[int, list[ly.Rows]] = {i: [] for i in self.layout.rows}
        for page in pages:
            a, b = max(page.start, at) - page.start, min(page.end, until) - page.start
            for index, (keys, values) in page.layer_rows(self.groups):
                whole = (a, b) == (0, page.tokens)
                parts[index].append(
                    (keys, values) if whole else (keys[..., a:b, :], values[..., a:b, :])
                )
        for index, layer_parts in parts.items():
            ly.append_rows(self.live[index], layer_parts, total)

    def set_states(self, states: dict[int, Any] | None) -> None:
        """Put the state layers to a snapshot, or to their beginning when None."""
        fresh = self._make() if states is None and self.layout.states else []
        for index in self.layout.states:
            self.live[index] = fresh[index] if states is None else ly.restored(states[index])

    def reserve(self, total: int) -> None:
        """Give every row layer room for ``total`` rows, layer by layer."""
        for index in self.layout.rows:
            ly.reserve(self.live[index], total)

    def learn_groups(self) -> None:
        """Once the live cache has content: which row layers are stored together."""
        if not self.groups and self.layout.rows:
            self.groups = group_layers(self.live, self.layout.rows)

    def drop_live(self) -> None:
        """Forget the live cache and the rows that only it holds."""
        for node in self._live_path():
            for page in node.pages:
                if page.residence == "live":
                    page.drop()
        self.forget_live()

    def forget_live(self) -> None:
        """Start with an empty live cache; nothing in the trie is ``live`` any more."""
        self._drop_tip_mark()
        self.live = self._make()
        self.live_ids = array("i")

    def _drop_tip_mark(self) -> None:
        if self._tip_mark is not None:
            node, _ = self.trie.match(self.live_array()[: self._tip_mark.at])
            node.marks.pop(self._tip_mark.at, None)
            self._tip_mark = None

    def record(
        self, owner: str | None, tip: MarkKind | None, marks: Sequence[Mark]
    ) -> Node[Page, Mark]:
        """Put the live path into the trie: its rows are live.

        Args:
            owner: whose tip this is; its former one is released.
            tip: kind of the mark at the end, where the live states stand; None for no mark.
            marks: snapshots taken on the way.

        Returns:
            The node that the path ends in.
        """
        offset = len(self.live_ids)
        if not offset:
            return self.trie.root
        node = self.trie.insert(self.live_array())
        path = node.path()
        if offset < node.end:
            self.trie.split_pages(node, offset)
        for step in path:
            step.uses += 1
            step.last_used = self.clock
            for page in step.pages:
                if page.end <= offset:
                    page.now_live()
                    page.last_used = self.clock
            step.pages = joined(step.pages)
        for mark in marks:
            holder = next(n for n in path if n.start < mark.at <= n.end)
            if mark.at not in holder.marks or not holder.marks[mark.at].nbytes:
                holder.marks[mark.at] = mark
                self._tally.nbytes += mark.nbytes
        if tip and self.stateful and offset not in node.marks:
            self._tip_mark = node.marks[offset] = Mark(offset, tip, last_used=self.clock)
        if owner is not None:
            self.release(owner)
            node.owners[owner] = offset
        return node

    def release(self, owner: str) -> None:
        """The cell or branch doesn't need its path any more; it stays until room is needed."""
        for node in self.trie.nodes():
            node.owners.pop(owner, None)

    # --- giving up ---------------------------------------------------------------------------

    def enforce(self) -> int:
        """Give up pages and snapshots until the budget holds; bytes freed."""
        over = self.live_bytes() + self.stored_bytes() - self.budget
        return self._give_up(over, {}) if over > 0 else 0

    def fit_live(self) -> None:
        """Between requests: shrink the live cache, or let go of it, when it alone is too large."""
        if self.live_bytes() <= self.budget:
            return
        offset = len(self.live_ids)
        if not self.stateful and offset * self._row_bytes() <= self.budget:
            for index in self.layout.rows:
                ly.shrink(self.live[index], offset)
        if self.live_bytes() > self.budget:
            log.debug("live cache of %d bytes is over the budget: let go", self.live_bytes())
            self.drop_live()
            self._prune()

    def _give_up(self, need: int, leaving: dict[int, int]) -> int:
        before = self.stored_bytes()
        described, by_key = items(self, leaving)
        for key in retention.choose(described, need, self.clock):
            thing, node = by_key[key]
            if isinstance(thing, Page):
                thing.drop()
            else:
                self._tally.nbytes -= node.marks.pop(thing.at).nbytes
        self._prune()
        freed = before - self.stored_bytes()
        log.debug("gave up %d bytes for %d needed", freed, need)
        return freed

    def evict(self, nbytes: int | None = None) -> int:
        """Give up at least ``nbytes`` now, or everything, the live cache included; bytes freed."""
        before = self.live_bytes() + self.stored_bytes()
        target = before if nbytes is None else nbytes
        self._give_up(target, {})
        if before - self.live_bytes() - self.stored_bytes() < target:
            self.drop_live()
        self._prune()
        mx.clear_cache()
        return before - self.live_bytes() - self.stored_bytes()

    def clear(self) -> None:
        """Forget everything."""
        self._tip_mark = None
        self.live, self.live_ids = self._make(), array("i")
        self.trie = self._empty_trie()
        mx.clear_cache()

    def _prune(self) -> None:
        """Forget the oldest given-up leaves beyond what is kept for explanations."""
        live = {id(n) for n in self._live_path()}
        while ghosts := [
            n for n in self.trie.nodes() if not n.children and id(n) not in live and _is_ghost(n)
        ]:
            ghosts.sort(key=lambda n: n.last_used)
            tokens, count = sum(len(n.tokens) for n in ghosts), len(ghosts)
            if tokens <= GHOST_TOKENS and count <= GHOST_NODES:
                return
            # A removal can merge the parent and make it a leaf: look again afterwards.
            for node in ghosts:
                if tokens <= GHOST_TOKENS and count <= GHOST_NODES:
                    break
                tokens, count = tokens - len(node.tokens), count - 1
                self.trie.remove(node)

    def check(self) -> None:
        """Raise ``AssertionError`` when an invariant is broken."""
        self.trie.check()
        offset = len(self.live_ids)
        for index, layer in enumerate(self.live):
            at = getattr(layer, "offset", offset)
            assert at == offset, f"layer {index} stands at {at}, recorded are {offset}"
        assert self.trie.match(self.live_array())[1] == offset, "the live path left the trie"
        path = self._live_path()
        on_path = {id(n) for n in path}
        for node in self.trie.nodes():
            for page in node.pages:
                is_live = id(node) in on_path and page.end <= offset
                assert (page.residence == "live") == is_live, (node, page, offset)
            for mark in node.marks.values():
                assert bool(mark.nbytes) or mark is self._tip_mark, (node, mark.at)
        held = sum(
            sum(p.nbytes for p in node.pages) + sum(m.nbytes for m in node.marks.values())
            for node in self.trie.nodes()
        )
        assert held == self.stored_bytes(), (held, self.stored_bytes())
        total = self.live_bytes() + self.stored_bytes()
        assert total <= self.budget or not self.stored_bytes(), (total, self.budget)


def _is_ghost(node: Node[Page, Mark]) -> bool:
    return not node.marks and all(p.residence == "gone" for p in node.pages)
