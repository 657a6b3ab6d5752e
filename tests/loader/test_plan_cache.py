"""Plans: made once on a node, mapped by everyone, and never trusted when damaged or foreign."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_versions import Sample, add_keyset, build, numbered
from test_dataset import all_numbers

import fsmount_loader.plan
from fsmount.errors import LoadError, PlanError
from fsmount_loader import ShardDataset, ShardLoader
from fsmount_loader.options import Options
from fsmount_loader.plan import Plan, make_plan
from fsmount_loader.selected import Rows, Selected
from fsmount_loader.version import VersionFiles


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "fsmount" / "plans"
    yield folder
    assert not list(folder.glob("*.new"))


def plan(root: Path, **options: Any) -> Plan:
    return make_plan(VersionFiles.open(root), Options(batch_size=1, **options))


def make_in_memory(root: Path) -> Selected:
    return fsmount_loader.plan._select_rows(VersionFiles.open(root), Options(batch_size=1), None)


def same(one: Selected, other: Selected) -> bool:
    columns = ("shard", "offset", "size", "checksum", "schema", "number")
    return (
        all(np.array_equal(getattr(one.rows, n), getattr(other.rows, n)) for n in columns)
        and (one.shards, one.digest) == (other.shards, other.digest)
        and all(map(np.array_equal, one.schemas.arrays(), other.schemas.arrays()))
        and np.array_equal(one.shard_partition, other.shard_partition)
        and np.array_equal(one.rows_per_shard, other.rows_per_shard)
    )


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a manifest was read")

    monkeypatch.setattr(VersionFiles, "manifest", refuse)
    monkeypatch.setattr(VersionFiles, "partitions", property(refuse))


def test_a_plan_is_found_without_reading_the_version(
    small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_keyset(small, "some", ["a/0001", "d/0001"])
    every: list[dict[str, Any]] = [
        {},
        {"where": "n > 3"},
        {"where": "n > ?", "params": [3]},
        {"where": "n > ?", "params": [4]},
        {"where": "n > $n", "params": {"n": 3}},
        {"keyset": "some"},
        {"keyset": "some", "where": "n > 3"},
    ]
    made = [plan(small, **options) for options in every]
    assert len(list(cache.glob("*.plan"))) == len(every)
    forbid(monkeypatch)
    for options, first in zip(every, made, strict=True):
        found = plan(small, **options)
        assert found.rows.file == first.rows.file is not None
        assert same(found.selected, first.selected)
        assert found.shards == first.shards
    whole = ShardDataset(small, batch_size=6, fields=["x"])
    assert sum(len(batch["x"]) for batch in whole) == 18


def test_a_selection_that_can_t_be_told_apart_is_not_kept(small: Path, cache: Path) -> None:
    class Five(int):
        def __repr__(self) -> str:
            return "some number"

    plan(small, where="list_contains(?, n)", params=[[5]])
    plan(small, where="n > ?", params=[Five(5)])
    assert not list(cache.glob("*.plan"))


def test_a_changed_keyset_or_version_is_another_plan(small: Path, tmp_path: Path) -> None:
    add_keyset(small, "some", ["a/0001"])
    assert len(plan(small, keyset="some").rows) == 1
    add_keyset(small, "some", ["a/0001", "a/0002"])
    assert len(plan(small, keyset="some").rows) == 2
    other = build(tmp_path / "other", {"a": [numbered(10)], "b/c": [numbered(1, 1)]})
    assert len(plan(other).rows) == 11


def test_an_error_is_not_kept(small: Path, cache: Path) -> None:
    with pytest.raises(PlanError, match="no sample is selected"):
        plan(small, where="n < 0")
    (small / "manifests" / "a.parquet").unlink()
    with pytest.raises(LoadError, match=r"a\.parquet"):
        plan(small)
    assert not list(cache.glob("*.plan"))


def test_a_damaged_plan_is_made_again(small: Path, cache: Path) -> None:
    right = make_in_memory(small)
    assert same(plan(small).selected, right)
    (file,) = cache.glob("*.plan")
    data = file.read_bytes()
    for at in range(0, len(data), 11):
        file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        assert same(plan(small).selected, right)
        assert file.read_bytes() == data
    for length in (0, 1, 23, 24, len(data) // 2, len(data) - 1):
        file.unlink()
        file.write_bytes(data[:length])
        assert same(plan(small).selected, right)
    assert file.read_bytes() == data


def test_what_a_killed_process_left_is_no_obstacle(small: Path, cache: Path) -> None:
    first = plan(small)
    assert first.rows.file is not None
    os.rename(first.rows.file, first.rows.file + ".new")
    assert same(plan(small).selected, first.selected)


@pytest.mark.parametrize("reason", ["a file is in the way", "the disk is full"])
def test_without_a_cache_plans_are_made_in_memory(
    small: Path, tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "a file is in the way":
        (tmp_path / "cache").write_text("")
    else:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
    found = plan(small)
    assert found.rows.file is None
    assert len(found.rows) == 18
    if reason == "a file is in the way":
        (tmp_path / "cache").unlink()


def test_a_mapped_plan_is_pickled_as_its_path(larger: Path) -> None:
    mapped = plan(larger)
    data = pickle.dumps(mapped)
    assert len(data) < mapped.rows.offset.nbytes * 6
    assert same(pickle.loads(data).selected, mapped.selected)  # noqa: S301 - our own
    in_memory = Rows.empty(3, None)
    in_memory.size[:] = [1, 2, 3]
    assert pickle.loads(pickle.dumps(in_memory)).size.tolist() == [1, 2, 3]  # noqa: S301


def test_spawned_workers_map_the_plan(larger: Path) -> None:
    data = ShardDataset(larger, batch_size=5, max_pad_fraction=1)
    loader = ShardLoader(data, 2, start_method="spawn")
    expected = all_numbers(ShardDataset(larger, batch_size=5, max_pad_fraction=1))
    assert all_numbers(loader) == expected


def _plan_and_count(root: Path, log: Path) -> None:
    read = VersionFiles.manifest

    def counted(files: VersionFiles, partition: Any) -> bytes:
        with open(log, "a") as file:
            file.write("x")
        return read(files, partition)

    VersionFiles.manifest = counted  # type: ignore[method-assign]
    assert len(plan(root).rows) == 103


def test_processes_of_a_node_make_a_plan_once(larger: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_plan_and_count, args=(larger, log)) for _ in range(6)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 6
    assert log.read_text() == "x" * 4


def test_the_longest_unused_plans_go_first(
    small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for number in range(4):
        file = plan(small, where=f"n > {number}").rows.file
        assert file is not None
        os.utime(file, (1000 + number, 1000 + number))
        files.append(Path(file))
    monkeypatch.setattr("fsmount_loader.cache._BYTES_MAX", 2 * files[0].stat().st_size + 100)
    os.utime(files[0])
    plan(small)
    assert [file.exists() for file in files] == [True, False, False, False]
    assert len(list(cache.glob("*.plan"))) == 2


def test_a_plan_that_was_removed_stays_readable(small: Path, cache: Path) -> None:
    data = ShardDataset(small, batch_size=6)
    for file in cache.glob("*.plan"):
        file.unlink()
    assert len(all_numbers(data)) == 18


@pytest.mark.parametrize("shared", ["the cache", "the folder above it"])
def test_a_plan_is_not_believed_where_others_may_write(
    small: Path, tmp_path: Path, cache: Path, shared: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that another user planted delivers that user's samples."""
    planted = plan(small, where="n = 3")
    (file,) = cache.glob("*.plan")
    whole = plan(small)
    assert whole.rows.file is not None
    os.replace(file, whole.rows.file)
    assert len(plan(small).rows) == len(planted.rows) == 1
    folder = {"the cache": cache, "the folder above it": tmp_path / "cache"}[shared]
    folder.chmod(0o777)
    with caplog.at_level("INFO", "fsmount_loader"):
        for _ in range(2):
            found = plan(small)
            assert len(found.rows) == 18
            assert found.rows.file is None
    assert caplog.text.count("plans are not cached") <= 1


def test_no_more_plans_than_a_folder_should_have(
    small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsmount_loader.cache._COUNT_MAX", 3)
    for number in range(5):
        file = plan(small, where=f"n > {number}").rows.file
        assert file is not None
        os.utime(file, (1000 + number, 1000 + number))
    assert len(list(cache.glob("*.plan"))) == 3


def test_samples_of_many_shapes_are_planned_from_the_cache(tmp_path: Path, cache: Path) -> None:
    shapes = [(n % 5, n % 3) for n in range(40)]
    samples = [
        Sample(f"{n:02d}", {"x": np.full(s, n, "f4"), "y": np.array(n)})
        for n, s in enumerate(shapes)
    ]
    root = build(tmp_path / "v", {"a": [samples[:20]], "b": [samples[20:]]})
    for _ in range(2):
        data = ShardDataset(root, batch_size=40, shuffle=False, shapes="list")
        (batch,) = data
        assert [tuple(x.shape) for x in batch["x"]] == shapes
        assert batch["y"].tolist() == list(range(40))
    (file,) = cache.glob("*.plan")
    made, found = plan(root, shapes="pad"), plan(root, shapes="pad")
    assert found.rows.file == str(file)
    assert made.varied is not None
    assert found.layout == made.layout
