"""The radix trie against a plain set of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_jupyter.cache.trie import PAGE, Trie, common_prefix


@dataclass
class Plain:
    """A page that knows its place only."""

    start: int
    end: int

    def split(self, at: int) -> tuple[Plain, Plain]:
        return Plain(self.start, at), Plain(at, self.end)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def tree() -> Trie:
    return Trie(Plain)


def tokens_to(node) -> np.ndarray:
    return np.concatenate([n.tokens for n in node.path()])


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12)


@given(sequences)
def test_match_is_the_longest_common_prefix_with_any_sequence(paths: list[list[int]]) -> None:
    trie = tree()
    known: list[list[int]] = []
    for path in paths:
        want = max((common_prefix(ids(*path), ids(*k)) for k in known), default=0)
        assert trie.match(ids(*path))[1] == want
        end = trie.insert(ids(*path))
        trie.check()
        known.append(path)
        assert tokens_to(end).tolist()[: len(path)] == path
    for path in known:
        assert trie.match(ids(*path))[1] == len(path)


@given(sequences, st.data())
def test_removing_leaves_keeps_the_others(paths: list[list[int]], data: st.DataObject) -> None:
    trie = tree()
    for path in paths:
        trie.insert(ids(*path))
    while leaves := [n for n in trie.nodes() if not n.children]:
        leaf = data.draw(st.sampled_from(leaves))
        rest = [tokens_to(n) for n in leaves if n is not leaf]
        trie.remove(leaf)
        trie.check()
        assert all(trie.match(path)[1] == len(path) for path in rest)
    assert not trie.root.children


@given(st.integers(1, 3 * PAGE), st.integers(1, 3 * PAGE))
def test_pages_follow_the_absolute_grid_however_a_path_grew(first: int, second: int) -> None:
    trie = tree()
    trie.insert(np.zeros(first, np.int32))
    node = trie.insert(np.zeros(max(first, second), np.int32))
    trie.check()
    assert node.end == max(first, second)
    assert len(list(trie.nodes())) == 1


def test_a_split_shares_out_pages_marks_and_owners() -> None:
    @dataclass
    class Spot:
        at: int

    trie = tree()
    node = trie.insert(np.arange(600, dtype=np.int32))
    node.marks = {100: Spot(100), 300: Spot(300), 600: Spot(600)}
    node.owners = {"early": 300, "late": 301}
    trie.insert(np.array([*range(300), 7], np.int32))
    trie.check()
    upper = node.parent
    assert (upper.start, upper.end, node.start, node.end) == (0, 300, 300, 600)
    assert sorted(upper.marks) == [100, 300]
    assert sorted(node.marks) == [600]
    assert upper.owners == {"early": 300}
    assert node.owners == {"late": 301}
    assert [(p.start, p.end) for p in upper.pages] == [(0, 256), (256, 300)]
    assert [(p.start, p.end) for p in node.pages] == [(300, 512), (512, 600)]


def test_nothing_is_stored_for_nothing() -> None:
    trie = tree()
    assert trie.insert(ids()) is trie.root
    assert trie.match(ids()) == (trie.root, 0)
    assert list(trie.nodes()) == []
    assert common_prefix(ids(), ids(1)) == 0


def test_tokens_of_a_node_cannot_be_changed() -> None:
    trie = tree()
    given = ids(1, 2, 3)
    node = trie.insert(given)
    given[0] = 9
    assert node.tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        node.tokens[0] = 5
