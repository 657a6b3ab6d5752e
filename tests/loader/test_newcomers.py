"""What someone meets who uses the loader for the first time: names in errors, plain answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_versions import build, numbered
from test_dataset import all_numbers
from torch.utils.data import DataLoader

from fsmount.errors import PlanError, StateMismatchError
from fsmount_loader import Batch, Generators, ShardDataset, ShardLoader, per_sample

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_a_dataset_says_what_it_is(small: Path) -> None:
    document = json.loads((small / "VERSION.json").read_bytes())
    data = ShardDataset(small, batch_size=3, rank=1, world_size=2, where="n < 6", seed=4)
    table = document["table"]["digest"]
    assert (data.version.tag, data.version.table, data.version.store) == (None, table, None)
    assert repr(data) == (
        f"ShardDataset({str(small)!r}: sha256:{table[:12]}, 6 samples, where='n < 6', "
        "batch 3 of rank 1 of 2, shuffled, seed 4)"
    )


def test_a_state_says_which_version_it_was_saved_with(small: Path, tmp_path: Path) -> None:
    data = ShardDataset(small, batch_size=3)
    state = json.loads(json.dumps(data.next_state()))
    assert state["version"] == {"tag": None, "table": data.version.table, "store": None}
    torch.save(data.next_state(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    # The same samples with other sidecars: another version, the same selection.
    parts = {"a": [numbered(10, more=1)], "b/c": [numbered(1, 1)], "d": [numbered(7, 2)]}
    other = ShardDataset(build(tmp_path / "sidecars", parts), batch_size=3)
    assert other.version.table != data.version.table
    other.load_state_dict(state)
    assert all_numbers(other) == all_numbers(data)
    fewer = ShardDataset(build(tmp_path / "fewer", {"a": [numbered(9)]}), batch_size=3)
    with pytest.raises(StateMismatchError, match=f"selection=.*{data.version.table}"):
        fewer.load_state_dict(state)


def nested(tmp_path: Path) -> Path:
    """Sidecars with objects, one of them missing and one of another type."""
    near = {"gps": {"lat": 1.5, "at": {"s": 7, "n.s": 9}}, "a.b": 1, "a": {"b": 2}, "odd": {"x": 1}}
    far = {"gps": {"lat": 2, "lon": 3}, "a.b": 3, "a": {"b": 4}, "odd": 5}
    parts = {"p": [numbered(2, **near)], "q": [numbered(1, 1, **far)], "r": [numbered(1, 2)]}
    return build(tmp_path / "nested", parts)


def test_columns_inside_columns(tmp_path: Path) -> None:
    columns = ["gps.lat", "gps.at.s", "gps.at.n.s", "a.b", "n"]
    root = nested(tmp_path)
    (batch,) = ShardDataset(root, batch_size=4, shuffle=False, columns=columns)
    assert list(batch)[-5:] == columns
    assert batch["gps.lat"] == [1.5, 1.5, 2.0, None]
    assert batch["gps.at.s"] == [7, 7, None, None]
    assert batch["gps.at.n.s"] == [9, 9, None, None]
    assert batch["a.b"] == [1, 1, 3, None]  # a column of that name
    (batch,) = ShardDataset(root, batch_size=2, columns=["gps.lat"], where="gps.lat < 2")
    assert batch["gps.lat"].tolist() == [1.5, 1.5]
    assert batch["gps.lat"].dtype == torch.float64
    data = ShardDataset(
        root, batch_size=3, bucket_by="gps.lat", bucket_size=3, where="gps IS NOT NULL"
    )
    assert len(all_numbers(data)) == 3


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("gps.lta", r"column 'gps.lta': no 'lta' \(did you mean lat\?\); there are at, lat, lon"),
        ("gps.at.m", "column 'gps.at.m': no 'm'; there are n.s, s"),
        ("n.x", "column 'n.x': 'n' is int64, without fields"),
        ("odd.x", "column 'odd.x': 'odd' is string, without fields"),
        ("gsp.lat", r"no column 'gsp.lat'; there are "),
        ("labell3", r"no column 'labell3' \(did you mean label3\?\); there are "),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, column: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ShardDataset(nested(tmp_path), batch_size=4, columns=[column])


def arrays_of_numpy(sample: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    x = sample["x"].numpy()
    return {
        "x": x[::-1],
        "label": np.int64(sample["label"]),
        "big": x.astype(">f4"),
        "day": np.datetime64(5, "D"),
        "fixed": np.broadcast_to(np.float32(1), 2),
        "own": np.arange(int(sample["label"])),
        "name": np.str_("n"),
        "flag": np.bool_(True),
    }


@pytest.mark.parametrize("workers", [0, 1])
def test_numpy_becomes_tensors(small: Path, workers: int) -> None:
    data = ShardDataset(
        small, batch_size=6, transform=per_sample(arrays_of_numpy, lists=["own"]), evaluate=True
    )
    plain = list(ShardDataset(small, batch_size=6, evaluate=True))
    for batch, wanted in zip(ShardLoader(data, workers), plain, strict=True):
        assert torch.equal(batch["x"], wanted["x"].flip(1))
        assert torch.equal(batch["label"], wanted["label"])
        assert torch.equal(batch["big"], wanted["x"])
        assert batch["day"].tolist() == [5] * 6
        assert batch["fixed"].tolist() == [[1, 1]] * 6
        assert [own.tolist() for own in batch["own"]] == [[*range(n)] for n in wanted["label"]]
        assert batch["name"] == ["n"] * 6
        assert batch["flag"].dtype == torch.bool


def fails(sample: Mapping[str, Any], generator: np.random.Generator) -> Mapping[str, Any]:
    if sample["n"] == 2003:
        raise ZeroDivisionError("no such label")
    return sample


def unlike(sample: Mapping[str, Any], generator: np.random.Generator) -> Mapping[str, Any]:
    return {**sample, "x": sample["x"][: 2 if sample["n"] == 4 else 3]}


def lacks(sample: Mapping[str, Any], generator: np.random.Generator) -> Mapping[str, Any]:
    return {name: value for name, value in sample.items() if sample["n"] != 4 or name != "x"}


def fails_whole(batch: Batch, generators: Generators) -> Batch:
    raise ZeroDivisionError("no such batch")


@pytest.mark.parametrize("kind", ["in process", "ShardLoader", "DataLoader"])
def test_what_a_transform_raises_names_the_sample(small: Path, kind: str) -> None:
    def told(transform: Any) -> str:
        data: Any = ShardDataset(
            small, batch_size=6, columns=["n"], transform=transform, shuffle=False
        )
        if kind == "ShardLoader":
            data = ShardLoader(data, 1)
        elif kind == "DataLoader":
            data = DataLoader(data, batch_size=None, num_workers=1)
        with pytest.raises((ZeroDivisionError, PlanError)) as caught:
            list(data)
        return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])

    assert "in the transform of sample 'd/0003' of partition 'd'" in told(per_sample(fails))
    whole = told(fails_whole)
    assert "the batch from sample 'a/0000' of partition 'a' to sample 'a/0005' of" in whole
    stacked = told(per_sample(unlike))
    assert "'x' is [3] in sample 'a/0000' of partition 'a' and [2] in sample 'a/0004'" in stacked
    assert "only one of sample 'a/0000' of partition 'a' and sample 'a/0004'" in told(
        per_sample(lacks)
    )
