"""Order 1 against its specification, a slow reference, and what it is for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_order
from hypothesis import given
from hypothesis import strategies as st

from fsmount_loader import order
from fsmount_loader.division import Division

SPECIFICATION = Path(__file__).parents[2] / "docs" / "order.md"


def vectors() -> dict[str, Any]:
    block = re.search(r"```json\n(.*?)```", SPECIFICATION.read_text(), re.DOTALL)
    assert block is not None
    value: dict[str, Any] = json.loads(block[1])
    return value


def epoch_of(  # noqa: PLR0917 - the parameters of the order
    rows_per_shard: list[int], chunk_size: int, streams: int, window: int, seed: int, epoch: int
) -> order.EpochOrder:
    bounds = order.cut(np.array(rows_per_shard, np.int64), chunk_size)
    return order.Order(bounds, seed, True, streams, window).of_epoch(epoch)


def test_the_specification_s_vectors() -> None:
    told = vectors()
    for state, output in told["splitmix64"]:
        assert order.splitmix64(np.array([state], np.uint64))[0] == output
    for (seed, epoch, word, index), key in told["key"]:
        assert order.keys(seed, epoch, word, np.array([index]))[0] == key
    for case in told["chunks"]:
        bounds = order.cut(np.array(case["rows_per_shard"]), case["chunk_size"])
        assert bounds.tolist() == case["bounds"]
    for chunks, streams in told["streams"]:
        assert order.default_streams(chunks) == streams
    for case in told["order"]:
        rows = case.pop("rows")
        assert epoch_of(**case).rows(np.arange(len(rows))).tolist() == rows


PARAMETERS = st.fixed_dictionaries(
    {
        "rows_per_shard": st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any),
        "chunk_size": st.integers(1, 20),
        "streams": st.integers(1, 40),
        "window": st.integers(1, 20),
        "seed": st.integers(0, 2**64 - 1),
        "epoch": st.integers(0, 2**40),
    }
)


@given(PARAMETERS)
def test_it_is_the_reference_s_order(parameters: dict[str, Any]) -> None:
    total = sum(parameters["rows_per_shard"])
    rows = epoch_of(**parameters).rows(np.arange(total)).tolist()
    assert rows == reference_order.epoch_order(**parameters)
    assert sorted(rows) == list(range(total))


@given(PARAMETERS, st.data())
def test_any_position_can_be_computed_alone(
    parameters: dict[str, Any], data: st.DataObject
) -> None:
    total = sum(parameters["rows_per_shard"])
    positions = data.draw(st.lists(st.integers(0, total - 1), max_size=20))
    one = epoch_of(**parameters)
    whole = one.rows(np.arange(total))
    assert one.rows(np.array(positions, np.int64)).tolist() == whole[positions].tolist()


@pytest.mark.parametrize("streams", [1, 7, 2**31 - 1])
def test_the_largest_windows_do_not_overflow(streams: int) -> None:
    most = 2**31 - 1
    rows = [10, 1, 7, 5]
    found = epoch_of(rows, most, streams, most, seed=2**64 - 1, epoch=2**62 - 1).rows(np.arange(23))
    few = min(streams, 23)  # more streams than rows: each has one row, or none
    wanted = reference_order.epoch_order(
        rows, chunk_size=most, streams=few, window=most, seed=2**64 - 1, epoch=2**62 - 1
    )
    assert found.tolist() == wanted


def test_many_positions_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    one = epoch_of([100, 100], 16, 4, 16, 1, 1)
    whole = one.rows(np.arange(200)).tolist()
    monkeypatch.setattr(order, "_KEYS_AT_ONCE", 100)
    assert one.rows(np.arange(200)).tolist() == whole


def test_epochs_and_seeds_differ_and_chunks_stay_near() -> None:
    one = epoch_of([485] * 100, 16, 960, 16, 0, 0).rows(np.arange(48500))
    for other in (
        epoch_of([485] * 100, 16, 960, 16, 0, 1),
        epoch_of([485] * 100, 16, 960, 16, 1, 0),
    ):
        assert np.mean(one == other.rows(np.arange(48500))) < 0.01
    partitions_in_batch = [len(set(one[at : at + 64] // 485)) for at in range(0, 48000, 64)]
    assert np.mean(partitions_in_batch) > 40  # of 64 drawn from 100: 47 if independent


@st.composite
def divisions(draw: st.DrawFn) -> tuple[int, int, int, bool, bool]:
    world = draw(st.integers(1, 5))
    samples, per_rank = draw(st.integers(1, 100)), draw(st.integers(1, 9))
    return samples, world, per_rank * world, draw(st.booleans()), draw(st.booleans())


@given(divisions(), st.integers(0, 120))
def test_ranks_share_out_each_position_once(
    of: tuple[int, int, int, bool, bool], start: int
) -> None:
    samples, world, size, interleaved, drop_last = of
    ranks = [Division(samples, size, world, r, interleaved, drop_last) for r in range(world)]
    batches = {rank.batches(start) for rank in ranks}
    assert len(batches) == 1
    seen: list[int] = []
    for batch in range(batches.pop()):
        parts = [rank.positions(start, batch) for rank in ranks]
        assert {len(positions) for positions, _ in parts} == {size // world}
        together = sorted(p for positions, valid in parts for p in positions[valid].tolist())
        first = start + batch * size
        assert together == [p for p in range(first, first + size) if p < samples]
        if not interleaved:
            joined = np.concatenate([positions for positions, _ in parts])
            assert joined.tolist() == [p % samples for p in range(first, first + size)]
        seen += together
        assert ranks[0].after(start, batch + 1) == (
            samples if batch + 1 == ranks[0].batches(start) else first + size
        )
    dropped = max(0, samples - start) % size if drop_last else 0
    assert seen == list(range(start, max(start, samples) - dropped))


@given(st.integers(1, 200), st.integers(1, 50))
def test_padding_is_less_than_one_batch(samples: int, size: int) -> None:
    fraction = Division(samples, size, 1, 0, True, False).pad_fraction()
    assert fraction == pytest.approx((-samples % size) / (samples + -samples % size))
