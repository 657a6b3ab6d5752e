"""What is selected, and how a plan of it is laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import change_manifest
from small_versions import add_keyset, build, numbered
from test_dataset import all_numbers
from test_plan_cache import plan, same

from fsmount.errors import FormatError, PlanError
from fsmount.model import Partition
from fsmount_loader import ShardDataset
from fsmount_loader.version import VersionFiles

SELECTIONS: list[dict[str, Any]] = [
    {},
    {"where": "n % 7 = 1"},
    {"where": "n = 2003"},
    {"where": "__index__ = 0"},
    {"keyset": "some"},
    {"keyset": "some", "where": "n > 1"},
]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_plan_in_a_file_has_no_more_than_its_rows(
    small: Path, tmp_path: Path, selection: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_keyset(small, "some", ["a/0001", "a/0002", "d/0001"])
    with monkeypatch.context() as without:
        without.setenv("XDG_CACHE_HOME", str(small / "VERSION.json"))
        in_memory = plan(small, **selection)
    assert in_memory.rows.file is None
    made, found = plan(small, **selection), plan(small, **selection)
    assert same(made.selected, in_memory.selected)
    assert same(found.selected, in_memory.selected)
    rows = made.rows
    assert rows.file is not None
    columns = (rows.shard, rows.offset, rows.size, rows.checksum, rows.schema, rows.number)
    size = Path(rows.file).stat().st_size
    assert size < sum(column.nbytes for column in columns) + 12 * 64 + 2048
    assert np.all(np.diff(rows.shard) >= 0)


def test_what_is_not_selected_decides_nothing(tmp_path: Path) -> None:
    """Samples of another shape, in a partition without a selected row."""
    odd = numbered(3, 1)
    for one in odd:
        one.arrays["x"].resize(5, refcheck=False)
    root = build(tmp_path / "v", {"a": [odd], "b": [numbered(4)], "c": [odd]})
    add_keyset(root, "b", ["b/0001", "b/0003"])
    for selection, wanted in (
        ({"where": "n < 1000"}, [0, 1, 2, 3]),
        ({"keyset": "b"}, [1, 3]),
        ({"keyset": "b", "where": "n > 1"}, [3]),
    ):
        data = ShardDataset(root, batch_size=1, shuffle=False, **selection)  # type: ignore[arg-type]
        assert all_numbers(data) == wanted
    with pytest.raises(PlanError, match="can't be in one batch"):
        ShardDataset(root, batch_size=1)
    change_manifest(root, "c", rows=[0, 1])
    with pytest.raises(FormatError, match="partition 'c': 2 rows for 3 samples"):
        ShardDataset(root, batch_size=1, where="n < 1000")


@pytest.mark.parametrize(
    ("selection", "read_again"),
    [
        ({}, []),
        ({"where": "__index__ < 2"}, []),
        ({"where": "n < 2"}, ["a"]),  # the first says which columns there are
        ({"keyset": "some"}, ["a", "b/c", "d"]),
    ],
)
def test_how_often_a_manifest_is_read(
    small: Path, selection: dict[str, Any], read_again: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_keyset(small, "some", ["a/0001", "b/c/0000", "d/0001"])
    read: list[str] = []
    manifest = VersionFiles.manifest

    def spy(files: VersionFiles, partition: Partition) -> bytes:
        read.append(partition.id)
        return manifest(files, partition)

    monkeypatch.setattr(VersionFiles, "manifest", spy)
    plan(small, **selection)
    assert sorted(read) == sorted(["a", "b/c", "d", *read_again])
