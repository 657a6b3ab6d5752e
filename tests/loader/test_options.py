"""Values that options can and can't have; each error is one line that names the option."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from small_versions import add_keyset
from test_dataset import ALL, all_numbers
from torch.utils.data import DataLoader

from fsmount.errors import LoadError, PlanError
from fsmount_loader import Batch, MaskedMean, ShardDataset, ShardLoader, per_sample
from fsmount_loader.epochs import Epochs

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WHOLE = (
    "batch_size", "global_batch_size", "seed", "streams", "window", "chunk_size", "bucket_size",
    "bucket_window", "seek_threshold", "max_skipped", "retries", "prefetch", "rank", "world_size",
)  # fmt: skip
ORDER = (
    "batch_size", "streams", "window", "chunk_size", "bucket_size", "bucket_window", "world_size",
)  # fmt: skip
FLAGS = ("shuffle", "drop_last", "evaluate", "keys", "contiguous")
NUMBERS = ("max_pad_fraction", "agreement_timeout")
NONE = {  # a default
    "batch_size", "global_batch_size", "streams", "bucket_window", "shuffle", "rank", "world_size",
}  # fmt: skip


def refused(root: Path, name: str, value: Any) -> str:
    """The message about one option's value."""
    options: dict[str, Any] = {"global_batch_size": 2, "rank": 0, "world_size": 1}
    if name == "batch_size":
        del options["global_batch_size"]
    with pytest.raises(PlanError) as caught:
        ShardDataset(root, **{**options, name: value})
    return str(caught.value)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_whole_number(small: Path, name: str) -> None:
    values: list[Any] = [1.5, "2", [2], True, np.True_, -1, math.nan]
    for value in values if name in NONE else [*values, None]:
        assert refused(small, name, value).startswith(f"{name} must be a whole number of at least")
    for value in (1 << 64, 1 << 100):
        assert refused(small, name, value).startswith(f"{name} must be below 2**")


@pytest.mark.parametrize("name", ORDER)
def test_what_the_order_can_t_compute_with(small: Path, name: str) -> None:
    assert refused(small, name, 1 << 31) == f"{name} must be below 2**31"


@pytest.mark.parametrize("name", FLAGS)
def test_what_is_no_flag(small: Path, name: str) -> None:
    values: list[Any] = ["no", 0, 1, "x", np.int64(1), []]
    for value in values if name in NONE else [*values, None]:
        assert refused(small, name, value) == f"{name} must be True or False, not {value!r}"


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_in_its_range(small: Path, name: str) -> None:
    values: list[Any] = ["x", math.nan, math.inf, -1, True, None, [1]]
    for value in values if name == "max_pad_fraction" else [*values, 0]:
        assert refused(small, name, value).startswith(f"{name} must be ")


@pytest.mark.parametrize("name", ["fields", "columns"])
def test_what_is_no_list_of_names(small: Path, name: str) -> None:
    for value in (5, "x", b"x", {"x"}, [5], {"x": 1}):
        assert refused(small, name, value).startswith(f"{name} must be a list of names")


def test_what_is_no_list_or_dict_of_parameters(small: Path) -> None:
    for value in (5, "1", b"1"):
        with pytest.raises(PlanError, match="params must be a list or a dict"):
            ShardDataset(small, batch_size=2, where="n = ?", params=value)


def test_numpy_s_values_are_taken_as_python_s(small: Path) -> None:
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "where": "n < ?", "params": [10]}
    plain: dict[str, Any] = {"batch_size": 5, "seed": 3, "streams": 2, "window": 4, "shuffle": True}
    numpy: dict[str, Any] = {name: np.uint8(value) for name, value in plain.items()}
    numpy["shuffle"] = np.True_
    one = ShardDataset(small, **options, **plain)
    options |= {"rank": np.int64(0), "world_size": np.int32(1), "params": (np.int16(10),)}
    other = ShardDataset(
        small,
        max_pad_fraction=np.float32(0.5),
        agreement_timeout=np.int64(9),
        **options,
        **numpy,
    )
    assert one.next_state() == other.next_state()
    assert type(other.next_state()["seed"]) is int
    other.set_epoch(np.int64(0))  # type: ignore[arg-type]
    assert all_numbers(ShardLoader(other, np.int64(0))) == all_numbers(one)  # type: ignore[arg-type]
    other.load_state_dict({**one.state_after(1), "epoch": np.int64(0), "position": np.int64(5)})
    assert len(all_numbers(other)) == 5


def test_any_mapping_and_sequence_of_parameters(small: Path) -> None:
    add_keyset(small, "all", ["a/0001"])
    named = MappingProxyType({"low": np.int64(2000), "high": np.float64(2003)})
    where = "n >= $low AND n <= $high"
    assert sorted(all_numbers(ShardDataset(small, batch_size=4, where=where, params=named))) == [
        2000, 2001, 2002, 2003,
    ]  # fmt: skip
    data = ShardDataset(small, batch_size=1, where="n IN (?, ?)", params=range(1, 3))
    assert sorted(all_numbers(data)) == [1, 2]


@pytest.mark.parametrize("path", [None, 5, 1.5, object()])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(PlanError, match="path must be"):
        ShardDataset(path, batch_size=1)


def test_paths_of_every_kind(small: Path) -> None:
    for path in (small, str(small), os.fsencode(small)):
        assert len(ShardDataset(path, batch_size=1)) == 18
    for path in ("a\0b", b"a\0b", b"/no\xffthing", ""):
        with pytest.raises(PlanError, match="not a mounted version"):
            ShardDataset(path, batch_size=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_options_of_the_loader(small: Path, workers: int) -> None:
    data = ShardDataset(small, batch_size=2)
    for method in ("bogus", 5, "", ["fork"]):
        with pytest.raises(PlanError, match="start_method must be one of"):
            ShardLoader(data, workers, start_method=method)  # type: ignore[arg-type]
    for size in (0, None, "x", 1.5):
        with pytest.raises(PlanError, match="prefetch_bytes must be a whole number"):
            ShardLoader(data, workers, prefetch_bytes=size)  # type: ignore[arg-type]


def test_epochs_that_are_none(small: Path) -> None:
    data = ShardDataset(small, batch_size=3)
    values: list[Any] = [-1, 1.5, None, "1", True]
    for value in values:
        with pytest.raises(PlanError, match="epoch must be a whole number of at least 0, not"):
            data.set_epoch(value)
    for value in (1 << 62, 1 << 64, 2**64 - 1):
        with pytest.raises(PlanError, match=r"epoch must be below 2\*\*62"):
            data.set_epoch(value)
    assert sorted(all_numbers(data)) == ALL


def test_the_last_epoch_is_one_and_none_follows(small: Path) -> None:
    last = (1 << 62) - 1
    data = ShardDataset(small, batch_size=3)
    data.set_epoch(last)
    assert sorted(all_numbers(data)) == ALL
    state = data.state_after(4)
    other = ShardDataset(small, batch_size=3)
    other.load_state_dict(state)
    assert (state["epoch"], len(all_numbers(other))) == (last, 6)
    epochs = Epochs()
    epochs.set_position(last, 18, finished=True)
    for step in (lambda: next(iter(data)), lambda: len(data), epochs.next):
        with pytest.raises(PlanError, match="there is no epoch"):
            step()


def test_states_after_batches_that_there_are_not(small: Path) -> None:
    data = ShardDataset(small, batch_size=4, max_pad_fraction=0.2)
    values: list[Any] = [-1, 1.5, None, "1", True]
    for value in values:
        with pytest.raises(PlanError, match="batches must be a whole number"):
            data.state_after(value)
    assert [data.state_after(n)["position"] for n in range(6)] == [0, 4, 8, 12, 16, 18]
    for value in (6, 100, 1 << 62):
        with pytest.raises(PlanError, match=f"batches={value}, but .* has only 5"):
            data.state_after(value)
    data.load_state_dict(data.state_after(3))
    assert data.state_after(2)["position"] == 18
    with pytest.raises(PlanError, match="has only 2"):
        data.state_after(3)
    for position in (-1, 19, 1.5):
        with pytest.raises(PlanError, match="position"):
            data.state_at(0, position)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"batch_size": 4}])
def test_a_dataloader_that_would_stack_batches(
    small: Path, workers: int, options: dict[str, Any]
) -> None:
    loader = DataLoader(ShardDataset(small, batch_size=3), num_workers=workers, **options)
    with pytest.raises(PlanError, match="give its DataLoader batch_size=None"):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "transform",
    [lambda batch, generators: None, per_sample(lambda sample, generator: None)],  # type: ignore[arg-type,return-value]
)
def test_a_transform_that_returns_nothing(
    small: Path, workers: int, transform: Callable[..., Any]
) -> None:
    data = ShardDataset(small, batch_size=3, transform=transform)
    with pytest.raises(PlanError, match="must return a mapping of names to values, not None"):
        next(iter(ShardLoader(data, workers, start_method="fork")))


def test_a_transform_that_returns_a_list(small: Path) -> None:
    def listed(batch: Batch, generators: object) -> Any:
        return list(batch.items())

    with pytest.raises(PlanError, match="must return a mapping of names to values, not list"):
        next(iter(ShardDataset(small, batch_size=3, transform=listed)))


def test_errors_name_the_row_where_the_key_can_t_be_read_any_more(small: Path) -> None:
    data = ShardDataset(small, batch_size=3, shuffle=False, retries=0, where="n >= 2004")
    for folder in ("shards", "manifests"):
        (small / folder).rename(small / f"{folder}.gone")
    where = r"d/000000\.tar: sample 'row 4 of partition d' at offset \d+: No such file"
    with pytest.raises(LoadError, match=where):
        next(iter(data))


@pytest.mark.parametrize("workers", [0, 2])
def test_any_default_device(small: Path, workers: int) -> None:
    """Batches are made on the host, whatever a training makes its own tensors on."""
    want = [batch["x"].tolist() for batch in ShardDataset(small, batch_size=6, columns=["n"])]
    with torch.device("meta"):
        data = ShardDataset(small, batch_size=6, columns=["n"])
        for loader in (ShardLoader(data, workers), pickle.loads(pickle.dumps(data))):  # noqa: S301
            batches = list(loader)
            assert {value.device.type for batch in batches for value in batch.values()} == {"cpu"}
            assert [batch["x"].tolist() for batch in batches] == want
        assert math.isnan(MaskedMean().compute())
        assert data.skipped == 0
        data.set_epoch(0)
