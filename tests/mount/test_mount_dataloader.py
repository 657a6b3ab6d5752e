"""torch's DataLoader over a mount: the same content, however many workers there are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from plain_datasets import Item, SampleFiles, ShardMembers, content
from torch.utils.data import DataLoader, Dataset

from fsmount.mount import lifecycle
from fsmount.mount.ending import umount
from fsmount.mount.request import FUSEPY, KERNEL, MountRequest
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount_loader import ShardDataset

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

PARTITION, SAMPLES = "drive/a b", 60
NUMBERED = [tiny.numbered(f"{PARTITION}/{n:03d}", n) for n in range(SAMPLES)]
EXPECTED = {one.key: one.arrays["values"].tobytes() for one in NUMBERED}
Workers = tuple[int, str | None]
WORKERS: list[Workers] = [(0, None), (2, "fork"), (8, "fork"), (2, "spawn")]
if os.environ.get("FSMOUNT_SOAK"):
    WORKERS.append((8, "spawn"))
workers = pytest.mark.parametrize("workers", WORKERS, ids=lambda it: f"{it[0]}-{it[1]}")


@pytest.fixture(scope="module")
def of_samples(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store.create(str(tmp_path_factory.mktemp("samples") / "store"))
    tiny.publish(store, "v1", {PARTITION: NUMBERED}, samples_a_shard=7)
    return store


@pytest.fixture(scope="module", params=[KERNEL, FUSEPY])
def root(
    of_samples: Store, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("loaded"))
    lifecycle.mount(MountRequest(of_samples.path, "v1", path, driver=request.param))
    yield path
    umount(path)


def load(dataset: Dataset[Any], workers: Workers) -> list[Any]:
    """One epoch of a DataLoader."""
    count, method = workers
    return list(
        DataLoader(dataset, batch_size=None, num_workers=count, multiprocessing_context=method)
    )


def items_of_batches(batches: list[Any]) -> list[Item]:
    """The samples of ShardDataset's batches, in order."""
    return [
        (key, content(values))
        for batch in batches
        for key, values, valid in zip(
            batch["__key__"], batch["values"], batch["__valid__"], strict=True
        )
        if valid
    ]


@workers
def test_shard_dataset(root: str, workers: Workers) -> None:
    dataset = ShardDataset(root, batch_size=8, keys=True, seed=3)
    dataset.set_epoch(1)
    expected = items_of_batches(list(dataset))
    dataset.set_epoch(1)
    found = items_of_batches(load(dataset, workers))
    assert found == expected
    assert dict(found) == EXPECTED
    assert len(found) == SAMPLES


@workers
def test_one_file_a_sample(root: str, workers: Workers) -> None:
    found = load(SampleFiles(root, PARTITION), workers)
    assert list(map(tuple, found)) == sorted(EXPECTED.items())


@workers
def test_members_of_shards_that_are_open(root: str, workers: Workers) -> None:
    dataset = ShardMembers(root, PARTITION)
    with closing(dataset):
        found = load(dataset, workers)
    assert len(found) == SAMPLES
    assert dict(found) == EXPECTED
