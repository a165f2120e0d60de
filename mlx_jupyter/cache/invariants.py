"""What must hold of a prefix cache, in one list, and the check of it: for tests and bug reports.

Whenever nothing is in flight (after open, after each chunk of a prefill, before close):

1. ``node.start == parent.end``; siblings differ in their first token; a node's pages cover its
   edge; strips, marks and owners' offsets lie within it.
2. Every layer that knows where it stands stands at ``live.offset``.
3. Counted bytes are true bytes: each thing counts what its buffers take, the tally is their sum.
4. Each row is stored once: strips of a path don't overlap, a page whose rows are elsewhere has no
   arrays, and no two stored things share a buffer, nor do they share one with the live rows and
   windows. (A live state may share a snapshot's until the next token is computed.)
5. A page or strip has exactly its tokens' rows, of every layer of its kind.
6. A mark stands at an offset that was really reached: it has the states of all state layers, and
   those that know their offset stand at it. Only the tip's may be in the live cache alone, and
   those that a file has may be in no memory.
7. An owner has one tip.

Between sessions, as well:

8. Recorded tokens == offset: the path of ``live.ids`` is in the trie, and its pages up to there are
   exactly the ``live`` ones.
9. The tip restores: one more token than the live cache holds leaves that token to compute.
10. The budget holds: live cache, pages, strips and snapshots together take no more. Over it may
    stand only what is pinned, and then nothing else is held.

What one moment can't show is for tests to follow from step to step (``tests/test_programs.py``): an
equal prompt leaves one token to compute as long as nothing was given up, every former tip restores
likewise, pinned paths stay, and what a mark holds is what a cold run has at its offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_jupyter.cache import retention
from mlx_jupyter.cache.arrays import arrays_in
from mlx_jupyter.cache.describe import items
from mlx_jupyter.cache.match import decide, match
from mlx_jupyter.cache.pages import host_bytes, things

if TYPE_CHECKING:
    from mlx_jupyter.cache.pages import Mark, Page, Stacks, Strip
    from mlx_jupyter.cache.prefix_cache import PrefixCache
    from mlx_jupyter.cache.trie import Node

    _Node = Node[Page, Strip, Mark]


def own_bytes(node: _Node) -> int:
    """Bytes that a node's pages, strips and marks hold."""
    pages, strips = sum(p.nbytes for p in node.pages), sum(s.nbytes for s in node.strips)
    return pages + strips + sum(m.nbytes for m in node.marks.values())


def check(cache: PrefixCache) -> None:
    """Between sessions: raise ``AssertionError`` when an invariant is broken."""
    check_settled(cache)
    _check_live_path(cache)
    _check_tip(cache)
    _check_budget(cache)


def check_settled(cache: PrefixCache) -> None:
    """With nothing in flight, also within a session: raise ``AssertionError`` likewise."""
    cache.trie.check()
    offset = cache.live.offset
    for at in cache.live.leaves.offsets():
        assert at == offset, f"a layer stands at {at}, recorded are {offset}"
    owners = [owner for node in cache.trie.nodes() for owner in node.owners]
    assert len(owners) == len(set(owners)), f"an owner has two tips: {sorted(owners)}"
    leaves = cache.live.leaves
    for node in cache.trie.nodes():
        for page in node.pages:
            held = page.residence == "device"
            assert page.residence != "disk" or page.twin is not None, f"no file has {page}"
            assert (page.residence == "host") == (page.host is not None), page
            _check_rows(page, len(leaves.rows) if held else 0)
        for strip in node.strips:
            assert strip.stacks or strip.elsewhere, f"{strip} is nowhere"
            _check_rows(strip, len(leaves.windows) if strip.stacks else 0)
        for mark in node.marks.values():
            _check_mark(cache, mark)
    _check_bytes(cache)


def _check_rows(thing: Page | Strip, layers: int) -> None:
    """The stacks have each layer's row of each token, and nothing else."""
    rows = [a.shape[-2] for stack in thing.stacks for a in stack]
    assert rows == [thing.tokens] * len(rows), f"{thing} has rows of {rows} tokens"
    stacked = sum(int(stack[0].shape[0]) for stack in thing.stacks)
    assert stacked == layers, f"{thing} has rows of {stacked} layers, not {layers}"


def _check_mark(cache: PrefixCache, mark: Mark) -> None:
    states = len(cache.live.leaves.states)
    if mark.elsewhere and not mark.states:
        return
    assert len(mark.states) == (0 if mark is cache.tip else states), f"states missing: {mark}"
    for state in mark.states:
        at = getattr(state, "offset", None)
        assert not isinstance(at, int) or at == mark.at, f"a state of {at} tokens in {mark}"


def _check_bytes(cache: PrefixCache) -> None:
    stored: list[Any] = []
    counted = 0
    for node in cache.trie.nodes():
        held: list[tuple[Page | Strip | Mark, Stacks | list[Any]]] = [
            *((p, p.stacks) for p in node.pages),
            *((s, s.stacks) for s in node.strips),
            *((m, m.states) for m in node.marks.values()),
        ]
        for thing, content in held:
            arrays = arrays_in(content)
            true = _buffers(arrays)
            assert thing.nbytes == true, f"{thing} counts {thing.nbytes} bytes, not {true}"
            stored += arrays
            counted += true
    assert counted == cache.stored_bytes(), f"{cache.stored_bytes()} counted, {counted} stored"
    on_host = sum(host_bytes(thing.host) for node in cache.trie.nodes() for thing in things(node))
    assert on_host == cache.tally.host, f"{cache.tally.host} counted on the host, {on_host} there"
    assert _buffers(stored) == counted, "two stored things share a buffer"
    leaves = cache.live.leaves
    live = arrays_in([r.cache for r in leaves.rows] + [w.cache for w in leaves.windows])
    apart = counted + _buffers(live)
    assert _buffers([*stored, *live]) == apart, "something stored shares a live buffer"


def _buffers(arrays: list[mx.array]) -> int:
    """Bytes of the buffers behind evaluated arrays, each counted once."""
    return int(mx.get_array_buffer_size(arrays)) if arrays else 0


def _check_live_path(cache: PrefixCache) -> None:
    offset = cache.live.offset
    node, known = cache.trie.match(cache.live.id_array())
    assert known == offset, "the live path left the trie"
    on_path = {id(n) for n in node.path()}
    for node in cache.trie.nodes():
        for page in node.pages:
            is_live = id(node) in on_path and page.end <= offset
            assert (page.residence == "live") == is_live, (node, page, offset)


def _check_tip(cache: PrefixCache) -> None:
    offset = cache.live.offset
    path = cache.path_to(cache.live.id_array())
    if cache.tip is not None:
        assert path, "a tip without a path"
        assert path[-1].marks.get(offset) is cache.tip, f"the tip isn't at {offset}: {cache.tip}"
    elif offset and cache.needs.stateful:
        assert offset in path[-1].marks, f"no mark where the live states stand, at {offset}"
    on_path = {id(node) for node in path}
    more = np.append(cache.live.id_array(), np.int32(0))
    found = match(cache.trie.root, more, offset, lambda n: id(n) in on_path)
    plan = decide(found, cache.needs)
    assert (plan.reused, plan.recomputed) == (offset, 1), f"the tip doesn't restore: {plan}"


def _check_budget(cache: PrefixCache) -> None:
    over = cache.nbytes() - cache.budget
    if over <= 0:
        return
    described, _ = items(cache, {})
    may_go = retention.choose(described, 1 << 62, cache.requests)
    assert not may_go, f"{over} bytes over the budget, and {len(may_go)} things may go"
    assert _live_is_pinned(cache), f"{over} bytes over the budget, and the live cache may go"


def _live_is_pinned(cache: PrefixCache) -> bool:
    """Whether every token of the live cache is on a pinned path."""
    offset = cache.live.offset
    pinned = [
        (node, at)
        for node in cache.trie.nodes()
        for owner, at in node.owners.items()
        if owner in cache.pins
    ]
    tip = cache.live_path()[-1:]
    return not offset or any(tip[0] in node.path() and at >= offset for node, at in pinned)
