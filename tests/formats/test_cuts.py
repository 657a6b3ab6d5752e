"""Cuts between shards: the writer's are those of the specification, and a change moves no other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsmount.formats.cuts import BITS, CutStream, cut

Member = tuple[int, int]  # hash, decoded bytes
LIMIT = 100
TOP = 1 << (BITS - 1)

hashes = st.one_of(
    st.integers(0, (1 << BITS) - 1),
    st.integers(0, 9),
    st.integers(0, BITS - 1).map(lambda bit: 1 << bit),
    st.integers(0, 5).map(lambda near: TOP - 3 + near),
)
sizes = st.one_of(st.integers(1, 30), st.integers(1, 2 * LIMIT))
partitions = st.lists(st.tuples(hashes, sizes), max_size=40).map(sorted)
of_equal_size = st.tuples(st.sets(hashes, max_size=60), st.integers(1, LIMIT)).map(
    lambda pair: [(hashed, pair[1]) for hashed in sorted(pair[0])]
)


def shards(members: Sequence[Member]) -> list[tuple[Member, ...]]:
    ends = list(itertools.accumulate(cut(members, LIMIT), initial=0))
    return [tuple(members[begin:end]) for begin, end in itertools.pairwise(ends)]


def size(members: Sequence[Member]) -> int:
    return sum(size for _, size in members)


def streamed(members: Sequence[Member]) -> list[int]:
    """The cuts of a stream, which is seen to hold back little and to foretell its next cut."""
    stream, held, found = CutStream(LIMIT), [], []
    for hashed, raw in members:
        foretold = stream.boundary
        complete = stream.add(hashed, raw)
        assert len(complete) < 2 or complete[0] in (foretold, len(held))
        for count in complete:
            assert count <= len(held)
            held = held[count:]
        assert size(held) <= LIMIT or held[0][0] == held[-1][0]
        held.append((hashed, raw))
        assert 0 <= stream.boundary < len(held)
        found += complete
    return found + ([len(held)] if held else [])


@given(st.one_of(partitions, of_equal_size))
def test_the_streams_cuts_are_those_that_are_specified(members: list[Member]) -> None:
    assert streamed(members) == cut(members, LIMIT)


@given(partitions)
def test_every_member_is_in_one_shard_that_is_small_or_can_not_be_cut(
    members: list[Member],
) -> None:
    found = shards(members)
    assert list(itertools.chain(*found)) == members
    for shard in found:
        assert shard
        assert size(shard) <= LIMIT or shard[0][0] == shard[-1][0]
    for one, two in itertools.pairwise(found):
        assert one[-1][0] < two[0][0]


@given(of_equal_size, hashes)
def test_one_more_or_less_of_equal_size_changes_two_shards_at_most(
    members: list[Member], hashed: int
) -> None:
    less = [member for member in members if member[0] != hashed]
    more = sorted([*less, (hashed, members[0][1] if members else 1)])
    before, after = set(shards(less)), set(shards(more))
    assert len(after - before) <= 2
    assert len(before - after) <= 1
    assert sum(map(len, after - before)) <= 1 + sum(map(len, before - after))


@given(partitions, st.tuples(hashes, sizes))
def test_a_change_writes_only_what_was_in_its_own_shard(members: list[Member], new: Member) -> None:
    """Of any size; a member that comes splits its shard, one that goes may join some into one."""
    less = [member for member in members if member[0] != new[0]]
    before, after = set(shards(less)), set(shards(sorted([*less, new])))
    old, made = before - after, after - before
    assert len(old) <= 1
    assert sorted(itertools.chain(*made)) == sorted([*itertools.chain(*old), new])


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([], []),
        ([(5, 1000)], [1]),
        ([(0, 50), (TOP, 50)], [2]),
        ([(0, 50), (TOP, 51)], [1, 1]),
        ([(0, 1), (1, 1), (2, 100)], [2, 1]),
        ([(7, 100), (7, 100), (8, 1)], [2, 1]),
        ([(0, 40), (1, 40), (TOP, 1), (TOP + 1, 40)], [2, 2]),
        ([(0, 1), (TOP, 60), (TOP + 1, 60)], [1, 1, 1]),
    ],
)
def test_cuts_as_specified(members: list[Member], expected: list[int]) -> None:
    assert cut(members, LIMIT) == expected
    assert streamed(members) == expected
