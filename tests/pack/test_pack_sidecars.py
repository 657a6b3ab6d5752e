"""Sidecars: verbatim in the manifest, typed for queries, refused by name where they are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import numpy as np
import pytest
from npz_tree import (
    check_nothing_published,
    numbered,
    partitions,
    read_version,
    run_pack,
    write_numbered,
    write_sample,
)

from fsmount.errors import SidecarError, SourceError
from fsmount.formats import manifest
from fsmount.formats.manifest import Manifest
from fsmount.pack.npz import _RESERVED
from fsmount.store import Store

ODD = {
    "integers": b'{"big": 9223372036854775807, "bigger": 18446744073709551615, "i": -1}',
    "spaces": b' \r\n{ "i" :\t1 , "s" : "x" }\n\n',
    "null": b'{"i": null, "s": null}',
    "missing": b"{}",
    "nested": b'{"o": {"a": [1, {"b": null}], "c": "d"}, "l": [[1], []]}',
    "unicode": '{"s": "é\U0001f600 \\u00e9\\ud83d\\ude00", "日本": true, "": 1, "a.b": 2}'.encode(),
    "mixed": b'{"m": 1}',
    "mixed too": b'{"m": "1", "huge": 123456789012345678901234567890, "e": {}}',
    "floats": b'{"f": -0.0, "g": 1e300, "h": 0.1}',
}


def manifest_of(store: Path, tag: str = "v1", partition: str = "p") -> Manifest:
    part = partitions(store, tag)[partition]
    return manifest.decode(Store.open(str(store)).objects.read(part.manifest))


def test_sidecars_are_kept_verbatim_and_typed(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    for i, (key, data) in enumerate(ODD.items()):
        write_sample(source, f"p/{key}", numbered(i), data)
    write_sample(source, "p/none", numbered(99))
    report = run_pack(source, store)
    assert report.ignored_files == 0
    found = read_version(store, "v1")
    assert {key: found[f"p/{key}"].sidecar for key in ODD} == ODD
    assert found["p/none"].sidecar is None
    table = manifest_of(store).table
    assert list(table.column_names[11:]) == sorted({n for d in ODD.values() for n in json.loads(d)})
    rows = {row["__key__"][2:]: row for row in table.to_pylist()}
    assert rows["integers"]["big"] == (1 << 63) - 1
    assert rows["integers"]["bigger"] == (1 << 64) - 1
    assert [rows[k]["i"] for k in ("integers", "spaces", "null", "none")] == [-1, 1, None, None]
    assert rows["nested"]["o"] == {"a": [1, {"b": None}], "c": "d"} or isinstance(
        rows["nested"]["o"], str
    )
    assert rows["unicode"]["s"] == "é\U0001f600 é\U0001f600"
    assert (rows["unicode"]["日本"], rows["unicode"][""], rows["unicode"]["a.b"]) == (True, 1, 2)
    assert (rows["mixed"]["m"], rows["mixed too"]["m"]) == ("1", '"1"')
    assert rows["mixed too"]["huge"] == "123456789012345678901234567890"
    assert str(rows["floats"]["f"]) == "-0.0"
    assert set(manifest_of(store).meta.json_columns) == {"m", "huge", "e", "o"}


def test_duckdb_reads_the_columns(tmp_path: Path) -> None:
    for i in range(4):
        write_sample(tmp_path / "s", f"p/{i}", numbered(i), b'{"i": %d, "o": {"x": [%d]}}' % (i, i))
    run_pack(tmp_path / "s", tmp_path / "store")
    part = partitions(tmp_path / "store", "v1")["p"]
    path = Store.open(str(tmp_path / "store")).objects.path(part.manifest.digest)
    query = 'SELECT __key__ FROM read_parquet(?) WHERE i > 1 AND "o".x[1] < 3'
    assert duckdb.execute(query, [path]).fetchall() == [("p/2",)]


WRONG = {
    "empty": b"",
    "list": b"[1]",
    "text": b"hello",
    "trailing": b"{} {}",
    "nan": b'{"a": NaN}',
    "twice": b'{"a": 1, "a": 2}',
    "latin": b'{"a": "\xe9"}',
    "utf-16": "{}".encode("utf-16"),
    "bom": b"\xef\xbb\xbf{}",
    "deep": b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
    "own column": b'{"__key__": "x"}',
}


@pytest.mark.parametrize(("name", "workers"), [*((name, 1) for name in WRONG), ("empty", 2)])
def test_a_wrong_sidecar_is_an_error_that_names_it(name: str, workers: int, tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    write_numbered(source, {f"{p}/{i}": i for p in "ab" for i in range(3)})
    (source / "b" / "1.json").write_bytes(WRONG[name])
    with pytest.raises(SidecarError) as caught:
        run_pack(source, store, workers=workers)
    assert str(caught.value).startswith(f"{source}/b/1.json: ")
    assert "\n" not in str(caught.value)
    check_nothing_published(store)


def test_json_files_that_are_no_sidecars_are_ignored_and_counted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_numbered(source, {"p/1": 1, "p/2": 2})
    for name in ("p/other.json", "args.json", "p/2.json.bak", "p/readme.txt", ".npz", "p/.npz"):
        (source / name).write_bytes(b"no JSON")
    report = run_pack(source, tmp_path / "store")
    assert report.ignored_files == 6
    assert set(read_version(tmp_path / "store", "v1")) == {"p/1", "p/2"}


def test_required_sidecars_are_required_before_anything_is_built(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    write_numbered(source, {f"p/{i}": i for i in range(10)})
    (source / "p" / "0.npz").write_bytes(b"never read")
    message = r"5 of 10 samples have no sidecar, such as 'p/1', 'p/3', 'p/5' and 2 more"
    with pytest.raises(SourceError, match=message):
        run_pack(source, store, require_sidecars=True)
    assert not store.exists()
    for i in range(10):
        write_sample(source, f"p/{i}", numbered(i), b"{}")
    assert run_pack(source, store, require_sidecars=True).samples_read == 10


def test_a_text_array_becomes_a_column(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    write_sample(source, "p/1", {"x": np.zeros(1), "t": np.array("é")}, b'{"s": 1}')
    write_sample(source, "p/2", {"x": np.zeros(1), "s": np.array("two")}, b"{}")
    run_pack(source, store)
    rows = {row["__key__"]: row for row in manifest_of(store).table.to_pylist()}
    assert (rows["p/1"]["t"], rows["p/2"]["t"]) == ("é", None)
    assert (rows["p/1"]["s"], rows["p/2"]["s"]) == ("1", '"two"')  # JSON texts: the types differ
    assert read_version(store, "v1")["p/2"].texts[0].value == "two"


def test_a_changed_sidecar_beside_mixed_text_arrays_keeps_them(tmp_path: Path) -> None:
    """A refresh reads text arrays from the old manifest, where their column is JSON text."""
    source, store = tmp_path / "source", tmp_path / "store"
    contents = {
        "p/1": write_sample(source, "p/1", {"x": np.zeros(1)}, b'{"s": 1}'),
        "p/2": write_sample(source, "p/2", {"x": np.zeros(1), "s": np.array("two")}),
    }
    run_pack(source, store)
    contents["p/1"] = write_sample(source, "p/1", {"x": np.zeros(1)}, b'{"s": 2}')
    report = run_pack(source, store, "v2")
    assert report.refreshed == ("p",)
    assert read_version(store, "v2") == contents


@pytest.mark.parametrize("name", sorted(manifest.OWN_COLUMNS))
def test_a_text_array_may_not_have_the_name_of_our_columns(name: str, tmp_path: Path) -> None:
    write_sample(tmp_path / "source", "p/1", {name: np.array("x")})
    with pytest.raises(SourceError, match=rf"p/1\.npz.*'{name}'"):
        run_pack(tmp_path / "source", tmp_path / "store")


def test_a_field_and_a_text_array_of_one_name_are_refused(tmp_path: Path) -> None:
    source, store = tmp_path / "source", tmp_path / "store"
    write_sample(source, "p/1", {"s": np.array("x")}, b'{"s": "x"}')
    with pytest.raises(SidecarError, match=r"p/1\.npz: field 's' is in the sidecar and a text"):
        run_pack(source, store)
    check_nothing_published(store)


def test_tensors_may_be_called_like_fields_and_columns(tmp_path: Path) -> None:
    names = [name for name in manifest.OWN_COLUMNS if name not in _RESERVED]
    expected = write_sample(
        tmp_path / "source", "p/1", {n: np.zeros(1) for n in [*names, "i"]}, b'{"i": 1}'
    )
    run_pack(tmp_path / "source", tmp_path / "store")
    assert read_version(tmp_path / "store", "v1") == {"p/1": expected}
