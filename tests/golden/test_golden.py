"""The checked-in store of format 1: read for ever, never made again.

`expected.json` was written by numpy from the source tree, before any code of ours had seen it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsmount.formats import document, keyset, manifest, revision, sample, table
from fsmount.model import Digest, DirectoryRule, LatestRef, TableRef, TagRef, Version
from fsmount.pack.shards import verify_shard
from fsmount.paths import manifest_path
from fsmount.store import Store

HERE = Path(__file__).parent
STORE = HERE / "format1"
READER = HERE.parent.parent / "docs" / "read_store.py"
EXPECTED: dict[str, dict[str, Any]] = json.loads((HERE / "expected.json").read_text())
TAGS = sorted(EXPECTED)


@pytest.fixture
def store() -> Store:
    return Store.open(str(STORE))


def _manifests(store: Store, version: Version) -> list[manifest.Manifest]:
    return [manifest.decode(store.objects.read(part.manifest)) for part in version.partitions]


@pytest.mark.parametrize("tag", TAGS)
def test_every_sample_is_what_numpy_saw(store: Store, tag: str) -> None:
    version = store.version(TagRef(tag))
    found = {}
    for part, listed in zip(version.partitions, _manifests(store, version), strict=True):
        shards = [store.objects.read(shard) for shard in part.shards]
        for row in listed.rows():
            payload = shards[row.shard][row.offset : row.offset + row.size]
            assert sample.checksum(payload) == row.checksum
            arrays = sample.decode(sample.decompress(payload, row.raw_size))
            texts = {
                t.name: np.array(t.value.encode() if "S" in t.descr else t.value, t.descr)
                for t in row.texts
            }
            found[row.key] = {
                "arrays": {
                    name: {
                        "descr": array.dtype.str,
                        "shape": list(array.shape),
                        "fortran": bool(array.flags.fnc),
                        "bytes": array.tobytes().hex(),
                    }
                    for name, array in {**arrays, **texts}.items()
                },
                "sidecar": None if row.sidecar is None else row.sidecar.hex(),
            }
    assert found == EXPECTED[tag]


@pytest.mark.parametrize("tag", TAGS)
def test_shards_are_the_tars_their_manifests_describe(store: Store, tag: str) -> None:
    version = store.version(TagRef(tag))
    for part, listed in zip(version.partitions, _manifests(store, version), strict=True):
        listed.meta.check_belongs(part)
        for place, shard in enumerate(part.shards):
            rows = [row for row in listed.rows() if row.shard == place]
            verify_shard(store.objects.path(shard.digest), rows)


@pytest.mark.parametrize("tag", TAGS)
def test_revisions_are_those_of_the_content(store: Store, tag: str) -> None:
    version = store.version(TagRef(tag))
    for part, listed in zip(version.partitions, _manifests(store, version), strict=True):
        rows = listed.rows()
        data = revision.data_revision(
            version.document.recipe, [(row.key, row.sha256) for row in rows]
        )
        metadata = [
            (row.key, revision.metadata_bytes(row.texts_json(), row.sidecar)) for row in rows
        ]
        assert part.data_revision == data
        assert part.metadata_revision == revision.metadata_revision(data, metadata)
    assert version.document.content_revision == revision.content_revision(version.partitions)


@pytest.mark.parametrize("tag", TAGS)
def test_documents_encode_to_the_same_bytes(tag: str) -> None:
    data = (STORE / "versions" / f"{tag}.json").read_bytes()
    assert document.encode(document.decode(data)) == data


def test_columns_have_the_types_of_the_version(store: Store) -> None:
    version = store.version(TagRef("v1"))
    manifests = {m.meta.partition: m for m in _manifests(store, version)}
    schemas = [m.table.schema.remove_metadata() for m in manifests.values()]
    assert all(schema == schemas[0] for schema in schemas)
    types = {field.name: str(field.type) for field in schemas[0]}
    shown = {
        name: types[name] for name in ("label", "ratio", "score", "u64", "tags", "box", "nested")
    }
    assert shown == {
        "label": "int64",
        "ratio": "double",
        "score": "string",
        "u64": "uint64",
        "tags": "list<element: string>",
        "box": "struct<d: null, h: int64, w: int64>",
        "nested": "list<element: list<element: struct<a: list<element: double>>>>",
    }
    for name, column, value in (
        ("names/ü\n%2E", "huge", "18446744073709551616"),
        ("_val/label=3/one", "tiny", "1e-400"),
        ("_val/label=3/one", "ratio", 2.0),
        ("_val/two", "tiny", "0.0"),
        ("top", "score", "2.5"),
    ):
        listed = manifests[DirectoryRule().partition_of(name)]
        assert listed.meta.json_columns == ("empty", "huge", "mixed", "score", "text", "tiny")
        rows = {row["__key__"]: row for row in listed.table.select(["__key__", column]).to_pylist()}
        assert rows[name][column] == value


def test_partitions_are_shown_where_readers_find_them(store: Store) -> None:
    version = store.version(TagRef("v1"))
    assert [manifest_path(part.id) for part in version.partitions] == [
        "manifests/%5Fval.parquet", "manifests/%5Fval/label%3D3.parquet",
        "manifests/dtypes.parquet", "manifests/names.parquet", "manifests/root_.parquet",
    ]  # fmt: skip


def test_versions_are_found_by_every_reference(store: Store) -> None:
    assert [found.tag for found in store.versions()] == ["v1", "v2"]
    latest = store.version(LatestRef())
    assert latest.document.tag == "v2"
    by_table = store.version(TableRef(latest.document.table.digest[:8]))
    assert by_table.partitions == latest.partitions
    assert by_table.document.tag is None
    assert (
        table.document_of_table(
            latest.document.table, table.decode(store.objects.read(latest.document.table))
        )
        == by_table.document
    )


def test_key_set_names_its_keys(store: Store) -> None:
    found = store.keysets(Digest(store.resolve(LatestRef()).table.digest))
    assert list(found) == ["few"]
    keys = keyset.decode_keys(store.objects.read(found["few"].keys))
    assert keys == ("names/-rf", "names/a b.c.d", "top")
    path = next((STORE / "keysets").rglob("few.json"))
    assert keyset.encode_pointer(found["few"]) == path.read_bytes()


@pytest.mark.parametrize("tag", TAGS)
def test_the_documented_reader_reads_it(tag: str) -> None:
    """docs/read_store.py, which knows nothing of fsmount, sees every sample."""
    result = subprocess.run(
        [sys.executable, "-I", READER, STORE, tag],
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    lines = [line.split(" ", 1)[1] for line in result.stdout.splitlines()]
    keys = {json.JSONDecoder().raw_decode(line)[0] for line in lines}
    assert keys == EXPECTED[tag].keys()


COUNTS_THREADS = """
import os, pathlib, runpy, sys
import pyarrow.parquet
before = len(os.listdir("/proc/self/task"))
main = runpy.run_path(sys.argv[1], run_name="reader")["main"]
main(pathlib.Path(sys.argv[2]), sys.argv[3])
print(len(os.listdir("/proc/self/task")) - before, file=sys.stderr)
"""


def test_the_documented_reader_leaves_no_thread_behind() -> None:
    """One that still starts while the process ends can abort it."""
    result = subprocess.run(
        [sys.executable, "-I", "-c", COUNTS_THREADS, READER, STORE, "v1"],
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stderr.strip() == "0"
