"""Versions made to do harm, every digest of which is right: a clear error, or the right samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hostile import at, change_document, change_manifest, change_table, everywhere
from small_versions import build, numbered
from test_dataset import all_numbers

from fsmount.errors import FormatError, FsmountError, IntegrityError, LoadError, PlanError
from fsmount.formats import sample
from fsmount_loader import ShardDataset

MOST = (1 << 63) - 1
SELECTIONS: list[dict[str, Any]] = [{}, {"where": "n >= 0"}]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return build(tmp_path / "v", {"a": [numbered(4)], "b": [numbered(3, 1)]})


def load(root: Path, **options: Any) -> list[int]:
    data = ShardDataset(root, batch_size=7, shuffle=False, retries=0, max_pad_fraction=1, **options)
    return all_numbers(data)


def header(*shape: int) -> tuple[str, int]:
    """The schema of a member with one float32 array, as a manifest has it, and its raw size."""
    size = 4
    for length in shape:
        size *= length
    entry = {"dtype": "F32", "shape": list(shape), "data_offsets": [0, size]}
    text = json.dumps({"x": entry}, separators=(",", ":"))
    length = 8 + len(text)
    return text, length + -length % sample.ALIGNMENT + size


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": {"__offset__": at(2, 1 << 40)}}, "a payload lies outside its shard"),
        ({"columns": {"__offset__": at(2, MOST)}}, "a payload lies outside its shard"),
        ({"columns": {"__offset__": at(2, -512)}}, "a payload lies outside its shard"),
        ({"columns": {"__size__": at(2, -1)}}, "a payload lies outside its shard"),
        ({"columns": {"__size__": at(2, 0)}}, "a payload lies outside its shard"),
        ({"columns": {"__size__": at(2, MOST)}}, "a payload lies outside its shard"),
        ({"columns": {"__schema__": at(1, 1)}}, "'__schema__' points at none of 1"),
        ({"columns": {"__schema__": at(1, -1)}}, "'__schema__' points at none of 1"),
        ({"columns": {"__shard__": at(3, 1)}}, "'__shard__' points at none of 1"),
        ({"columns": {"__shard__": at(0, -1)}}, "'__shard__' points at none of 1"),
        ({"columns": {"__offset__": at(1, None)}}, "'__offset__' has nulls"),
        ({"columns": {"__raw_size__": at(1, 1 << 62)}}, "partition 'a': a wrong raw size"),
        ({"types": {"__offset__": pa.float64()}}, "'__offset__' is double"),
        ({"rows": []}, "partition 'a': 0 rows for 4 samples"),
        ({"rows": [0, 1]}, "partition 'a': 2 rows for 4 samples"),
        ({"rows": [0, 1, 2, 3, 3]}, "partition 'a': 5 rows for 4 samples"),
        ({"metadata": {"schemas": []}}, "'__schema__' points at none of 0"),
        ({"metadata": {"schemas": ["{}{}"]}}, "partition 'a': a tensor member's header"),
        ({"metadata": {"partition": "b"}}, "partition 'a' belongs to 'b'"),
        ({"metadata": {"format": 2}}, "format 2"),
        ({"row": {"data_revision": "0" * 64}}, "partition 'a' belongs to 'a' at revision"),
    ],
)
def test_a_manifest_that_can_t_be(
    root: Path, change: dict[str, Any], message: str, selection: dict[str, Any]
) -> None:
    change_manifest(root, "a", **change)
    with pytest.raises(FormatError, match=message) as caught:
        load(root, **selection)
    assert "\n" not in str(caught.value)


def test_shards_that_are_not_in_order(tmp_path: Path) -> None:
    root = build(tmp_path / "v", {"a": [numbered(4)[:2], numbered(4)[2:]]})
    change_manifest(root, "a", rows=[0, 2, 1, 3])
    for selection in SELECTIONS:
        with pytest.raises(FormatError, match="partition 'a': its rows are not in shard order"):
            load(root, **selection)


@pytest.mark.parametrize(
    "columns",
    [
        {"__offset__": everywhere(lambda _: 512)},  # members that overlap
        {"__size__": everywhere(lambda size: size + 1)},
        {"__checksum__": everywhere(lambda checksum: checksum ^ 1)},
    ],
)
def test_payloads_that_are_elsewhere_are_never_delivered(
    root: Path, columns: dict[str, Any]
) -> None:
    change_manifest(root, "a", columns=columns)
    with pytest.raises(IntegrityError, match=r"a/000000\.tar: sample 'a/000.' at offset"):
        load(root)
    kept = [0] if "__offset__" in columns else []
    assert load(root, on_error="skip") == [*kept, 1000, 1001, 1002]


def test_rows_that_change_places_and_keys_that_repeat(root: Path) -> None:
    change_manifest(root, "a", rows=[3, 1, 0, 2], columns={"__key__": everywhere(lambda _: "a/x")})
    assert load(root) == [3, 1, 0, 2, 1000, 1001, 1002]  # keys are looked at by who asks for them
    with pytest.raises(FormatError, match="partition 'a': manifest: key 'a/x' stands twice"):
        load(root, where="__key__ <> ''")
    change_manifest(root, "a", columns={"__key__": at(0, None)})
    with pytest.raises(FormatError, match="'__key__' has nulls"):
        load(root, keys=True)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("length", [1 << 38, 1 << 58])
def test_tensors_that_no_machine_holds(root: Path, length: int, contiguous: bool) -> None:
    schema, raw = header(length)
    shard = {"digest": "0" * 64, "size": 1 << 62, "samples": 4}
    change_manifest(
        root,
        "a",
        metadata={"schemas": [schema], "shards": [shard]},
        columns={
            "__raw_size__": everywhere(lambda _: raw),
            "__size__": everywhere(lambda _: raw >> 10),
        },
        row={"shards": [shard]},
    )
    with pytest.raises(PlanError, match=r"a batch of 7 samples takes .* GiB, and this machine has"):
        load(root, where="n < 1000", contiguous=contiguous)


def test_a_payload_that_no_member_fills(root: Path) -> None:
    shard = {"digest": "0" * 64, "size": 1 << 62, "samples": 4}
    change_manifest(
        root,
        "a",
        metadata={"shards": [shard]},
        columns={"__size__": everywhere(lambda _: 1 << 50)},
        row={"shards": [shard]},
    )
    with pytest.raises(FormatError, match="partition 'a': a wrong size"):
        load(root)


@pytest.mark.parametrize("in_a_file", [False, True])
@pytest.mark.parametrize("samples", [1 << 40, 1 << 58, MOST])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_more_rows_than_there_can_be(
    root: Path,
    samples: int,
    selection: dict[str, Any],
    in_a_file: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = "cache" if in_a_file else "VERSION.json/is/no/directory"
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / cache))
    shard = {"digest": "0" * 64, "size": 1024, "samples": samples}
    change_table(root, "a", {"samples": samples, "shards": [shard]})
    with pytest.raises(FsmountError, match=r"a plan of \d+ rows takes \d+ bytes"):
        load(root, **selection)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "../a"}, "not a plain relative path: '../a'"),
        ({"id": "/a"}, "not a plain relative path: '/a'"),
        ({"id": "b"}, "its rows do not belong to content revision"),
        ({"samples": 5}, "shards do not hold 5 samples"),
        ({"samples": -4}, "shards do not hold -4 samples"),
        ({"shards": []}, "shards do not hold 4 samples"),
        ({"shards": [None]}, "a shard reference that is no object"),
        ({"shards": None}, "field 'shards'"),
        ({"manifest_size": -1}, "size must be at least 0"),
        ({"manifest_size": 0}, r"manifests/a\.parquet: not the object"),
        ({"manifest_size": 1 << 50}, r"manifests/a\.parquet: not the object"),
        ({"manifest_size": MOST}, r"manifests/a\.parquet: not the object"),
        ({"manifest": "0" * 64}, r"manifests/a\.parquet: not the object"),
        ({"manifest": "../a"}, "not a SHA-256 digest"),
    ],
)
def test_a_partition_table_that_can_t_be(root: Path, row: dict[str, Any], message: str) -> None:
    change_table(root, "a", row)
    with pytest.raises(FormatError, match=message) as caught:
        load(root)
    assert "\n" not in str(caught.value)


VALUES: list[Any] = [None, 5, "x", [], {}, -1, 1 << 70, 1.5, True, "\ud800", "../x", ""]


def test_a_document_with_anything_in_it(root: Path) -> None:
    document = json.loads((root / "VERSION.json").read_bytes())
    paths: list[tuple[str, ...]] = [(name,) for name in document]
    paths += [(name, inner) for name in document if isinstance(document[name], dict)
              for inner in document[name]]  # fmt: skip
    refused = 0
    for path in paths:
        for value in VALUES:
            change_document(root, path, value)
            try:
                assert load(root) == [0, 1, 2, 3, 1000, 1001, 1002]
            except FormatError:
                refused += 1
            (root / "VERSION.json").write_text(json.dumps(document))
    assert refused > 150
    for size in (1 << 50, MOST):
        change_document(root, ("table", "size"), size)
        with pytest.raises(IntegrityError, match=r"partitions\.parquet: not the object"):
            load(root, where=f"n <> {size}")  # a selection whose plan is not known yet


def test_a_file_that_is_a_directory(root: Path) -> None:
    for name in ("manifests/a.parquet", "partitions.parquet"):
        (root / name).unlink()
        (root / name).mkdir()
        with pytest.raises((LoadError, IntegrityError), match=name):
            load(root)
