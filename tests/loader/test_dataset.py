"""Which samples a dataset delivers, to whom, and in which order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from small_versions import add_keyset, build, numbered
from torch.utils.data import DataLoader

from fsmount.errors import FsmountError, PlanError
from fsmount_loader import Batch, ShardDataset, ShardLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def numbers(batch: Batch, *, padded: bool = False) -> list[int]:
    """The samples of a batch by number, padding left out unless asked for."""
    valid = batch["__valid__"]
    assert valid.dtype == torch.bool
    assert len(valid) == len(batch["x"]) == len(batch["label"])
    assert torch.equal(batch["label"], batch["x"][:, 0].long() % 1000 % 3)
    found = batch["x"][:, 0].long()
    chosen: list[int] = (found if padded else found[valid]).tolist()
    return chosen


def all_numbers(batches: Iterable[Batch]) -> list[int]:
    return list(chain.from_iterable(map(numbers, batches)))


ALL = sorted([*range(10), 1000, *range(2000, 2007)])


@pytest.mark.parametrize("shuffle", [True, False])
def test_global_batches_do_not_depend_on_ranks_and_workers(larger: Path, shuffle: bool) -> None:
    def options(world: int) -> dict[str, Any]:
        return {"global_batch_size": 12, "shuffle": shuffle, "streams": 3, "world_size": world}

    expected = [numbers(batch, padded=True) for batch in ShardDataset(larger, rank=0, **options(1))]
    assert len(expected) == 9
    for world in (2, 3, 4):
        for workers in (0, 1, 3):
            ranks = [
                list(ShardLoader(ShardDataset(larger, rank=rank, **options(world)), workers))
                for rank in range(world)
            ]
            joined = [
                list(chain.from_iterable(numbers(part, padded=True) for part in parts))
                for parts in zip(*ranks, strict=True)
            ]
            if shuffle:
                assert list(map(sorted, joined)) == list(map(sorted, expected))
            else:
                assert joined == expected


def test_each_sample_once_over_ranks_and_workers(small: Path) -> None:
    for workers in (0, 1, 8):
        seen = []
        for rank in range(2):
            data = ShardDataset(small, batch_size=2, rank=rank, world_size=2, max_pad_fraction=0.2)
            batches = list(ShardLoader(data, workers))
            assert len(batches) == len(data) == 5
            seen += all_numbers(batches)
        assert sorted(seen) == ALL


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"batch_size": 5, "max_pad_fraction": 0.2}, 4),
        ({"batch_size": 5, "drop_last": True}, 3),
        ({"batch_size": 5, "evaluate": True}, 4),
        ({"batch_size": 1}, 18),
        ({"batch_size": 18}, 1),
        ({"batch_size": 64, "max_pad_fraction": 1}, 1),
        ({"batch_size": 4, "where": "n = 1000", "max_pad_fraction": 1}, 1),
        ({"batch_size": 6, "streams": 1000, "window": 5}, 3),
        ({"batch_size": 6, "chunk_size": 1, "window": 1, "shuffle": False}, 3),
    ],
)
def test_len_is_what_comes(
    small: Path, workers: int, options: dict[str, Any], batches: int
) -> None:
    data = ShardDataset(small, **options)
    plain = DataLoader(data, batch_size=None, num_workers=workers)
    assert len(data) == len(plain) == len(ShardLoader(data, workers)) == batches
    assert len(list(plain)) == len(list(ShardLoader(data, workers))) == batches


def test_padding_wraps_to_the_epoch_s_first_samples(small: Path) -> None:
    for world in (1, 2, 5):
        ranks = [
            ShardDataset(small, global_batch_size=40, rank=rank, world_size=world, evaluate=True)
            for rank in range(world)
        ]
        (batches,) = zip(*ranks, strict=True)
        assert sorted(chain.from_iterable(map(numbers, batches))) == ALL
        padded = list(chain.from_iterable(numbers(batch, padded=True) for batch in batches))
        assert sorted(padded) == sorted(ALL + ALL + ALL[:4])


def test_evaluation_keeps_the_manifests_order(small: Path) -> None:
    data = ShardDataset(small, batch_size=4, evaluate=True)
    assert all_numbers(data) == all_numbers(data) == ALL
    shuffled = ShardDataset(small, batch_size=4, evaluate=True, shuffle=True)
    assert sorted(all_numbers(shuffled)) == ALL


def test_three_epochs_differ_and_set_epoch_repeats(small: Path) -> None:
    data = ShardDataset(small, batch_size=6)
    epochs = [all_numbers(data) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [ALL] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    data.set_epoch(1)
    assert [all_numbers(data), all_numbers(data)] == epochs[1:]
    assert all_numbers(ShardDataset(small, batch_size=6)) == epochs[0]
    assert all_numbers(ShardDataset(small, batch_size=6, seed=1)) != epochs[0]


def test_a_selection_by_where_keyset_and_both(small: Path) -> None:
    add_keyset(small, "some", ["a/0001", "a/0002", "d/0001"])

    def selected(**options: Any) -> list[int]:
        return all_numbers(ShardDataset(small, batch_size=1, shuffle=False, **options))

    assert selected(where="label3 = 1") == [1, 4, 7, 2001, 2004]
    assert selected(where="n > $least", params={"least": 2004}) == [2005, 2006]
    assert selected(keyset="some") == [1, 2, 2001]
    assert selected(keyset="some", where="label3 = 1") == [1, 2001]


def test_keys_columns_and_fields(small: Path) -> None:
    columns = ["n", "label3", "__size__"]
    data = ShardDataset(small, batch_size=6, keys=True, columns=columns, fields=["x"])
    for batch in data:
        assert list(batch) == ["x", "__valid__", "__key__", *columns]
        assert batch["n"].dtype == torch.int64
        assert batch["n"].tolist() == batch["x"][:, 0].tolist()
        assert [int(key[-4:]) for key in batch["__key__"]] == [n % 1000 for n in batch["n"]]
    everything = ShardDataset(small, batch_size=18, columns=["n"], fields=[])
    assert list(next(iter(everything))) == ["__valid__", "n"]


def test_columns_without_a_number_in_every_row_are_lists(tmp_path: Path) -> None:
    samples = {"a": [numbered(2, name="Ulm", gap=1)], "b": [numbered(2, 1, flag=True, name=None)]}
    data = ShardDataset(
        build(tmp_path / "v", samples),
        batch_size=4,
        shuffle=False,
        columns=["name", "gap", "flag", "n"],
    )
    (batch,) = data
    assert batch["name"] == ["Ulm", "Ulm", None, None]
    assert batch["gap"] == [1, 1, None, None]
    assert batch["flag"] == [None, None, True, True]
    assert torch.equal(batch["n"], torch.tensor([0, 1, 1000, 1001]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of batch_size and global_batch_size"),
        ({"batch_size": 4, "global_batch_size": 4}, "one of batch_size and global_batch_size"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"batch_size": True}, "batch_size must be"),
        ({"batch_size": 2.5}, "batch_size must be"),
        ({"batch_size": 2, "window": 0}, "window must be"),
        ({"batch_size": 2, "chunk_size": 0}, "chunk_size must be"),
        ({"batch_size": 2, "streams": 0}, "streams must be"),
        ({"batch_size": 2, "seed": -1}, "seed must be"),
        ({"batch_size": 2, "seed": 1 << 64}, r"seed must be below 2\*\*64"),
        ({"batch_size": 2, "prefetch": -1}, "prefetch must be"),
        ({"batch_size": 2, "retries": -1}, "retries must be"),
        ({"batch_size": 2, "max_pad_fraction": 2}, "max_pad_fraction must be"),
        ({"batch_size": 2, "max_pad_fraction": "1"}, "max_pad_fraction must be"),
        ({"batch_size": 2, "where": 5}, "where must be a text"),
        ({"batch_size": 2, "on_error": "ignore"}, "on_error must be"),
        ({"batch_size": 2, "transform": 5}, "transform must be"),
        ({"batch_size": 2, "fields": "x"}, "fields must be a list of names"),
        ({"batch_size": 2, "fields": ["y"]}, "fields: no 'y'; there are label, x"),
        ({"batch_size": 2, "fields": ["x", "x"]}, "fields names 'x' twice"),
        ({"batch_size": 2, "columns": ["m"]}, "no column 'm'; there are .*__key__.*label3"),
        ({"batch_size": 2, "columns": ["__key__"], "keys": True}, "'__key__' is in every batch"),
        ({"batch_size": 2, "params": [1]}, "params belong to where"),
        ({"batch_size": 2, "evaluate": True, "drop_last": True}, "drop_last"),
        ({"batch_size": 2, "where": "n < 0"}, "no sample is selected by where='n < 0'"),
        ({"batch_size": 2, "where": "m = 0"}, 'Referenced column "m" not found'),
        ({"batch_size": 2, "keyset": "none"}, "no keyset 'none' in .*; there are some"),
        ({"batch_size": 2, "keyset": "../some"}, "no keyset"),
        ({"batch_size": 2, "keyset": "other"}, "keyset 'other': not in this version: 'z/1'"),
        ({"batch_size": 19, "drop_last": True}, "drop_last=True leaves none of 18 samples"),
        ({"batch_size": 16}, "44% would be padding.*max_pad_fraction=0.1.*drop_last=True"),
        ({"batch_size": 2, "rank": 0}, "rank and world_size go together"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, "rank=2 of world_size=2"),
        ({"global_batch_size": 5, "rank": 0, "world_size": 2}, "can't be divided among 2 ranks"),
    ],
)
def test_options_that_can_t_be_planned(small: Path, options: Any, message: str) -> None:
    add_keyset(small, "some", ["a/0001"])
    if options.get("keyset") == "other":
        add_keyset(small, "other", ["a/0001", "z/1"])
    with pytest.raises(PlanError, match=message) as caught:
        ShardDataset(small, **options)
    assert "\n" not in str(caught.value)


def test_a_directory_that_is_no_version(tmp_path: Path, small: Path) -> None:
    with pytest.raises(PlanError, match="not a mounted version"):
        ShardDataset(tmp_path / "nothing", batch_size=1)
    (tmp_path / "all" / "versions").mkdir(parents=True)
    small.rename(tmp_path / "all" / "versions" / "v1")
    with pytest.raises(PlanError, match=r"give one of its versions, as .*/all/versions/v1"):
        ShardDataset(tmp_path / "all", batch_size=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlanError, match="is it mounted"):
        ShardDataset(tmp_path / "empty", batch_size=1)
    (tmp_path / "all" / "store.json").touch()
    with pytest.raises(PlanError, match=r"a store; mount .*: fsmount mount .*/all@latest MOUNT"):
        ShardDataset(tmp_path / "all", batch_size=1)


def test_samples_of_different_shapes_are_told_apart_by_key(tmp_path: Path) -> None:
    odd = numbered(3, 1)
    odd[2].arrays["x"].resize(5, refcheck=False)
    root = build(tmp_path / "v", {"a": [numbered(2)], "b": [odd]})
    with pytest.raises(
        PlanError, match=r"'a/0000' and 'b/0002'.*'x' is float32 \[3\] in one and float32 \[5\]"
    ):
        ShardDataset(root, batch_size=1)
    assert len(ShardDataset(root, batch_size=1, where="n <> 1002")) == 4


def test_ranks_from_the_environment(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [numbers(batch) for batch in ShardDataset(small, batch_size=6)]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    mine = [numbers(batch) for batch in ShardDataset(small, batch_size=2)]
    assert mine == [batch[1::3] for batch in whole]
    explicit = ShardDataset(small, batch_size=6, rank=0, world_size=1)
    assert [numbers(batch) for batch in explicit] == whole
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(PlanError, match="RANK='1' and WORLD_SIZE=None"):
        ShardDataset(small, batch_size=2)


def test_a_swapped_or_changed_manifest_is_an_error_that_names_it(small: Path) -> None:
    a, d = small / "manifests" / "a.parquet", small / "manifests" / "d.parquet"
    right = a.read_bytes()
    for wrong in (d.read_bytes(), right[:-1], right + b"x", b""):
        a.write_bytes(wrong)
        with pytest.raises(FsmountError, match=r"manifests/a\.parquet"):
            ShardDataset(small, batch_size=2)
    a.unlink()
    with pytest.raises(FsmountError, match=r"manifests/a\.parquet"):
        ShardDataset(small, batch_size=2)


def test_a_changed_partition_table_is_an_error(small: Path) -> None:
    path = small / "partitions.parquet"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(FsmountError, match=r"partitions\.parquet"):
        ShardDataset(small, batch_size=2)
    (small / "VERSION.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(FsmountError, match="format 2"):
        ShardDataset(small, batch_size=2)
