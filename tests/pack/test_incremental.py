"""The cost of a change is the size of the change, and its result is that of a fresh pack."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from npz_tree import (
    Content,
    numbered,
    objects,
    partitions,
    read_version,
    run_pack,
    tags,
    task_of,
    write_numbered,
    write_sample,
)

from fsmount.errors import VersionExistsError, VersionNotFoundError
from fsmount.formats.shard import member_order
from fsmount.model import Digest, TagRef, parse_ref
from fsmount.pack import build
from fsmount.pack import source as source_tree
from fsmount.pack.build import build_partition
from fsmount.pack.source import NpzTree
from fsmount.store import Store

KEYS = {f"{p}/{i}": 10 * n + i for n, p in enumerate("abc") for i in range(5)}


@pytest.fixture
def contents(source: Path, store: Path) -> dict[str, Content]:
    """What the source holds; version v1 is packed from it."""
    found = write_numbered(source, KEYS)
    assert run_pack(source, store).samples_read == 15
    return found


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the files that are read, as they are read."""
    paths: list[str] = []
    real = source_tree.open_unchanged

    def open_unchanged(path: str, *rest: Any) -> Any:
        paths.append(path)
        return real(path, *rest)

    monkeypatch.setattr(source_tree, "open_unchanged", open_unchanged)
    return paths


def touch(path: Path) -> None:
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))


def counts(report: Any) -> tuple[list[str], list[str], list[str], int]:
    return (
        list(report.built), list(report.refreshed), list(report.reused), report.samples_read,
    )  # fmt: skip


def fresh(source: Path, store: Path, **options: Any) -> dict[str, tuple[str, ...]]:
    """The objects of the same source packed into a new store."""
    shutil.rmtree(store.with_name("fresh"), ignore_errors=True)
    run_pack(source, store.with_name("fresh"), **options)
    return objects(store.with_name("fresh"), "v1")


def test_unchanged_files_are_not_read(
    source: Path, store: Path, contents: Any, read: list[str]
) -> None:
    report = run_pack(source, store, "v2")
    assert counts(report) == ([], [], ["a", "b", "c"], 0)
    assert read == []
    assert objects(store, "v2") == objects(store, "v1")
    assert report.document.parent is not None
    assert report.document.parent.tag == "v1"
    assert report.document.content_revision == partition_revision(store, "v1")
    assert run_pack(source, store, "v3", force=True).samples_read == 15
    assert sorted(read) == sorted(map(str, source.rglob("*.*")))
    assert read_version(store, "latest") == contents


def partition_revision(store: Path, tag: str) -> str:
    return Store.open(str(store)).resolve(parse_ref(tag)).content_revision


def test_a_change_reads_what_changed_and_nothing_else(
    source: Path, store: Path, contents: dict[str, Content], read: list[str]
) -> None:
    contents["b/2"] = write_sample(source, "b/2", numbered(99))
    (source / "b" / "2.json").unlink()
    report = run_pack(source, store, "v2")
    assert read == [f"{source}/b/2.npz"]
    contents["b/2"] = replace(contents["b/2"], sidecar=None)
    assert counts(report) == (["b"], [], ["a", "c"], 1)
    assert read_version(store, "v2") == contents


def test_the_result_of_a_change_is_that_of_a_fresh_pack(
    source: Path, store: Path, contents: Any
) -> None:
    """Shards and manifests, byte for byte, though most samples were copied."""
    write_sample(source, "b/2", numbered(99))
    write_sample(source, "b/new", numbered(98), b'{"other": [1.5]}')
    (source / "b" / "3.npz").unlink()
    touch(source / "b" / "0.npz")
    report = run_pack(source, store, "v2")
    assert counts(report) == (["b"], [], ["a", "c"], 3)
    assert objects(store, "v2") == fresh(source, store)


def test_shards_of_a_change_are_cut_like_those_of_a_fresh_pack(source: Path, store: Path) -> None:
    write_numbered(source, {f"a/{i}": i for i in range(20)})
    run_pack(source, store, shard_bytes=1500)
    assert len(partitions(store, "v1")["a"].shards) > 2
    last = member_order([f"a/{i}" for i in range(20)], 0)[-1]
    write_sample(source, last, numbered(99, size=200))
    assert run_pack(source, store, "v2").samples_read == 1
    assert objects(store, "v2") == fresh(source, store, shard_bytes=1500)
    shared = set(objects(store, "v2")["a"]) & set(objects(store, "v1")["a"])
    assert shared


def test_a_touched_file_is_read_once(source: Path, store: Path, contents: Any) -> None:
    touch(source / "a" / "1.npz")
    touch(source / "a" / "2.json")
    report = run_pack(source, store, "v2")
    assert counts(report) == ([], [], ["a", "b", "c"], 1)
    assert objects(store, "v2") == objects(store, "v1")
    assert run_pack(source, store, "v3").samples_read == 0


def test_each_file_of_a_changed_partition_is_read_once(
    source: Path, store: Path, contents: dict[str, Content]
) -> None:
    """Touched ones and changed ones, whichever comes first."""
    for i in range(4):
        touch(source / "a" / f"{i}.npz")
    contents["a/2"] = write_sample(source, "a/2", numbered(99), contents["a/2"].sidecar)
    report = run_pack(source, store, "v2")
    assert counts(report) == (["a"], [], ["b", "c"], 4)
    assert read_version(store, "v2") == contents
    assert objects(store, "v2") == fresh(source, store)


def test_progress_counts_each_sample_once(
    source: Path, store: Path, contents: dict[str, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        touch(source / "a" / f"{i}.npz")
    write_sample(source, "a/2", numbered(99))
    steps: list[tuple[int, int]] = []
    tree, target = NpzTree(str(source)), Store.open(str(store))
    task, context = task_of(tree, target, store, "a")
    with target.staging() as staging:
        build_partition(task, replace(context, staging=staging), lambda n, b: steps.append((n, b)))
    assert [n for n, _ in steps] == [1] * 5
    assert sum(b for _, b in steps) == sum(s.file.size for s in task.samples)


def test_only_what_a_sidecar_changed_is_written(
    source: Path, store: Path, contents: dict[str, Content], read: list[str]
) -> None:
    (source / "a" / "1.json").write_bytes(b'{"new": 1}')
    (source / "b" / "0.json").unlink()
    contents["a/1"] = replace(contents["a/1"], sidecar=b'{"new": 1}')
    contents["b/0"] = replace(contents["b/0"], sidecar=None)
    report = run_pack(source, store, "v2")
    assert counts(report) == ([], ["a", "b"], ["c"], 0)
    assert read == [f"{source}/a/1.json"]
    assert read_version(store, "v2") == contents
    one, two = objects(store, "v1"), objects(store, "v2")
    for name in "ab":
        assert one[name][1:] == two[name][1:]
        assert one[name][0] != two[name][0]


def test_a_text_array_that_changes_rewrites_no_shard(source: Path, store: Path) -> None:
    arrays = {"x": np.arange(3), "t": np.array("one")}
    write_sample(source, "p/1", arrays)
    run_pack(source, store)
    expected = write_sample(source, "p/1", arrays | {"t": np.array("two")})
    report = run_pack(source, store, "v2")
    assert counts(report) == ([], ["p"], [], 1)
    assert read_version(store, "v2") == {"p/1": expected}
    assert objects(store, "v1")["p"][1:] == objects(store, "v2")["p"][1:]
    assert objects(store, "v2") == fresh(source, store)


def test_additions_and_removals(source: Path, store: Path, contents: dict[str, Content]) -> None:
    contents |= write_numbered(source, {"d/1": 50, "a/x": 51})
    (source / "b" / "2.npz").unlink()
    (source / "b" / "2.json").unlink()
    del contents["b/2"]
    report = run_pack(source, store, "v2")
    assert counts(report) == (["a", "b", "d"], [], ["c"], 2)
    assert read_version(store, "v2") == contents
    assert set(read_version(store, "v1")) == set(KEYS)


def test_partitions_whose_source_is_gone_are_kept_unless_told(
    source: Path, store: Path, contents: dict[str, Content]
) -> None:
    shutil.rmtree(source / "b")
    report = run_pack(source, store, "v2")
    assert (report.kept, report.dropped) == (("b",), ())
    assert read_version(store, "v2") == contents
    assert partition_revision(store, "v2") == partition_revision(store, "v1")
    report = run_pack(source, store, "v3", sync=True)
    assert (report.kept, report.dropped, report.samples_read) == ((), ("b",), 0)
    assert set(read_version(store, "v3")) == {key for key in KEYS if not key.startswith("b/")}


def test_a_deleted_cache_changes_nothing_but_what_is_read(
    source: Path, store: Path, contents: dict[str, Content], cache: Path
) -> None:
    shutil.rmtree(cache)
    report = run_pack(source, store, "v2")
    assert counts(report) == ([], [], ["a", "b", "c"], 15)
    assert objects(store, "v2") == objects(store, "v1")
    contents["b/2"] = write_sample(source, "b/2", numbered(99), contents["b/2"].sidecar)
    report = run_pack(source, store, "v3")
    assert counts(report) == (["b"], [], ["a", "c"], 1)  # the cache is filled in again
    shutil.rmtree(cache)
    contents["b/2"] = write_sample(source, "b/2", numbered(98), contents["b/2"].sidecar)
    report = run_pack(source, store, "v4")
    assert counts(report) == (["b"], [], ["a", "c"], 15)
    assert read_version(store, "v4") == contents
    assert objects(store, "v4") == fresh(source, store)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"x" * 1000, None])
def test_a_damaged_cache_is_as_good_as_none(
    data: bytes | None, source: Path, store: Path, contents: dict[str, Content], cache: Path
) -> None:
    for path in cache.rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:-100] if data is None else data)
    write_sample(source, "a/1", numbered(1))
    assert run_pack(source, store, "v2", base=None).samples_read == 15
    assert run_pack(source, store, "v3").samples_read == 0


def test_without_a_base_what_was_built_is_still_known(
    source: Path, store: Path, contents: Any
) -> None:
    report = run_pack(source, store, "v2", base=None)
    assert counts(report) == ([], [], ["a", "b", "c"], 0)
    assert report.document.parent is None


def test_a_base_may_be_any_version(source: Path, store: Path, contents: dict[str, Content]) -> None:
    shutil.rmtree(source / "a")
    run_pack(source, store, "v2", sync=True)
    report = run_pack(source, store, "v3", base=TagRef("v1"))
    assert report.kept == ("a",)
    assert read_version(store, "v3") == contents
    assert Store.open(str(store)).latest() == "v3"
    table = Store.open(str(store)).resolve(TagRef("v2")).table.digest
    report = run_pack(source, store, "v4", base=parse_ref(f"sha256:{table[:12]}"))
    assert (report.kept, len(read_version(store, "v4"))) == ((), 10)
    with pytest.raises(VersionNotFoundError, match="v1"):
        run_pack(source, store, "v5", base=TagRef("v9"))
    assert tags(store) == ["v1", "v2", "v3", "v4"]


def test_the_same_tag_again(source: Path, store: Path, contents: Any) -> None:
    report = run_pack(source, store, "v1", base=None)
    assert not report.published
    assert run_pack(source, store, "v1", force=True).published is False
    write_sample(source, "a/1", numbered(99))
    with pytest.raises(VersionExistsError, match="'v1' exists with other content"):
        run_pack(source, store, "v1")
    assert run_pack(source, store, "v2").samples_read == 0  # what was built was not lost


def test_an_object_that_is_gone_is_built_again(
    source: Path, store: Path, contents: dict[str, Content]
) -> None:
    before = objects(store, "v1")
    opened = Store.open(str(store))
    for place in (0, 1):
        Path(opened.objects.path(Digest(before["a"][place]))).unlink()
        report = run_pack(source, store, f"again{place}")
        assert report.built == ("a",)
        assert read_version(store, "v1") == contents
        assert objects(store, f"again{place}") == before


def test_a_damaged_shard_is_not_copied_from(
    source: Path, store: Path, contents: dict[str, Content]
) -> None:
    """Its samples are read from the source again."""
    opened = Store.open(str(store))
    path = Path(opened.objects.path(Digest(objects(store, "v1")["a"][1])))
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(bytes(byte ^ 255 for byte in data))
    contents["a/2"] = write_sample(source, "a/2", numbered(99), contents["a/2"].sidecar)
    assert run_pack(source, store, "v2").samples_read == 5
    assert read_version(store, "v2") == contents


def test_another_zstd_release_copies_nothing_and_changes_no_revision(
    source: Path, store: Path, contents: dict[str, Content], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPRESSOR", "zstd 9.9.9")
    assert run_pack(source, store, "v2").samples_read == 0
    contents["a/2"] = write_sample(source, "a/2", numbered(99), contents["a/2"].sidecar)
    report = run_pack(source, store, "v3")
    assert counts(report) == (["a"], [], ["b", "c"], 5)
    assert read_version(store, "v3") == contents


@pytest.mark.parametrize(
    "options",
    [{"level": 19}, {"order_seed": 7}, {"shard_bytes": 700}],
    ids=["level", "seed", "size"],
)
def test_another_recipe_builds_anew(
    options: dict[str, int], source: Path, store: Path, contents: dict[str, Content]
) -> None:
    report = run_pack(source, store, "v2", replace_all=True, **options)
    assert counts(report) == (["a", "b", "c"], [], [], 15)
    assert read_version(store, "v2") == contents
    assert objects(store, "v2") == fresh(source, store, **options)
    assert run_pack(source, store, "v3").samples_read == 0  # the base's recipe goes on


@pytest.mark.parametrize("workers", [2, 3])
def test_objects_do_not_depend_on_workers_or_place(
    workers: int, source: Path, store: Path, contents: dict[str, Content], tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere" / "tree"
    moved.parent.mkdir()
    shutil.copytree(source, moved, copy_function=shutil.copyfile)
    for other in (source, moved):
        there = tmp_path / f"{other.name}{workers}"
        report = run_pack(other, there, workers=workers)
        assert report.built == ("a", "b", "c")
        assert objects(there, "v1") == objects(store, "v1")
        assert partition_revision(there, "v1") == partition_revision(store, "v1")
        assert read_version(there, "v1") == contents


def test_the_listings_order_does_not_matter(
    source: Path, store: Path, contents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    for key in sorted(KEYS, reverse=True):
        (other / key).parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".npz", ".json"):
            if (source / f"{key}{suffix}").exists():
                shutil.copyfile(source / f"{key}{suffix}", other / f"{key}{suffix}")
    run_pack(other, tmp_path / "store2")
    assert objects(tmp_path / "store2", "v1") == objects(store, "v1")
