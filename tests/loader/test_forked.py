"""Forks of the trainer: each process has the right samples, and neither the other's."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_versions import build, numbered
from test_dataset import all_numbers, numbers
from torch.utils.data import DataLoader

from fsmount.errors import LoadError
from fsmount_loader import Batch, Generators, ShardDataset, ShardLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 samples in as many shards."""
    parts = {f"p{n:03d}": [numbered(1, n)] for n in range(120)}
    return build(tmp_path_factory.mktemp("many") / "v", parts)


def begin_child(check: Callable[[], bool]) -> int:
    """Fork; the child ends with 0 if `check` is true."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(100)  # cuts a hang
        code = 2
        try:
            code = 0 if check() else 1
        finally:
            os._exit(code)
    return pid


def in_child(check: Callable[[], bool]) -> bool:
    """Whether `check` is true in a fork of this process."""
    return os.waitpid(begin_child(check), 0)[1] == 0


def loader_of(kind: str, data: ShardDataset) -> Any:
    if kind == "DataLoader":
        return DataLoader(data, batch_size=None, num_workers=1, prefetch_factor=1)
    return ShardLoader(data, int(kind))


def test_a_dataset_is_made_in_a_fork(small: Path) -> None:
    """Of a process that has planned, read, and computed with torch's threads."""
    wanted = all_numbers(ShardDataset(small, batch_size=3, where="n >= 0"))
    torch.ones(1 << 20).add_(1)

    def check() -> bool:
        data = ShardDataset(small, batch_size=3, where="n >= 0")
        return (
            all_numbers(ShardLoader(data, 1))
            == wanted
            == all_numbers(ShardDataset(small, batch_size=3))
        )

    assert in_child(check)


@pytest.mark.parametrize("kind", ["0", "1", "DataLoader"])
def test_a_fork_and_its_trainer_keep_what_they_hold(many: Path, kind: str) -> None:
    """Whoever of the two drops a batch first, the other one's is not filled again."""
    batches = iter(loader_of(kind, ShardDataset(many, batch_size=2)))
    held = [next(batches), next(batches)]
    wanted = [batch["x"].clone() for batch in held]
    told, tell = os.pipe()

    def check() -> bool:
        del held[0]
        gc.collect()
        os.read(told, 1)
        return torch.equal(held[0]["x"], wanted[1])

    child = begin_child(check)
    del held[1]
    for _ in range(20):
        next(batches)
    os.write(tell, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(held[0]["x"], wanted[0])
    os.close(told)
    os.close(tell)


@pytest.mark.parametrize("kind", ["1", "DataLoader"])
def test_forks_cost_no_blocks(many: Path, kind: str) -> None:
    """What is given up because of a fork is unmapped, here and in the worker."""
    batches = iter(loader_of(kind, ShardDataset(many, batch_size=2, transform=with_blocks)))
    blocks = []
    for _ in range(60):
        batch = next(batches)
        blocks.append((mapped_blocks(), batch["blocks"][0]))
        assert in_child(lambda: True)
    assert max(here for here, _ in blocks) <= 8
    assert max(there for _, there in blocks) <= 8


def mapped_blocks() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:fsmount")


def with_blocks(batch: Batch, generators: Generators) -> Batch:
    batch["blocks"] = [mapped_blocks()]
    return batch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fork_can_t_take_the_trainer_s_batches(small: Path, workers: int) -> None:
    whole = all_numbers(ShardDataset(small, batch_size=3))
    batches = iter(ShardLoader(ShardDataset(small, batch_size=3), workers))
    seen = numbers(next(batches))

    def check() -> bool:
        if not workers:  # it has files of its own
            return seen + all_numbers(batches) == whole
        with pytest.raises(LoadError, match="a fork of the trainer can't go on"):
            next(batches)
        return True

    assert in_child(check)
    assert seen + all_numbers(batches) == whole
