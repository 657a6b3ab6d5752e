"""ShardLoader and its workers: what arrives, what is kept, and what happens when a worker dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from small_versions import build, numbered
from test_dataset import all_numbers, numbers

from fsmount.errors import LoadError, PlanError
from fsmount_loader import Batch, ShardDataset, ShardLoader
from fsmount_loader.epochs import Epochs

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.parametrize("workers", [-1, 1.5, True, "2"])
def test_workers_are_a_count(small: Path, workers: Any) -> None:
    with pytest.raises(PlanError, match="workers must be a whole number of at least 0"):
        ShardLoader(ShardDataset(small, batch_size=3), workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_kept_after_the_loop_hold_their_values(larger: Path, workers: int) -> None:
    data = ShardDataset(larger, batch_size=5, keys=True, max_pad_fraction=1)
    kept = [(batch["x"], batch["__key__"]) for batch in ShardLoader(data, workers)]
    for tensor, keys in kept:
        assert tensor[:, 0].tolist() == [1000 * int(k[1]) + int(k[-4:]) for k in keys]
        assert torch.equal(tensor, tensor[:, :1] + torch.arange(3))


def test_one_shard_and_eight_workers(tmp_path: Path) -> None:
    data = ShardDataset(build(tmp_path / "v", {"a": [numbered(5)]}), batch_size=2, evaluate=True)
    assert all_numbers(ShardLoader(data, 8)) == [0, 1, 2, 3, 4]
    single = ShardDataset(build(tmp_path / "w", {"a": [numbered(1)]}), batch_size=1)
    assert [all_numbers(ShardLoader(single, workers)) for workers in (0, 3)] == [[0], [0]]


class Killer:
    """A transform that kills its process at a sample."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, batch: Batch, generators: Any) -> Batch:
        if self._number in numbers(batch):
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def test_a_worker_that_dies_is_an_error(small: Path) -> None:
    data = ShardDataset(small, batch_size=3, transform=Killer(2003))
    with pytest.raises(
        LoadError, match=r"worker \d \(process \d+\) was killed by SIGKILL"
    ) as caught:
        list(ShardLoader(data, 2))
    assert "\n" not in str(caught.value)


def broken(batch: Batch, generators: Any) -> Batch:
    raise RuntimeError("a bug of the user's")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_s_error_is_its_own(small: Path, workers: int) -> None:
    data = ShardDataset(small, batch_size=3, transform=broken)
    with pytest.raises(RuntimeError, match="a bug of the user's"):
        list(ShardLoader(data, workers))


def test_two_processes_see_the_same(larger: Path) -> None:
    program = (
        "import sys; from fsmount_loader import ShardDataset\n"
        "data = ShardDataset(sys.argv[1], batch_size=9, seed=5, keys=True)\n"
        "print([batch['__key__'] for _ in range(2) for batch in data])"
    )
    command = [sys.executable, "-c", program, str(larger)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout != ""


def test_memory_is_flat_over_epochs(tmp_path: Path) -> None:
    """Blocks of 2 MB: keeping one batch an epoch would cost 120 MB in sixty of them."""
    samples = numbered(8)
    for one in samples:
        one.arrays["x"].resize(1 << 16, refcheck=False)  # type: ignore[attr-defined]
    data = ShardDataset(
        build(tmp_path / "v", {"a": [samples]}), batch_size=8, keys=True, columns=["n"]
    )

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def epochs(count: int) -> None:
        for _ in range(count):
            for batch in ShardLoader(data):
                assert batch["x"].shape == (8, 1 << 16)

    epochs(10)
    before = resident()
    files = len(os.listdir("/proc/self/fd"))
    epochs(60)
    assert resident() - before < 30 << 20
    assert len(os.listdir("/proc/self/fd")) <= files  # fewer: earlier tests' are collected


def test_counting_passes_is_safe_while_others_count() -> None:
    epochs, seen = Epochs(), {0: [], 1: []}  # type: ignore[var-annotated]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def begin(worker: int) -> None:
        seen[worker] = [epochs.begin(worker, 2)[0] for _ in range(500)]

    threads = [threading.Thread(target=begin, args=(worker,)) for worker in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert seen[0] == seen[1] == list(range(500))
