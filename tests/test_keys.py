"""Content addresses: equal for equal content, and for nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_jupyter.cache import keys
from mlx_jupyter.cache.trie import PAGE

IDS = np.arange(3 * PAGE + 10, dtype=np.int32)


def test_addresses_are_what_they_were():
    # With other ones, all that was ever stored would be lost.
    first = keys.root("a fingerprint")
    chain = keys.chain(first, IDS[:PAGE])
    assert first.hex() == "747ec8e0b99c01489dbd5c9ef8f57eac"
    assert chain.hex() == "9a81b94bb2ebed4a7a560a37d34d72b3"
    assert (
        keys.entry(chain, IDS[PAGE : PAGE + 3], "rows", PAGE).hex()
        == "e01caee3afbb7f335ad0c3e15b6abe74"
    )


def test_a_chain_has_a_key_at_each_full_page():
    found = keys.chains(b"r" * keys.SIZE, IDS)
    assert len(found) == 4
    assert found[2] == keys.chain(found[1], IDS[PAGE : 2 * PAGE])
    assert keys.chains(b"r" * keys.SIZE, IDS[: 3 * PAGE]) == found
    assert keys.chains(b"r" * keys.SIZE, IDS[: 3 * PAGE - 1]) == found[:3]
    assert keys.chains(b"r" * keys.SIZE, IDS[:0]) == found[:1]


@given(cut=st.integers(0, len(IDS)), other=st.integers(-5, 5))
def test_two_chains_part_where_the_ids_do(cut, other):
    changed = IDS.copy()
    changed[cut:] += other
    first = keys.root("m")
    same = len(IDS) // PAGE if other == 0 else cut // PAGE
    a, b = keys.chains(first, IDS), keys.chains(first, changed)
    assert [x == y for x, y in zip(a, b, strict=True)] == [n <= same for n in range(len(a))]


def test_every_part_of_an_address_counts():
    parents = [keys.root("a"), keys.root("b"), keys.chain(keys.root("a"), IDS[:PAGE])]
    tokens = [IDS[:5], IDS[:6], IDS[1:6], np.zeros(5, np.int32), np.zeros(6, np.int32)]
    kinds: tuple[keys.Kind, ...] = ("rows", "window", "state")
    every = list(itertools.product(parents, tokens, kinds, (0, 3, 256)))
    assert len({keys.entry(*each) for each in every}) == len(every)
    full = keys.entry(parents[0], IDS[:PAGE], "rows", 0)
    assert full not in (keys.chain(parents[0], IDS[:PAGE]), *parents)


def test_the_arrays_layout_and_type_are_nothing():
    parent, wide = keys.root("a"), np.zeros((5, 2), np.int32)
    wide[:, 0] = IDS[:5]
    expected = keys.entry(parent, IDS[:5], "rows", 0)
    assert keys.entry(parent, wide[:, 0], "rows", 0) == expected
    assert keys.entry(parent, IDS[:5].astype(np.int64), "rows", 0) == expected
    assert keys.entry(parent, IDS[:5].astype(">i4"), "rows", 0) == expected


@pytest.mark.parametrize(
    ("kind", "start", "count", "base", "end"),
    [
        ("rows", 0, 256, 0, 256),
        ("rows", 0, 1, 0, 1),
        ("rows", 300, 45, 256, 301),
        ("window", 511, 256, 256, 512),
        ("state", 1, 1, 0, 1),
        ("state", 256, 256, 0, 256),
        ("state", 257, 1, 256, 257),
    ],
)
def test_where_things_lie(kind, start, count, base, end):
    assert keys.end(kind, start, count) == end
    assert keys.base(end) == base


@pytest.mark.parametrize(
    ("kind", "start", "count"),
    [
        ("rows", 0, 0),
        ("rows", 0, 257),
        ("rows", 300, 44),
        ("rows", -1, 5),
        ("state", 0, 0),
        ("state", 0, 256),
        ("state", 300, 45),
        ("state", 257, 0),
    ],
)
def test_impossible_places(kind, start, count):
    with pytest.raises(ValueError, match="No "):
        keys.end(kind, start, count)
