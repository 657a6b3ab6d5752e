"""Loaders used as nobody should: a clear error, or the right samples, and never a hang."""

from __future__ import annotations

import errno
import os
import queue
import resource
import threading
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from small_versions import build, numbered
from test_dataset import ALL, all_numbers, numbers
from test_forked import in_child
from test_shard_reads import Spy, planned, read_all

from fsmount.errors import LoadError, PlanError, StateMismatchError
from fsmount_loader import Batch, Generators, ShardDataset, ShardLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 samples in as many shards."""
    parts = {f"p{n:03d}": [numbered(1, n)] for n in range(240)}
    return build(tmp_path_factory.mktemp("many") / "v", parts)


# States


@pytest.mark.parametrize(
    "state", [None, [], "x", 5, b"x", [("order", 1)], {}, {"order": 1}, {1: 2}]
)
def test_what_is_no_state_at_all(small: Path, state: Any) -> None:
    with pytest.raises(StateMismatchError, match="not a state: it has no 'selection'"):
        ShardDataset(small, batch_size=3).load_state_dict(state)


def test_states_with_anything_in_them(small: Path) -> None:
    """Values that mean the same are taken, others refused, whatever their type."""
    data = ShardDataset(small, batch_size=3)
    good = data.next_state()
    values: list[Any] = [
        None, -1, 19, 1 << 63, 10**30, 1.5, float("nan"), float("inf"), "0", "1", [0], {}, b"0",
        np.array([0, 1]), np.array([]), torch.tensor([0, 1]), torch.tensor(0.5), object(),
    ]  # fmt: skip
    decides = {name: value for name, value in good.items() if name != "version"}
    for name, value in decides.items():
        for other in values:
            if (other is None and value is None) or (other is values[2] and name == "epoch"):
                continue
            with pytest.raises(StateMismatchError, match=name):
                data.load_state_dict({**good, name: other})
    assert data.next_state() == good
    others = ({**good, "more": object()}, {**good, "version": object()}, decides)
    for same in (MappingProxyType(good), UserDict(good), *others):
        data.load_state_dict(same)
    data.load_state_dict({n: torch.tensor(v) if type(v) is int else v for n, v in good.items()})
    assert sorted(all_numbers(data)) == ALL


# Paths


def test_paths_that_are_odd(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = small.parent / "ä b'\\\udcff\n"
    small.rename(odd)
    monkeypatch.chdir(odd.parent)
    wanted = all_numbers(ShardDataset(odd, batch_size=3))
    for path in (odd.name, f"./{odd.name}/", f"{odd}//", f"{odd}/../{odd.name}", os.fsencode(odd)):
        data = ShardDataset(path, batch_size=3)
        monkeypatch.chdir("/")
        assert all_numbers(ShardLoader(data, 1)) == wanted
        monkeypatch.chdir(odd.parent)
    (odd / "shards" / "d" / "000000.tar").unlink()
    with pytest.raises(LoadError, match=r"d/000000\.tar: sample 'd/000.'"):
        list(ShardDataset(odd, batch_size=3, retries=0))


# Parameters


def test_parameters_that_are_nested_without_end(small: Path) -> None:
    """DuckDB would overflow its stack, and take the process with it."""
    endless: list[Any] = []
    endless += [endless, {"more": endless}]
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for value in (endless, deep, {"more": endless}):
        for params in ([value], {"a": value}):
            where = "n = ?" if isinstance(params, list) else "n = $a"
            with pytest.raises(PlanError, match="params are nested more than 64 deep"):
                ShardDataset(small, batch_size=3, where=where, params=params)


def test_parameters_of_any_type(small: Path) -> None:
    values: list[Any] = [
        object(), np.array([1]), torch.tensor(3), {1, 2}, {"a": 1}, 10**40, b"x", 1j, [1, "a"],
        "\ud800", "\0", memoryview(b"x"), range(3), {"\ud800": 1}, {}, type, Path(),
    ]  # fmt: skip
    for value in values:
        with pytest.raises(PlanError) as caught:
            ShardDataset(small, batch_size=3, where="n = ? AND n < 0", params=[value])
        assert "\n" not in str(caught.value)


# Limits


def test_a_batch_that_no_machine_holds(small: Path) -> None:
    options: list[dict[str, Any]] = [
        {"batch_size": (1 << 31) - 1},
        {"global_batch_size": (1 << 31) - 2, "rank": 1, "world_size": 2},
    ]
    for each in options:
        with pytest.raises(PlanError, match=r"a batch of \d+ samples takes .* GiB, and this mach"):
            ShardDataset(small, evaluate=True, **each)


def few_files(spare: int) -> None:
    """Let this process, which is a child, open only so many files more, whatever it has open."""
    limit, used = 0, set(map(int, os.listdir("/proc/self/fd")))
    while spare:
        spare -= limit not in used
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_many_shards_with_few_open_files(many: Path, workers: int) -> None:
    def check() -> bool:
        few_files(50)
        data = ShardDataset(many, batch_size=8)
        return sorted(all_numbers(ShardLoader(data, workers))) == list(range(0, 240_000, 1000))

    assert in_child(check)


def test_keeping_more_batches_than_files_can_be_open(many: Path) -> None:
    def check() -> bool:
        few_files(85)
        kept = list(ShardLoader(ShardDataset(many, batch_size=1), 2))
        return sorted(all_numbers(kept)) == list(range(0, 240_000, 1000))

    assert in_child(check)


def test_workers_that_can_t_be_started(many: Path) -> None:
    def check() -> bool:
        data = ShardDataset(many, batch_size=8)
        few_files(10)
        with pytest.raises(LoadError, match="Too many open files"):
            list(ShardLoader(data, 16))
        return True

    assert in_child(check)


# One dataset, several users


def test_two_loaders_of_one_dataset_take_an_epoch_each(small: Path) -> None:
    data = ShardDataset(small, batch_size=3)
    epochs = [all_numbers(data), all_numbers(data)]
    data.set_epoch(0)
    one, other = ShardLoader(data, 2), ShardLoader(data, 1)
    both = list(zip(one, other, strict=True))
    assert [all_numbers(part) for part in zip(*both, strict=True)] == epochs
    assert [loader.state_dict()["epoch"] for loader in (one, other)] == [0, 1]
    assert [loader.state_dict()["position"] for loader in (one, other)] == [18, 18]


@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_while_iterating(small: Path, workers: int) -> None:
    data = ShardDataset(small, batch_size=3)
    epochs = [all_numbers(data), all_numbers(data)]
    data.set_epoch(0)
    loader = ShardLoader(data, workers)
    outer = iter(loader)
    seen = numbers(next(outer))
    assert all_numbers(loader) == epochs[1]
    assert loader.state_dict()["epoch"] == 1
    assert seen + all_numbers(outer) == epochs[0]


def test_threads_that_iterate_and_threads_that_drop(many: Path) -> None:
    """Each thread iterates a loader of its own; others use the batches, and are the last to."""
    data = ShardDataset(many, batch_size=2)
    waiting: queue.Queue[Batch | None] = queue.Queue()
    seen: list[list[int]] = [[], [], []]
    wrong: list[Batch] = []

    def iterate(place: int, batches: Iterator[Batch]) -> None:
        for batch in batches:
            seen[place] += numbers(batch)
            waiting.put(batch)

    def drop() -> None:
        while (batch := waiting.get()) is not None:
            if not torch.equal(batch["x"], batch["x"][:, :1] + torch.arange(3)):
                wrong.append(batch)
            del batch

    droppers = [threading.Thread(target=drop) for _ in range(3)]
    iterators = [
        threading.Thread(target=iterate, args=(workers, iter(ShardLoader(data, workers))))
        for workers in range(3)
    ]
    for thread in (*droppers, *iterators):
        thread.start()
    for thread in iterators:
        thread.join()
    for _ in droppers:
        waiting.put(None)
    for thread in droppers:
        thread.join()
    assert [sorted(each) for each in seen] == [list(range(0, 240_000, 1000))] * 3
    assert len(set(map(tuple, seen))) == 3
    assert not wrong


# What transforms do


def exits(batch: Batch, generators: Generators) -> Batch:
    raise SystemExit(3)


def forks(batch: Batch, generators: Generators) -> Batch:
    assert in_child(lambda: True)
    return batch


def stops(batch: Batch, generators: Generators) -> Batch:
    raise StopIteration


def empties(batch: Batch, generators: Generators) -> Batch:
    batch.clear()
    return batch


def test_transforms_that_do_odd_things(small: Path) -> None:
    def run(transform: Any, workers: int) -> list[Batch]:
        data = ShardDataset(small, batch_size=3, transform=transform)
        return list(ShardLoader(data, workers, start_method="fork"))

    with pytest.raises(LoadError, match=r"worker \d \(process \d+\) exited with code 3"):
        run(exits, 2)
    for workers in (0, 2):
        assert sorted(all_numbers(run(forks, workers))) == ALL
        with pytest.raises(RuntimeError, match="StopIteration"):  # not an early end of the epoch
            run(stops, workers)
        assert [list(batch) for batch in run(empties, workers)] == [["__valid__"]] * 6


# A version that goes away


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mount_that_disappears(many: Path, tmp_path: Path, workers: int) -> None:
    root = tmp_path / "v"
    root.symlink_to(many)

    def train(**options: Any) -> tuple[list[int], int]:
        data = ShardDataset(root, batch_size=4, retries=0, **options)
        seen: list[int] = []
        for batch in ShardLoader(data, workers):
            seen += numbers(batch)
            if len(seen) == 12:
                root.rename(tmp_path / "gone")
        return seen, data.skipped

    with pytest.raises(LoadError, match=r"p\d\d\d/000000\.tar: sample .*: No such file"):
        train()
    (tmp_path / "gone").rename(root)
    seen, skipped = train(on_error="skip", max_skipped=240)
    assert len(seen) == len(set(seen)) == 240 - skipped
    assert 0 < skipped <= 228
    (tmp_path / "gone").rename(root)
    with pytest.raises(LoadError, match="more than max_skipped=100 samples"):
        train(on_error="skip")


def test_shards_that_can_t_be_read_are_retried_once_each(tmp_path: Path) -> None:
    """Not once for each of their samples, which would take minutes; and again once they can."""
    root = build(tmp_path / "v", {f"p{n}": [numbered(6, n)] for n in range(6)})
    plan = planned(root)
    lost = {1, 2, 4, 5}

    class Lossy(Spy):
        def read(self, shard: int, start: int, buffer: memoryview) -> int:
            if shard in lost:
                raise OSError(errno.EIO, "lost")
            return super().read(shard, start, buffer)

    found, waits = read_all(plan, Lossy(plan))
    assert sum(isinstance(payload, LoadError) for payload in found.values()) == 24
    assert waits == [0.1, 0.2, 0.4] * 4

    class Back(Spy):
        trials = 0

        def read(self, shard: int, start: int, buffer: memoryview) -> int:
            if shard == 1:
                self.trials += 1
                if self.trials <= 6 or 9 < self.trials <= 11:
                    raise OSError(errno.EIO, "lost for a while")
            return super().read(shard, start, buffer)

    found, waits = read_all(plan, Back(plan))
    lost_rows = [row for row, payload in found.items() if isinstance(payload, LoadError)]
    assert lost_rows == [6]  # read 5 times; the next row twice, and later rows are retried again
    assert waits == [0.1, 0.2, 0.4, 0.1]


@pytest.mark.parametrize("workers", [0, 2])
def test_four_unreadable_shards_are_skipped_and_counted(tmp_path: Path, workers: int) -> None:
    root = build(tmp_path / "v", {f"p{n}": [numbered(6, n)] for n in range(6)})
    for n in (1, 2, 4, 5):
        (root / "shards" / f"p{n}" / "000000.tar").unlink()
    data = ShardDataset(root, batch_size=4, retries=1, on_error="skip")
    batches = list(ShardLoader(data, workers))
    assert len(batches) == 9
    assert sorted(all_numbers(batches)) == [*range(6), *range(3000, 3006)]
    assert data.skipped == 24
