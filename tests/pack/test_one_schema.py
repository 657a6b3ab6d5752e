"""All manifests of a version have one schema, so a plain glob over them is right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from npz_tree import numbered, objects, partitions, read_version, run_pack, write_sample

from fsmount.errors import FormatError
from fsmount.formats import manifest
from fsmount.model import Partition
from fsmount.pack.conform import conform
from fsmount.store import Store
from fsmount.store.inside import store_path

# Values of one field in two partitions, and what all readers find in its column.
CASES: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
    "integer and double": ([1, 2], [0.5, 2.75], [1.0, 2.0, 0.5, 2.75]),
    "only later": ([None, None], ["x", None], [None, None, "x", None]),
    "only earlier": ([7, None], [None, None], [7, None, None, None]),
    "signed and unsigned": ([1, 2], [2**64 - 1, 0], [1, 2, 2**64 - 1, 0]),
    "negative and unsigned": ([-1, 2], [2**64 - 1, 0], ["-1", "2", str(2**64 - 1), "0"]),
    "beyond a double": ([2**53 + 1, 1], [0.5, 1.5], [str(2**53 + 1), "1", "0.5", "1.5"]),
    "text and number": (["a", "1"], [1, 2.5], ['"a"', '"1"', "1", "2.5"]),
    "parts of structs": (
        [{"a": 1}, {"a": 2}],
        [{"b": "x", "a": 0.5}, None],
        [{"a": 1.0, "b": None}, {"a": 2.0, "b": None}, {"a": 0.5, "b": "x"}, None],
    ),
    "lists": ([[], [1]], [[0.5], None], [[], [1.0], [0.5], None]),
    "ids as names": (
        [{str(n): 1 for n in range(200)}, {}],
        [{str(n): 1 for n in range(100, 300)}, None],
        [
            json.dumps({str(n): 1 for n in range(200)}, separators=(",", ":")), "{}",
            json.dumps({str(n): 1 for n in range(100, 300)}, separators=(",", ":")), None,
        ],
    ),
}  # fmt: skip


def write(source: Path, partition: str, sidecars: list[dict[str, Any] | None]) -> None:
    for number, sidecar in enumerate(sidecars):
        data = None if sidecar is None else json.dumps(sidecar).encode()
        write_sample(source, f"{partition}/{number}", numbered(number), data)


def lay_out(store: Path, tag: str, folder: Path) -> str:
    """The manifests of a version as a mount has them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, part in partitions(store, tag).items():
        data = Store.open(str(store)).objects.read(part.manifest)
        (folder / f"{name}.parquet").write_bytes(data)
    return str(folder)


def schemas(store: Path, tag: str) -> set[str]:
    opened = Store.open(str(store))
    found = (
        manifest.decode(opened.objects.read(p.manifest)) for p in partitions(store, tag).values()
    )
    return {f"{each.table.schema.remove_metadata()} {each.meta.json_columns}" for each in found}


def digests(store: Path, tag: str) -> dict[str, str]:
    return {name: found[0] for name, found in objects(store, tag).items()}


def test_plain_globs_give_the_right_values(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    for place, partition in enumerate("ab"):
        sidecars = [{name: case[place][row] for name, case in CASES.items()} for row in range(2)]
        write(source, partition, sidecars)
    run_pack(source, store)
    assert len(schemas(store, "v1")) == 1
    folder = lay_out(store, "v1", tmp_path / "manifests")
    with duckdb.connect() as connection:
        query = "SELECT * FROM read_parquet(?) ORDER BY __key__"
        found = connection.execute(query, [f"{folder}/*.parquet"])
        names = [column[0] for column in found.description]
        theirs = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    for table in (
        ds.dataset(folder).to_table().sort_by("__key__"),
        pq.read_table(folder, use_threads=False).sort_by("__key__"),
    ):
        assert table.to_pylist() == theirs
    assert [row["__key__"] for row in theirs] == ["a/0", "a/1", "b/0", "b/1"]
    for name, (_, _, expected) in CASES.items():
        assert [row[name] for row in theirs] == expected, name


def test_a_versions_manifests_follow_from_its_content_alone(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    write(source, "a", [{"score": 1}, None])
    write(source, "b", [{"score": 2, "old": {"x": 1}}])
    run_pack(source, store, "v1")
    write(source, "c", [{"score": 0.5, "new": "x"}])
    write(source, "b", [{"score": 2}])
    run_pack(source, store, "v2")
    for name, workers in (("fresh", 1), ("again", 2)):
        run_pack(source, tmp_path / name, "v2", workers=workers)
        assert digests(tmp_path / name, "v2") == digests(store, "v2")


def test_only_a_change_of_the_schema_writes_other_manifests(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    for number, name in enumerate("abc"):
        write(source, name, [{"n": number}, {"n": number + 1}])
    run_pack(source, store, "v1")
    write(source, "c", [{"n": 7}, {"n": 9}])
    run_pack(source, store, "v2")
    one, two = objects(store, "v1"), objects(store, "v2")
    assert {name for name in one if one[name] != two[name]} == {"c"}
    write(source, "c", [{"n": 7}, {"n": 9.5}])
    report = run_pack(source, store, "v3")
    assert (report.reused, report.refreshed) == (("a", "b"), ("c",))
    three = objects(store, "v3")
    for name in "ab":
        assert one[name][0] != three[name][0]  # the manifest
        assert one[name][1:] == three[name][1:]  # the shards
        before, after = partitions(store, "v1")[name], partitions(store, "v3")[name]
        assert before.data_revision == after.data_revision
        assert before.metadata_revision == after.metadata_revision
    assert len(schemas(store, "v3")) == 1
    for _ in range(2):  # what was rewritten is remembered
        report = run_pack(source, store, "v4")
        assert (report.samples_read, digests(store, "v4")) == (0, digests(store, "v3"))
    shutil.rmtree(source / "c")
    run_pack(source, store, "v5", sync=True)
    assert digests(store, "v5") == {name: one[name][0] for name in "ab"}


def test_partitions_that_are_kept_get_the_schema_too(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    write(source, "a", [{"n": 1}])
    run_pack(source, store, "v1", source_namespace="s")
    write(tmp_path / "other", "b", [{"n": "x"}])
    report = run_pack(tmp_path / "other", store, "v2", source_namespace="s")
    assert report.kept == ("a",)
    assert len(schemas(store, "v2")) == 1
    assert len(read_version(store, "v2")) == 2
    data = Store.open(str(store)).objects.read(partitions(store, "v2")["a"].manifest)
    assert manifest.decode(data).table.column("n").to_pylist() == ["1"]


def test_too_many_fields_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    write(source, "a", [{"label": n, **{f"{n}-{k}": k for k in range(400)}} for n in range(3)])
    write(source, "b", [{"label": 1, "other": 2}])
    run_pack(source, store)
    assert "too many fields: 2 common ones are columns" in caplog.text
    listed = manifest.decode(
        Store.open(str(store)).objects.read(partitions(store, "v1")["b"].manifest)
    )
    (row,) = listed.table.to_pylist()
    assert {name: row[name] for name in list(row)[11:]} == {"label": 1, "other": "2"}


def test_a_table_that_lies_about_fields_is_found_out(tmp_path: Path) -> None:
    """The values would be cast to what the table says."""
    source = tmp_path / "source"
    write(source, "a", [{"n": 0.5}])
    run_pack(source, tmp_path / "store")
    store = Store.open(str(tmp_path / "store"))
    (part,) = partitions(tmp_path / "store", "v1").values()
    fields = part.fields.replace("double", "uint53")
    lying = Partition(
        part.id, part.data_revision, part.metadata_revision, part.samples, part.raw_bytes,
        part.manifest, part.shards, "", fields, part.schema,
    )  # fmt: skip
    with pytest.raises(FormatError, match="partition 'a': its fields are others"):
        conform((lying,), store.objects, Forgetful(), store_path(str(tmp_path)), lambda _: None)


class Forgetful:
    """Remembers nothing."""

    def samples(self, _: Partition) -> dict[str, Any]:
        return {}


def test_a_pack_that_died_after_building_is_completed(tmp_path: Path) -> None:
    """What it has built is remembered with the schema that it had then."""
    source, store = tmp_path / "source", tmp_path / "store"
    write(source, "a", [{"n": 1}])
    write(source, "b", [{"n": 0.5}])
    (source / "c").mkdir()
    (source / "c" / "broken.npz").write_bytes(b"no archive")
    with pytest.raises(Exception, match=r"broken\.npz"):
        run_pack(source, store)
    (source / "c" / "broken.npz").unlink()
    report = run_pack(source, store)
    assert (report.samples_read, report.reused) == (0, ("a", "b"))
    assert len(schemas(store, "v1")) == 1
