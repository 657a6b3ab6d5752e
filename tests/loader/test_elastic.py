"""One order, whoever delivers it: any world, any workers, resumed at any step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import pytest
from small_versions import build, numbered
from test_dataset import numbers

import fsmount_loader.passes
from fsmount_loader import Batch, ShardDataset, ShardLoader
from fsmount_loader.order import Int64s, ShuffledOrder
from fsmount_loader.read import ShardFiles
from fsmount_loader.version import VersionFiles

ORDER: dict[str, Any] = {"streams": 4, "window": 5, "chunk_size": 3, "seed": 11}


class Ranks:
    """All ranks of a run."""

    def __init__(self, root: Path, world: int, size: int, workers: int = 0, **options: Any) -> None:
        whole: dict[str, Any] = {"global_batch_size": size, "world_size": world, **options}
        self._interleaved = options.get("shuffle", True)
        self.loaders = [
            ShardLoader(ShardDataset(root, rank=rank, max_pad_fraction=1, **whole), workers)
            for rank in range(world)
        ]
        self._parts: Iterator[tuple[Batch, ...]] | None = None

    def load(self, state: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))

    def state(self) -> dict[str, Any]:
        first, *others = (loader.state_dict() for loader in self.loaders)
        assert all(other == first for other in others)
        return first

    def step(self) -> list[int] | None:
        """One global batch in the order of its positions, padding too; None at the epoch's end."""
        if self._parts is None:
            self._parts = zip(*self.loaders, strict=True)
        parts = next(self._parts, None)
        if parts is None:
            self._parts = None
            return None
        ranks = [numbers(part, padded=True) for part in parts]
        valid = [part["__valid__"].tolist() for part in parts]
        if self._interleaved:
            ranks, valid = (list(map(list, zip(*each, strict=True))) for each in (ranks, valid))
        told = list(chain.from_iterable(valid))
        assert told == sorted(told, reverse=True)  # padding comes last
        return list(chain.from_iterable(ranks))[: sum(told)]

    def epoch(self) -> list[int]:
        return list(chain.from_iterable(iter(self.step, None)))


def epoch_of(root: Path, epoch: int, **options: Any) -> list[int]:
    """An epoch's samples in the order of their positions, each alone."""
    data = ShardDataset(root, batch_size=1, **options)
    data.set_epoch(epoch)
    return list(chain.from_iterable(map(numbers, data)))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("shards", "streams"),
    [
        ([1], None),  # one sample
        ([5], 960),  # fewer than streams
        ([3, 1, 1], 2),  # fewer than a global batch
        ([10, 1, 7], None),
        ([23], 5),
    ],
)
def test_every_division_is_of_one_order(
    tmp_path: Path, shards: list[int], streams: int | None, shuffle: bool
) -> None:
    parts = {f"p{place}": [numbered(count, place)] for place, count in enumerate(shards)}
    root = build(tmp_path / "v", parts)
    options: dict[str, Any] = {"streams": streams, "shuffle": shuffle, "chunk_size": 3}
    order = epoch_of(root, 0, **options)
    assert sorted(order) == sorted(
        1000 * place + n for place, count in enumerate(shards) for n in range(count)
    )
    for world, size in ((1, 1), (1, 7), (2, 6), (3, 3), (8, 8), (8, 64)):
        assert Ranks(root, world, size, **options).epoch() == order


def test_one_shard_and_eight_slots(tmp_path: Path) -> None:
    root = build(tmp_path / "v", {"a": [numbered(19)]})
    for world, workers in ((4, 2), (1, 8), (8, 1)):
        ranks = Ranks(root, world, 8, workers, **ORDER)
        assert ranks.epoch() == epoch_of(root, 0, **ORDER)


WAYS = ((2, 6, 0), (1, 1, 0), (3, 3, 1), (1, 5, 2), (4, 4, 0), (1, 2, 1), (2, 2, 2))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_that_is_resumed_at_every_step_by_another(small: Path, shuffle: bool) -> None:
    """Three epochs, each step of which another world, batch size and worker count makes."""
    options: dict[str, Any] = {**ORDER, "shuffle": shuffle}
    order = [epoch_of(small, epoch, **options) for epoch in range(4)]
    assert not shuffle or len(set(map(tuple, order))) == 4
    state = ShardDataset(small, batch_size=1, **options).next_state()
    seen: list[int] = []
    for world, size, workers in cycle(WAYS):
        ranks = Ranks(small, world, size, workers, **options)
        ranks.load(state)
        if state["position"] == 18:  # then the next epoch follows
            state = {**state, "epoch": state["epoch"] + 1, "position": 0}
        assert ranks.state() == state
        epoch, position = len(seen) // 18, len(seen) % 18
        got = ranks.step()
        assert got == order[epoch][position : position + size]
        seen += got or []
        state = ranks.state()
        assert (state["epoch"], state["position"]) == (epoch, position + len(got or []))
        if len(seen) == 3 * 18:
            break
    ranks = Ranks(small, 2, 4, **options)
    ranks.load(state)  # of a finished epoch
    assert ranks.epoch() == order[3]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_exact_rest_from_every_step_and_then_a_whole_epoch(small: Path, shuffle: bool) -> None:
    options: dict[str, Any] = {**ORDER, "shuffle": shuffle}
    order = [epoch_of(small, epoch, **options) for epoch in range(3)]
    first = Ranks(small, 2, 4, **options)
    states = [first.state()]
    while first.step() is not None:
        states.append(first.state())
    for state in states[:-1]:
        for world, size in ((1, 4), (3, 6), (2, 16)):
            ranks = Ranks(small, world, size, **options)
            ranks.load(state)
            lengths = {len(loader) for loader in ranks.loaders}
            assert lengths == {-(-(18 - state["position"]) // size)}
            assert ranks.epoch() == order[0][state["position"] :]
            assert [ranks.epoch(), ranks.epoch()] == order[1:]


@pytest.mark.parametrize("seek_threshold", [0, 1 << 17])
def test_the_first_batch_costs_the_same_wherever_a_run_resumes(
    tmp_path: Path, seek_threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed, announced and read before it; the time follows from that."""
    root = build(tmp_path / "v", {f"p{n}": [numbered(100, n)] for n in range(6)})
    data = ShardDataset(root, batch_size=4, streams=6, seek_threshold=seek_threshold)
    monkeypatch.setattr(fsmount_loader.passes, "_PLANNED_AT_ONCE", 16)
    computed: list[int] = []
    read: list[int] = []
    rows, pread = ShuffledOrder.rows, ShardFiles.read

    def spy_on_rows(order: ShuffledOrder, positions: Int64s) -> Int64s:
        computed.append(len(positions))
        return rows(order, positions)

    def spy_on_read(files: ShardFiles, shard: int, start: int, buffer: memoryview) -> int:
        read.append(len(buffer))
        return pread(files, shard, start, buffer)

    def refuse(*_: object) -> None:
        raise AssertionError("a manifest was read")

    monkeypatch.setattr(ShuffledOrder, "rows", spy_on_rows)
    monkeypatch.setattr(ShardFiles, "read", spy_on_read)
    monkeypatch.setattr(VersionFiles, "manifest", refuse)
    for position in (0, 4, 300, 540, 584):
        data.load_state_dict({**data.next_state(), "epoch": 3, "position": position})
        computed.clear()
        read.clear()
        next(iter(data))
        assert computed == [16]
        assert len(read) <= 4
        assert sum(read) <= (4 * 4096 if seek_threshold == 0 else 4 * 100 * 2048)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_is_of_what_was_handed_out(small: Path, workers: int) -> None:
    """Workers and prefetching run far ahead; states are those of a loader that does neither."""
    plain = ShardLoader(ShardDataset(small, batch_size=2, prefetch=0, **ORDER))
    ahead = ShardLoader(ShardDataset(small, batch_size=2, prefetch=9, **ORDER), workers)
    for _ in range(2):
        for one, other in zip(plain, ahead, strict=True):
            assert numbers(one) == numbers(other)
            assert plain.state_dict() == ahead.state_dict()
