"""Time waiting for data against time computing, by a clock that the test moves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from small_versions import build, numbered

from fsmount_loader import Batch, ShardDataset, ShardLoader
from fsmount_loader.waiting import Meter, Waiting


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def iterate(clock: FakeClock, times: list[tuple[float, float]]) -> tuple[Meter, list[Waiting]]:
    """An iteration that waits and computes so long for each batch; what it was told."""

    def batches() -> Iterator[Batch]:
        for waited, _ in times:
            clock.now += waited
            yield Batch()

    meter, told = Meter(clock), []  # type: ignore[var-annotated]
    for (_, computed), _ in zip(times, meter.timed(batches(), told.append), strict=False):
        clock.now += computed
    return meter, told


def test_time_is_counted_by_what_it_was_spent_on() -> None:
    meter, told = iterate(FakeClock(), [(8.0, 1.0), (0.5, 2.0), (0.25, 4.0), (0.0, 9.0)])
    now = meter.now()
    assert now == Waiting(waited=8.75, computed=7.0, batches=4)  # the last one is still in use
    assert (now.seconds, now.fraction) == (15.75, 8.75 / 15.75)
    assert told == []
    assert Waiting().fraction == 0


def test_waiting_is_told_once_and_the_first_batches_do_not_count() -> None:
    slow, fast = (1.0, 1.0), (0.125, 1.0)
    _, told = iterate(FakeClock(), [slow] * 10 + [(0.0, 1.0)] * 32 + [fast] * 100)
    assert told == [Waiting(waited=4.0, computed=32.0, batches=32)]


@pytest.mark.parametrize(
    "times",
    [
        [(0.125, 1.25)] * 200,  # less than a tenth
        [(9.0, 0.0)] * 10 + [(0.0, 1.0)] * 200,  # only at first
        [(1.0, 0.0)] * 40,  # few batches
        [(0.0625, 0.0)] * 160,  # little time
    ],
)
def test_nothing_is_told_without_a_reason(times: list[tuple[float, float]]) -> None:
    assert iterate(FakeClock(), times)[1] == []


def test_a_stretch_is_long_enough_in_batches_and_in_seconds() -> None:
    quick = [(0.0625, 0.0)] * 200
    assert iterate(FakeClock(), quick)[1] == [Waiting(waited=10.0, computed=0.0, batches=160)]


@pytest.fixture
def data(tmp_path: Path) -> ShardDataset:
    """Fifty batches for rank 1 of 2."""
    root = build(tmp_path / "v", {"a": [numbered(100)]})
    return ShardDataset(root, batch_size=1, rank=1, world_size=2)


def test_a_loader_starts_anew_in_each_iteration(data: ShardDataset) -> None:
    clock = FakeClock()
    loader = ShardLoader(data, clock=clock)
    assert loader.waiting == Waiting()
    for computed in (1.0, 2.0):
        for number, _ in enumerate(loader):
            assert loader.waiting == Waiting(0.0, number * computed, number + 1)
            clock.now += computed
        assert loader.waiting == Waiting(0.0, 50 * computed, 50)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_logs_one_line_an_epoch(
    data: ShardDataset, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = ShardLoader(data, workers, clock=map(float, count()).__next__)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fsmount_loader"):
            assert sum(1 for _ in loader) == 50
        (record,) = caplog.records
        assert record.getMessage() == (
            "rank 1 of 2 waited for data 50% of the time (32.0 of 64.0 s, 32 batches): the loader "
            f"is the bottleneck; try more than workers={workers} while CPU cores are idle, then "
            'see "Is the loader the bottleneck?" in docs/loading.md'
        )
