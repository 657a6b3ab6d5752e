"""Batches that move, transforms with generators of their own, metrics that leave padding out."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_dataset import numbers
from torch.utils import _pytree as pytree

from fsmount_loader import Batch, Generators, MaskedMean, ShardDataset, ShardLoader, per_sample

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def made() -> Batch:
    block = torch.arange(64, dtype=torch.uint8).reshape(2, 32)
    return Batch(
        a=block[:, 8:16].view(torch.int32),
        b=block[:, 16:].view(torch.float64),
        __valid__=torch.tensor([True, False]),
        empty=torch.empty(2, 0),
        __key__=["k", "l"],
        grad=torch.ones(2, requires_grad=True),
    )


def assert_equal(one: Batch, other: Batch) -> None:
    assert type(other) is Batch
    assert list(one) == list(other)
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert other[name].dtype == value.dtype
            assert torch.equal(other[name], value)
        else:
            assert other[name] == value


def test_a_batch_moves_its_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made()
    moved: list[int] = []
    to = torch.Tensor.to

    def count(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        moved.append(tensor.numel())
        return to(tensor, *args, **options).clone()

    monkeypatch.setattr(torch.Tensor, "to", count)
    there = batch.to("cpu", non_blocking=True)
    assert_equal(batch, there)
    assert sorted(moved) == [0, 2, 2, 64]  # empty, grad, __valid__, and the block
    assert there["a"].untyped_storage().data_ptr() == there["b"].untyped_storage().data_ptr()
    assert there["a"].untyped_storage().data_ptr() != batch["a"].untyped_storage().data_ptr()
    assert there["a"].stride() == batch["a"].stride()


def test_a_batch_on_the_meta_device_and_copies() -> None:
    batch = made()
    assert batch.to("meta")["b"].device.type == "meta"
    del batch["grad"]
    assert_equal(batch, copy.copy(batch))
    assert_equal(batch, batch.copy())
    assert_equal(batch, {} | batch | {})
    assert batch.copy()["a"] is batch["a"]
    deep = copy.deepcopy(batch)
    assert_equal(batch, deep)
    assert deep["a"].untyped_storage().data_ptr() == deep["b"].untyped_storage().data_ptr()
    assert deep["a"].untyped_storage().data_ptr() != batch["a"].untyped_storage().data_ptr()


def test_a_batch_that_is_saved_is_loaded_as_weights_are(small: Path, tmp_path: Path) -> None:
    (batch,) = ShardDataset(small, batch_size=18, keys=True, columns=["n"])
    file = tmp_path / "batch.pt"
    torch.save({"batch": batch}, file)
    loaded = torch.load(file, weights_only=True)["batch"]
    assert_equal(batch, Batch(loaded))
    assert Batch(loaded).to("meta")["x"].device.type == "meta"
    data = pickle.dumps(batch)
    assert_equal(batch, Batch(pickle.loads(data)))  # noqa: S301 - our own
    assert len(data) < 18 * 100 + 2000  # no block is in it


def test_a_batch_is_a_pytree(small: Path) -> None:
    (batch,) = ShardDataset(small, batch_size=18, keys=True)
    doubled = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.double(), batch)
    assert type(doubled) is Batch
    assert list(doubled) == list(batch)
    assert doubled["x"].dtype == torch.float64
    assert torch.equal(doubled["x"], batch["x"].double())
    assert doubled["__key__"] == batch["__key__"]
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    assert paths[0] == "['label']"
    only = Batch(x=batch["x"], label=batch["label"])
    sums = torch.vmap(lambda sample: sample["x"].sum() + sample["label"])(only)
    assert torch.equal(sums, batch["x"].sum(1) + batch["label"])
    spec = pytree.tree_structure(only)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def jitter(sample: Mapping[str, Any], generator: np.random.Generator) -> Mapping[str, Any]:
    return {**sample, "noise": torch.tensor(generator.random()), "name": f"n{sample['n']}"}


def test_augmentation_is_elastic(small: Path) -> None:
    def noise(**options: Any) -> dict[int, float]:
        workers = options.pop("workers", 0)
        found: dict[int, float] = {}
        for rank in range(options["world_size"]):
            data = ShardDataset(
                small, rank=rank, transform=per_sample(jitter), columns=["n"], **options
            )
            for batch in ShardLoader(data, workers):
                assert batch["name"] == [f"n{n}" for n in batch["n"].tolist()]
                found.update(zip(numbers(batch), batch["noise"].tolist(), strict=True))
        return found

    one = noise(batch_size=18, world_size=1)
    assert len(set(one.values())) == 18
    assert noise(batch_size=3, world_size=3) == one
    assert noise(batch_size=2, world_size=1, workers=2) == one
    assert noise(batch_size=18, world_size=1, seed=1) != one


def test_generators_are_made_afresh_and_differ() -> None:
    one = Generators(1, 2, np.arange(4))
    values = [generator.random() for generator in one]
    assert len(set(values)) == 4
    assert [generator.random() for generator in one[1:3]] == values[1:3]
    assert Generators(1, 3, np.arange(4))[0].random() != values[0]


def only_x(batch: Batch, generators: Generators) -> Mapping[str, Any]:
    assert len(generators) == len(batch["x"])
    return {"x": batch["x"] * 2}


def test_a_transform_of_batches_can_t_lose_what_is_valid(small: Path) -> None:
    data = ShardDataset(small, batch_size=20, evaluate=True, transform=only_x)
    (batch,) = data
    assert set(batch) == {"x", "__valid__"}
    assert batch["__valid__"].tolist() == [True] * 18 + [False] * 2
    assert batch["x"][1].tolist() == [2, 4, 6]


def test_a_mean_leaves_out_what_is_not_valid() -> None:
    mean = MaskedMean()
    assert math.isnan(mean.compute())
    mean.update(torch.tensor([1.0, 2.0, math.nan]), torch.tensor([True, True, False]))
    mean.update(torch.tensor([[6.0, 8.0], [0.0, 0.0]]), torch.tensor([True, False]))
    mean.update(torch.tensor([True, False]), torch.tensor([True, True]))
    assert mean.compute() == mean.local() == pytest.approx((1 + 2 + 7 + 1 + 0) / 5)
    with pytest.raises(ValueError, match="3 values for 2 samples"):
        mean.update(torch.zeros(3), torch.ones(2, dtype=torch.bool))


def test_evaluation_counts_each_sample_once_over_ranks(small: Path) -> None:
    sums = []
    for rank in range(4):
        data = ShardDataset(small, batch_size=3, evaluate=True, rank=rank, world_size=4)
        sums += [n for batch in data for n in numbers(batch)]
    assert sorted(sums) == sorted([*range(10), 1000, *range(2000, 2007)])
