"""One directory of many shards: what a change of one sample costs, and what it leaves alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from npz_tree import Content, partitions, read_version, run_pack, write_numbered

SAMPLES = 200
SHARD_BYTES = 900  # five samples


@pytest.fixture
def contents(source: Path, store: Path) -> dict[str, Content]:
    """What the source holds; version v1 is packed from it."""
    found = write_numbered(source, {f"{i}": i for i in range(SAMPLES)})
    run_pack(source, store, shard_bytes=SHARD_BYTES)
    assert 55 <= len(shards(store, "v1")) <= 75
    return found


def shards(store: Path, tag: str) -> list[str]:
    (part,) = partitions(store, tag).values()
    return [shard.digest for shard in part.shards]


def change(source: Path, contents: dict[str, Content]) -> int:
    contents |= write_numbered(source, {"7": 1007})
    (source / "7.json").write_bytes(b"{}")
    contents["7"] = Content(contents["7"].arrays, (), b"{}")
    return 1


def add(source: Path, contents: dict[str, Content]) -> int:
    contents |= write_numbered(source, {"new": 1008})
    return 1


def remove(source: Path, contents: dict[str, Content]) -> int:
    (source / "8.npz").unlink()
    (source / "8.json").unlink()
    del contents["8"]
    return 0


def grow(source: Path, contents: dict[str, Content]) -> int:
    contents |= write_numbered(source, {"9": 9}, size=60)
    return 1


@pytest.mark.parametrize("edit", [change, add, remove, grow])
def test_a_change_of_one_sample_writes_two_shards_at_most(
    edit: Callable[[Path, dict[str, Content]], int],
    source: Path,
    store: Path,
    contents: dict[str, Content],
) -> None:
    there = {path: path.stat().st_ctime_ns for path in (store / "objects").rglob("*/*")}
    read = edit(source, contents)
    assert run_pack(source, store, "v2").samples_read == read
    before, after = shards(store, "v1"), shards(store, "v2")
    written = {path.name for path in (store / "objects").rglob("*/*")} - {p.name for p in there}
    assert written & set(after) == set(after) - set(before)
    assert len(set(after) - set(before)) <= 2
    assert len(written) <= 4  # with a manifest and a table
    assert {path: path.stat().st_ctime_ns for path in there} == there
    assert read_version(store, "v2") == contents


def test_all_changes_together_cost_what_each_of_them_does(
    source: Path, store: Path, contents: dict[str, Content]
) -> None:
    for edit in (change, add, remove, grow):
        edit(source, contents)
    assert run_pack(source, store, "v2").samples_read == 3
    before, after = shards(store, "v1"), shards(store, "v2")
    assert len(set(after) - set(before)) <= 8
    assert read_version(store, "v2") == contents


def test_a_store_that_forgot_the_files_keeps_its_shards(
    source: Path, store: Path, cache: Path, contents: dict[str, Content]
) -> None:
    """Each file is read again, but only what has changed is written."""
    shutil.rmtree(cache)
    change(source, contents)
    assert run_pack(source, store, "v2").samples_read == SAMPLES
    assert len(set(shards(store, "v2")) - set(shards(store, "v1"))) == 1
    assert read_version(store, "v2") == contents
