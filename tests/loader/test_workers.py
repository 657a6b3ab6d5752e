"""The worker processes: what they raise, what they are told, and that they never stay behind."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import worker_transforms
from test_dataset import all_numbers, numbers

from fsmount.errors import LoadError, PlanError
from fsmount_loader import Batch, ShardDataset, ShardLoader


def wait_for(folder: Path, count: int) -> list[int]:
    """Process ids that workers wrote into `folder`."""
    while len(found := [int(name) for name in os.listdir(folder)]) < count:
        threading.Event().wait(0.01)
    return found


def wait_gone(pid: int) -> None:
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([file], [], [], 60)[0], f"process {pid} stays"
    os.close(file)


@pytest.mark.parametrize(
    ("transform", "kind", "message"),
    [
        (worker_transforms.raises_value_error, ValueError, "no value"),
        (worker_transforms.raises_connection_error, ConnectionResetError, "label server is gone"),
        (worker_transforms.raises_refused, RuntimeError, "Refused: this and that"),
    ],
)
def test_an_error_has_its_class_its_message_and_where_it_was(
    small: Path, transform: Any, kind: type[Exception], message: str
) -> None:
    data = ShardDataset(small, batch_size=3, transform=transform)
    with pytest.raises(kind, match=message) as caught:
        list(ShardLoader(data, 2))
    assert not multiprocessing.active_children()
    sample, *worker = caught.value.__notes__
    assert sample.startswith("in the transform of the batch from sample 'a/")
    if kind is not RuntimeError:
        assert transform.__name__ in worker[0]


def test_a_batch_that_can_t_be_sent_is_an_error(small: Path) -> None:
    data = ShardDataset(small, batch_size=3, transform=worker_transforms.not_picklable)
    with pytest.raises(Exception, match=r"pickle.*lambda"):
        list(ShardLoader(data, 1))


def test_an_error_comes_in_its_batch_s_place(small: Path) -> None:
    (small / "shards" / "d" / "000000.tar").unlink()
    data = ShardDataset(small, batch_size=2, shuffle=False, retries=0)
    for workers in (1, 2, 3):
        iterator = iter(ShardLoader(data, workers))
        assert [numbers(next(iterator)) for _ in range(5)] == [[n, n + 1] for n in range(0, 10, 2)]
        with pytest.raises(LoadError, match=r"d/000000\.tar"):
            next(iterator)


def test_a_stuck_worker_that_is_killed_is_an_error(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    data = ShardDataset(small, batch_size=3, transform=worker_transforms.Stuck(folder))

    def kill_one() -> None:
        os.kill(wait_for(folder, 2)[1], signal.SIGKILL)

    thread = threading.Thread(target=kill_one)
    thread.start()
    with pytest.raises(LoadError, match=r"worker \d \(process \d+\) was killed by SIGKILL"):
        list(ShardLoader(data, 2))
    thread.join()
    for pid in wait_for(folder, 2):
        wait_gone(pid)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_no_worker_survives_a_trainer_that_is_killed(
    small: Path, tmp_path: Path, start_method: str
) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    program = (
        "import sys, pathlib, worker_transforms\n"
        "from fsmount_loader import ShardDataset, ShardLoader\n"
        "if __name__ == '__main__':\n"
        "    stuck = worker_transforms.Stuck(pathlib.Path(sys.argv[2]))\n"
        "    data = ShardDataset(sys.argv[1], batch_size=3, transform=stuck)\n"
        "    list(ShardLoader(data, 2, start_method=sys.argv[3]))\n"
    )
    script = tmp_path / "train.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, str(script), str(small), str(folder), start_method]
    with subprocess.Popen(command, env=environment) as trainer:
        pids = wait_for(folder, 2)
        trainer.kill()
    for pid in pids:
        wait_gone(pid)
    memory = os.listdir("/dev/shm")  # noqa: S108 - where torch has its shared memory
    assert not [name for name in memory if f"_{trainer.pid}_" in name]


def test_an_iteration_that_is_broken_off_ends_its_workers(small: Path) -> None:
    gc.collect()
    files = []
    for _ in range(4):
        for _ in ShardLoader(ShardDataset(small, batch_size=2), 2):
            assert len(multiprocessing.active_children()) == 2
            break
        assert not multiprocessing.active_children()
        files.append(len(os.listdir("/proc/self/fd")))
    assert files[0] == files[-1]


def test_a_fork_of_the_trainer_leaves_the_workers_alone(small: Path) -> None:
    iterator = iter(ShardLoader(ShardDataset(small, batch_size=2), 2))
    seen = numbers(next(iterator))
    pid = os.fork()
    if pid == 0:
        iterator.close()  # type: ignore[attr-defined]
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert sorted(seen + all_numbers(iterator)) == sorted(
        all_numbers(ShardDataset(small, batch_size=2))
    )


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("contiguous", [False, True])
def test_kept_batches_of_a_transform_hold_their_values(
    larger: Path, start_method: str, contiguous: bool
) -> None:
    options: dict[str, Any] = {
        "batch_size": 5,
        "max_pad_fraction": 1,
        "keys": True,
        "columns": ["n"],
        "contiguous": contiguous,
    }
    plain = list(ShardLoader(ShardDataset(larger, **options)))
    data = ShardDataset(larger, transform=worker_transforms.Stasher(), **options)
    kept = list(ShardLoader(data, 1, start_method=start_method))
    assert len(kept) == len(plain)
    for one, other in zip(plain, kept, strict=True):
        assert torch.equal(one["x"], other["x"])
        assert torch.equal(2 * one["x"], other["double"])
        assert torch.equal(one["n"], other["n"])
        assert one["__key__"] == other["__key__"]
    for before, batch in pairwise(kept):
        assert torch.equal(batch["last"], before["x"])


def test_a_batch_is_one_block(small: Path) -> None:
    for workers in (0, 2):
        data = ShardDataset(small, batch_size=6, columns=["n", "__size__"])
        for batch in ShardLoader(data, workers):
            storages = {tensor.untyped_storage().data_ptr() for tensor in batch.values()}
            assert len(storages) == 1
            assert set(batch) == {"x", "label", "__valid__", "n", "__size__"}


def test_keeping_batches_is_warned_of_once(larger: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = ShardLoader(ShardDataset(larger, batch_size=2, max_pad_fraction=1), 2)
    with caplog.at_level(logging.WARNING, "fsmount_loader"):
        assert len(all_numbers(loader)) == 103
        assert not caplog.records
        kept = list(loader)
        assert sorted(all_numbers(kept)) == sorted(all_numbers(list(loader)))
    assert ["batches are kept" in record.message for record in caplog.records] == [True]


class Ahead:
    """Fails if a batch is built before it may be."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.consumed = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __call__(self, batch: Batch, generators: Any) -> Batch:
        number = int(batch["x"][0, 0]) // 2
        if number >= int(self.consumed) + self._most:
            raise AssertionError(f"batch {number} at {int(self.consumed)}")
        return batch


@pytest.mark.parametrize(
    ("prefetch", "most_bytes", "ahead"), [(1, 1 << 30, 2), (3, 1 << 30, 6), (3, 1, 1)]
)
def test_batches_ahead_are_bounded_in_number_and_in_bytes(
    small: Path, prefetch: int, most_bytes: int, ahead: int
) -> None:
    transform = Ahead(ahead + 1)  # one more is wanted when a batch is handed out
    data = ShardDataset(
        small, batch_size=2, shuffle=False, prefetch=prefetch, transform=transform, where="n < 10"
    )
    for _ in ShardLoader(data, 2, prefetch_bytes=most_bytes):
        transform.consumed += 1
        threading.Event().wait(0.02)  # lets a worker that is not bound run ahead


@pytest.mark.parametrize(
    "options", [{"start_method": "thread"}, {"prefetch_bytes": 0}, {"workers": 129}]
)
def test_options_that_can_t_be(small: Path, options: Any) -> None:
    with pytest.raises(PlanError, match=next(iter(options)).replace("workers", "129 workers")):
        ShardLoader(ShardDataset(small, batch_size=2), **options)


def test_duckdb_and_pyarrow_before_a_fork(small: Path) -> None:
    for _ in range(3):
        data = ShardDataset(small, batch_size=2, where="label3 < 2", columns=["label3"], keys=True)
        assert len(all_numbers(ShardLoader(data, 2, start_method="fork"))) == 13
