"""Which samples there are, what they are called, and which partition they belong to."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import webdataset
from npz_tree import (
    check_nothing_published,
    numbered,
    partitions,
    read_version,
    run_pack,
    tags,
    write_numbered,
    write_sample,
)

from fsmount.errors import (
    InvalidNameError,
    NotAStoreError,
    PackError,
    PartitionError,
    RuleMismatchError,
    SourceError,
)
from fsmount.formats.shard import member_name
from fsmount.model import DepthRule, DirectoryRule, RegexRule, Rule
from fsmount.store import Store

KEYS = ["top", "a/1", "a/2", "a/b/1", "a/b/c/1", "d/1"]


@pytest.mark.parametrize(
    ("rule", "ids"),
    [
        (DirectoryRule(), {"root_", "a", "a/b", "a/b/c", "d"}),
        (DepthRule(1), {"root_", "a", "d"}),
        (DepthRule(2), {"root_", "a", "a/b", "d"}),
        (RegexRule("[0-9]|top"), {"1", "2", "top"}),
        (RegexRule("^(?:.*/)?(.)"), {"1", "2", "t"}),
        (RegexRule("(?P<partition>t)op|(?P<x>.)/"), None),
    ],
)
def test_rules(rule: Rule, ids: set[str] | None, tmp_path: Path) -> None:
    write_numbered(tmp_path / "source", {key: i for i, key in enumerate(KEYS)})
    if ids is None:
        with pytest.raises(PartitionError, match="leaves out 5 of 6 samples, such as 'a/1', 'a/2'"):
            run_pack(tmp_path / "source", tmp_path / "store", rule=rule)
        return
    run_pack(tmp_path / "source", tmp_path / "store", rule=rule)
    assert set(partitions(tmp_path / "store", "v1")) == ids
    assert set(read_version(tmp_path / "store", "v1")) == set(KEYS)


@pytest.mark.parametrize(
    ("rule", "keys"),
    [
        (None, ["a/1", "a/000000.tar/1"]),
        (None, ["a/1", "a/1234567.tar/b/1"]),
        (None, ["a/1", "a.parquet/b/1"]),
        (None, ["a/b/1", "a/b.parquet/c/1"]),
        (None, ["1", "root_/1"]),
        (None, ["root_/1"]),
        (None, ["root_/a/1"]),
        (DepthRule(1), ["1", "root_/a/1"]),
        (RegexRule("^(..)"), ["a/1"]),
        (RegexRule("[.]+"), ["a/..b/1"]),
        (None, ["x" * 248 + "/1"]),
    ],
)
def test_ids_that_clash_or_are_no_path_are_refused(
    rule: Rule | None, keys: list[str], tmp_path: Path
) -> None:
    write_numbered(tmp_path / "source", {key: i for i, key in enumerate(keys)})
    with pytest.raises(PartitionError):
        run_pack(tmp_path / "source", tmp_path / "store", rule=rule)
    check_nothing_published(tmp_path / "store")


@pytest.mark.parametrize("name", ["00000.tar", "x000000.tar", "000000.tar.x", "a.parquets"])
def test_ids_that_only_look_like_files_of_ours_are_fine(name: str, tmp_path: Path) -> None:
    write_numbered(tmp_path / "source", {"a/1": 1, f"a/{name}/1": 2, f"{name}/1": 3})
    run_pack(tmp_path / "source", tmp_path / "store")
    assert len(partitions(tmp_path / "store", "v1")) == 3


def test_a_new_partition_may_not_clash_with_one_that_is_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_numbered(source, {"a/1": 1})
    run_pack(source, tmp_path / "store")
    (source / "a" / "1.npz").rename(source / "1.npz")
    (source / "1.npz").rename(tmp_path / "1.npz")
    write_numbered(source, {"a/000000.tar/1": 2})
    with pytest.raises(PartitionError, match="clash"):
        run_pack(source, tmp_path / "store", "v2")
    assert run_pack(source, tmp_path / "store", "v2", sync=True).dropped == ("a",)


def test_another_rule_or_namespace_is_refused_with_both_remedies(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    write_numbered(source, {"a/1": 1, "a/b/2": 2})
    run_pack(source, store)
    changes = [
        {"rule": DepthRule(1)},
        {"source_namespace": "other"},
        {"level": 5},
        {"shard_bytes": 1000},
        {"order_seed": 1},
    ]
    for options in changes:
        with pytest.raises(RuleMismatchError) as caught:
            run_pack(source, store, "v2", **options)
        text = str(caught.value)
        assert (
            f"If this is the same source at another place, pass --source-namespace '{source}'"
            in text
        )
        assert "if the new version is to hold this source alone" in text
        assert "--replace-all" in text
        assert "'v1'" in text
        assert tags(store) == ["v1"]
    for i, options in enumerate(changes):
        run_pack(source, store, f"r{i}", base=None, replace_all=True, **options)
        assert len(read_version(store, f"r{i}")) == 2
    assert set(partitions(store, "r0")) == {"a"}


def test_a_source_that_moved_keeps_its_namespace(tmp_path: Path) -> None:
    source, moved, store = tmp_path / "source", tmp_path / "moved", tmp_path / "store"
    expected = write_numbered(source, {"a/1": 1, "b/2": 2})
    run_pack(source, store)
    source.rename(moved)
    with pytest.raises(RuleMismatchError, match=f"source namespace '{source}', not '{moved}'"):
        run_pack(moved, store, "v2")
    report = run_pack(moved, store, "v2", source_namespace=str(source))
    assert (report.samples_read, len(report.reused)) == (0, 2)
    assert read_version(store, "v2") == expected


def test_replace_all_holds_the_source_alone(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_numbered(tmp_path / "one", {"a/1": 1, "b/1": 2})
    expected = write_numbered(tmp_path / "two", {"b/1": 3, "c/1": 4})
    run_pack(tmp_path / "one", store)
    report = run_pack(tmp_path / "two", store, "v2", replace_all=True)
    assert read_version(store, "v2") == expected
    assert report.dropped == ("a",)
    assert report.document.source_namespace == str(tmp_path / "two")
    assert len(read_version(store, "v1")) == 2


ODD_NAMES = [
    *(" ", " x ", "a b", "-rf", "--tag", "%", "%41", "100%", "a.b.c", ".hidden", "...", "..x"),
    *("é", "日本語", "e\u0301", "\U0001f600", "new\nline", "tab\t", "\x01\x7f", "back\\slash"),
    *("'quote\"", "$HOME", "*?[x]", "~", "x" * 250, "日" * 83, "__meta__", "a.npz", "x.json"),
]


def test_odd_names(tmp_path: Path) -> None:
    """As samples, as directories, and as WebDataset reads the shards."""
    source, store = tmp_path / "source", tmp_path / "store"
    keys = ODD_NAMES + [f"{name[:60]}/x" for name in ODD_NAMES]
    expected = write_numbered(source, {key: i for i, key in enumerate(keys)})
    assert len(expected) == len(keys)
    run_pack(source, store)
    assert read_version(store, "v1") == expected
    opened = Store.open(str(store))
    streams = [
        {"url": part.id, "stream": io.BytesIO(opened.objects.read(shard))}
        for part in partitions(store, "v1").values()
        for shard in part.shards
    ]
    expand, group = webdataset.tariterators.tar_file_expander, webdataset.tariterators.group_by_keys
    seen = sorted(item["__key__"] for item in group(expand(iter(streams))))
    assert seen == sorted(member_name(key).removesuffix(".safetensors.zst") for key in keys)


def test_names_that_are_not_utf8_are_refused_by_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_numbered(source, {"a/1": 1})
    data = (source / "a" / "1.npz").read_bytes()
    Path(os.fsdecode(os.fsencode(source) + b"/a/\xff.npz")).write_bytes(data)
    with pytest.raises(SourceError, match=r"not UTF-8: 'a/\\udcff'"):
        run_pack(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_other_files_may_have_any_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_numbered(source, {"a/1": 1})
    Path(os.fsdecode(os.fsencode(source) + b"/a/\xff.txt")).touch()
    assert run_pack(source, tmp_path / "store").ignored_files == 1


@pytest.mark.parametrize("what", ["source", "message", "namespace"])
def test_what_goes_into_the_document_must_be_utf8(what: str, tmp_path: Path) -> None:
    source = tmp_path / ("s\udcff" if what == "source" else "source")
    write_numbered(source, {"a/1": 1})
    odd = {"message": {"message": "\udcff"}, "namespace": {"source_namespace": "\udcff"}}
    with pytest.raises(InvalidNameError, match="not UTF-8"):
        run_pack(source, tmp_path / "store", **odd.get(what, {}))
    assert not (tmp_path / "store").exists()
    run_pack(source, tmp_path / "store", source_namespace="good", message="é")


def test_links_are_followed(tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    write_numbered(other, {"1": 1, "sub/2": 2})
    write_numbered(source, {"a/1": 3})
    (source / "linked").symlink_to(other)
    (source / "a" / "2.npz").symlink_to(other / "1.npz")
    (source / "a" / "2.json").symlink_to(other / "sub" / "2.json")
    run_pack(source, tmp_path / "store")
    found = read_version(tmp_path / "store", "v1")
    assert set(found) == {"a/1", "a/2", "linked/1", "linked/sub/2"}
    assert found["a/2"].arrays == found["linked/1"].arrays
    assert found["a/2"].sidecar == found["linked/sub/2"].sidecar == b'{"number": 2}\n'


def broken_link(source: Path) -> Path:
    (source / "x.npz").symlink_to("nowhere")
    return source / "x.npz"


def broken_sidecar(source: Path) -> Path:
    (source / "1.json").symlink_to("nowhere")
    return source / "1.json"


def loop(source: Path) -> Path:
    (source / "x.npz").symlink_to("x.npz")
    return source / "x.npz"


def directory_loop(source: Path) -> Path:
    (source / "sub").mkdir()
    (source / "sub" / "up").symlink_to(source)
    return source / "sub" / "up"


def fifo(source: Path) -> Path:
    os.mkfifo(source / "x.npz")
    return source / "x.npz"


def fifo_sidecar(source: Path) -> Path:
    os.mkfifo(source / "1.json")
    return source / "1.json"


def device(source: Path) -> Path:
    (source / "x.npz").symlink_to("/dev/zero")
    return source / "x.npz"


@pytest.mark.parametrize(
    "make", [broken_link, broken_sidecar, loop, directory_loop, fifo, fifo_sidecar, device]
)
def test_what_is_no_file_is_refused_by_name(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_numbered(source, {"1": 1})
    path = make(source)
    with pytest.raises(SourceError) as caught:
        run_pack(source, tmp_path / "store")
    assert str(caught.value).startswith(f"{path}")
    assert not (tmp_path / "store").exists()


def test_what_could_be_no_sample_may_be_anything(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_numbered(source, {"1": 1})
    os.mkfifo(source / "fifo")
    (source / "broken").symlink_to("nowhere")
    (source / "empty").mkdir()
    (source / "d.npz").mkdir()
    write_sample(source, "d.npz/x", numbered(2))
    assert run_pack(source, tmp_path / "store").document.totals.samples == 2


@pytest.mark.parametrize("make", [lambda p: None, Path.mkdir, Path.touch])
def test_a_source_without_samples_is_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "source")
    with pytest.raises(SourceError, match=r"not a directory|no \.npz file"):
        run_pack(tmp_path / "source", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_store_inside_the_source_is_no_part_of_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    expected = write_numbered(source, {"a/1": 1})
    store = source / "a" / "store"
    run_pack(source, store)
    (store / "cache" / "x.npz").write_bytes(b"nothing to read")
    report = run_pack(source, store, "v2")
    assert (report.samples_read, report.ignored_files) == (0, 0)
    assert read_version(store, "v2") == expected
    link = tmp_path / "link"
    link.symlink_to(store)
    assert run_pack(source, link, "v3").samples_read == 0


def test_a_source_is_no_store(tmp_path: Path) -> None:
    write_numbered(tmp_path, {"a/1": 1})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(NotAStoreError):
        run_pack(tmp_path, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unreadable_directory_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Root reads everything, so the kernel is asked for a path that is too long instead."""
    source = tmp_path / "source"
    write_numbered(source, {"a/1": 1})
    (source / "b").symlink_to("x" * 300)
    with pytest.raises(SourceError, match=f"{source}/b: File name too long"):
        run_pack(source, tmp_path / "store")


def test_fewer_than_one_worker_is_refused(tmp_path: Path) -> None:
    for workers in (0, -1):
        with pytest.raises(PackError, match="at least 1"):
            run_pack(tmp_path, tmp_path / "store", workers=workers)


def test_plain_tar_unpacks_every_name(tmp_path: Path) -> None:
    """Also those that are too long once they are a member's."""
    source, store = tmp_path / "source", tmp_path / "store"
    keys = [*ODD_NAMES, "y" * 250, "." * 100]
    write_numbered(source, {key: i for i, key in enumerate(keys)})
    run_pack(source, store)
    (shard,) = partitions(store, "v1")["root_"].shards
    (tmp_path / "out").mkdir()
    path = Store.open(str(store)).objects.path(shard.digest)
    subprocess.run(["tar", "-xf", path, "-C", str(tmp_path / "out")], check=True)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(map(member_name, keys))
