"""The same dataset under DataLoader's workers: equal batches, in blocks that come again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_dataset import numbers
from torch.utils.data import DataLoader

from fsmount_loader import Batch, Generators, ShardDataset


def loader(root: Path, **options: Any) -> DataLoader[Batch]:
    """Two workers, one batch ahead each."""
    data = ShardDataset(root, batch_size=2, max_pad_fraction=1, keys=True, columns=["n"], **options)
    return DataLoader(data, batch_size=None, num_workers=2, prefetch_factor=1)


def assert_same(one: Batch, other: Batch) -> None:
    assert type(one) is type(other) is Batch
    assert list(one) == list(other)
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.parametrize("persistent", [False, True])
def test_kept_batches_hold_their_values(larger: Path, start_method: str, persistent: bool) -> None:
    data = ShardDataset(larger, batch_size=2, max_pad_fraction=1, keys=True, columns=["n"])
    workers = DataLoader(
        data,
        batch_size=None,
        num_workers=1,
        multiprocessing_context=start_method,
        persistent_workers=persistent,
    )
    kept = [list(workers), list(workers)]  # 52 batches each, more than a worker has blocks
    data.set_epoch(0)
    for batches in kept:
        for one, other in zip(data, batches, strict=True):
            assert_same(one, other)


def test_a_batch_is_one_block_of_no_file_system(larger: Path) -> None:
    for batch in loader(larger):
        tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:fsmount-loader" in maps


def pid(batch: Batch, generators: Generators) -> Batch:
    batch["files"] = [len(os.listdir("/proc/self/fd"))]
    return batch


def test_workers_use_their_blocks_again(larger: Path) -> None:
    data = ShardDataset(larger, batch_size=1, transform=pid)
    workers = DataLoader(
        data, batch_size=None, num_workers=1, prefetch_factor=1, persistent_workers=True
    )
    files = [batch["files"][0] for _ in range(3) for batch in workers]
    assert max(files[103:]) <= max(files[:103]) + 2
    assert max(files) - min(files) < 16


def test_a_batch_that_was_changed_on_its_way(small: Path) -> None:
    def add(batch: Batch) -> Batch:
        batch["more"] = batch["x"] + 1
        return batch

    data = ShardDataset(small, batch_size=6)
    workers = DataLoader(data, batch_size=None, num_workers=1, collate_fn=add)
    seen = 0
    for batch in workers:
        assert torch.equal(batch["more"], batch["x"] + 1)
        seen += len(numbers(batch))
    assert seen == 18
