"""Measures of mixing: by brute force, at known extremes, and of what the defaults are good for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsmount.errors import PlanError
from fsmount_loader.division import Division
from fsmount_loader.mixing import TOLERANCE, Mixing, Population, Shape
from fsmount_loader.order import Order, cut


def population(counts: Sequence[int], column: Any = None) -> Population:
    """Partitions of so many rows each."""
    return Population.of(np.repeat(np.arange(len(counts), dtype=np.int32), counts), column)


def mixing(counts: Sequence[int], global_batch: int, world_size: int = 1) -> Mixing:
    """Partitions of so many rows each, in one shard each."""
    shards = np.array(counts, np.int64)
    return Mixing(population(counts), shards, global_batch, world_size, seed=3, epoch=0)


def distance(part: np.ndarray[Any, Any], whole: np.ndarray[Any, Any]) -> float:
    """The Jensen-Shannon distance as it is defined."""
    middle = (part + whole) / 2

    def divergence(of: np.ndarray[Any, Any]) -> float:
        return sum(p * np.log2(p / m) for p, m in zip(of, middle, strict=True) if p)

    return float(np.sqrt(max(0, (divergence(part) + divergence(whole)) / 2)))


@st.composite
def drawn(draw: st.DrawFn) -> tuple[list[int], np.ndarray[Any, Any]]:
    counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    size = draw(st.integers(1, 5))
    row = st.integers(0, sum(counts) - 1)
    batch = st.lists(row, min_size=size, max_size=size)
    return counts, np.array(draw(st.lists(batch, min_size=1, max_size=4)))


@given(drawn())
def test_measures_are_those_of_brute_force(case: tuple[list[int], np.ndarray[Any, Any]]) -> None:
    counts, batches = case
    of = population(counts)
    found = of.quality(batches)
    whole = np.array(counts) / sum(counts)
    parts = [np.bincount(of.partition[batch], minlength=len(counts)) for batch in batches]
    mixes = [part / batches.shape[1] for part in parts]
    assert found.partitions == np.mean([np.count_nonzero(part) for part in parts])
    assert found.js_distance == pytest.approx(np.mean([distance(m, whole) for m in mixes]))
    variances = []  # of batch means, for each way to give the partitions values of 1 and -1
    for values in product((-1, 1), repeat=len(counts)):
        value = np.array(values)[of.partition]
        variances.append(np.mean((value[batches].mean(axis=1) - value.mean()) ** 2))
    assert found.variance == pytest.approx(np.mean(variances), abs=1e-12)


def test_independent_draws_are_those_of_brute_force() -> None:
    column = np.array([3, 8, 1, -7, 2], np.int16)
    of = population([1, 3, 1], column)
    found = of.independent(3, batches=20_000)
    all_draws = of.quality(np.array([*product(range(5), repeat=3)]))
    assert found.partitions == pytest.approx(all_draws.partitions)
    assert found.variance == pytest.approx(all_draws.variance)
    assert found.column_variance == pytest.approx(all_draws.column_variance)
    assert found.js_distance == pytest.approx(all_draws.js_distance, rel=0.01)


def test_a_column_s_variance_is_in_units_of_its_own() -> None:
    column = np.array([1e300, 3e300, -2e300, 6e300])
    found = population([2, 2], column).quality(np.array([[0, 1], [2, 3]]))
    assert found.column_variance == pytest.approx(0.0)  # both means are the version's
    found = population([2, 2], column).quality(np.array([[0, 2], [1, 3]]))
    small = column / 1e300
    assert found.column_variance == pytest.approx(2.5**2 / small.var())
    for wrong in ([1.0, np.nan], [np.inf, 0.0], [0.1, 0.1]):
        with pytest.raises(PlanError, match=r"^it "):
            population([1, 1], np.array(wrong))


COUNTS = [40] * 250


def test_known_extremes() -> None:
    """The manifests' order is as bad as can be, a perfect shuffle as good as independent draws."""
    of = mixing(COUNTS, 80, 4)
    rank, together = of.compare(Order(cut(of.rows_per_shard, 16), 0, False, 1, 1))
    assert together.ours.partitions == 2
    assert rank.ours.partitions == 1
    assert together.ratio("variance") == pytest.approx(40, rel=0.02)  # 1/2 of 1/80
    assert rank.ratio("variance") == pytest.approx(20, rel=0.02)
    assert rank.ratio("js_distance") > 1
    rows = [np.random.default_rng(n).permutation(10_000) for n in range(20)]
    perfect = of.population.quality(np.concatenate(rows).reshape(-1, 80))
    expected = of.population.independent(80, 2500)
    assert perfect.variance / expected.variance == pytest.approx(1, abs=0.02)
    assert perfect.js_distance / expected.js_distance == pytest.approx(1, abs=0.01)
    assert perfect.partitions / expected.partitions == pytest.approx(1, abs=0.01)


def test_with_one_partition_there_is_nothing_to_mix() -> None:
    of = mixing([50], 8, 2)
    for one in of.compare(of.order(of.shape())):
        assert (one.ours.js_distance, one.ours.variance, one.worst) == (0, 0, 1)


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_have_the_batches_that_they_are_given(shuffle: bool) -> None:
    of = mixing([7, 30, 24], 12, 3)
    order = Order(cut(of.rows_per_shard, 4), 5, shuffle, 3, 4)
    batches = of.batches(order, positions=1)
    ranks = of.of_ranks(batches, interleaved=shuffle)
    assert len(batches) >= 61 // 12  # all whole ones of an epoch at least
    found = iter(ranks.tolist())
    for place in range(len(batches)):
        epoch, number = divmod(place, 61 // 12)
        for rank in range(3):
            division = Division(61, 12, 3, rank, shuffle, False)
            positions, valid = division.positions(0, number)
            assert valid.all()
            assert next(found) == order.of_epoch(epoch).rows(positions).tolist()


def test_of_many_batches_the_same_few_are_chosen() -> None:
    of = mixing(COUNTS, 8)
    order = of.order(of.shape())
    batches = of.batches(order, positions=1280)
    assert len(batches) == 10
    assert np.array_equal(batches, of.batches(order, positions=1280))
    whole = order.of_epoch(0).rows(np.arange(10_000)).reshape(-1, 8).tolist()
    places = [whole.index(batch) for batch in batches.tolist()]
    assert places == sorted(set(places))
    with pytest.raises(PlanError, match=r"10000 samples .* 10001"):
        mixing(COUNTS, 10_001).batches(order)


def test_what_the_defaults_are_good_for() -> None:
    """As docs/loading.md has it, of a version of millions of samples."""
    counts = [494] * 10_926

    def variance(size: int, world_size: int, shape: Shape) -> list[float]:
        of = mixing(counts, size, world_size)
        found = of.compare(of.order(shape), 1 << 16)
        return [one.ratio("variance") for one in found]

    defaults = mixing(counts, 8).shape()
    assert defaults == Shape(960, 16, 16)
    of = mixing(counts, 512, 64)
    rank, _ = of.compare(of.order(defaults), 1 << 16)
    assert rank.ours.partitions > 7.99
    assert variance(512, 64, defaults) == pytest.approx([1, 1], abs=0.01)
    assert variance(1024, 128, defaults)[1] == pytest.approx(1.08, abs=0.02)
    assert variance(2048, 256, defaults)[1] == pytest.approx(1.72, abs=0.03)
    assert variance(2048, 256, Shape(1920, 16, 16))[1] == pytest.approx(1.07, abs=0.02)


def test_suggestions_are_the_cheapest_that_suffice_or_the_best() -> None:
    """Of 1,500 chunks there can't be 1,024 streams, but of chunks of at most 32 rows."""
    of = mixing([40] * 1500, 1024, 8)
    long, *others = of.suggest()
    assert [one.shape for one in others] == [Shape(960, 16, 32), Shape(960, 16, 16)]
    for one in others:
        assert one.suffices
        found = of.compare(of.order(one.shape))
        assert max(c.worst for c in found) == pytest.approx(one.worst, abs=0.03)
        assert one.worst <= TOLERANCE
    assert (long.shape.streams, long.shape.chunk_size) == (480, 64)
    assert not long.suffices
    tried = [of.compare(of.order(Shape(480, window, 64)), 1 << 16) for window in (16, 32, 64, 128)]
    assert long.worst == min(max(c.worst for c in found) for found in tried) > TOLERANCE
