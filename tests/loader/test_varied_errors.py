"""Shapes that can't be delivered: of samples that have nothing in common, too large, or a lie."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_versions import Arrays, Sample, build

from fsmount.errors import FormatError, IntegrityError, LoadError, PlanError
from fsmount.formats import document, manifest, table
from fsmount.model import Digest, ObjectRef
from fsmount.testing import one_schema
from fsmount_loader import ShardDataset, ShardLoader


@pytest.mark.parametrize("shapes", ["pad", "list"])
@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ({"x": np.zeros(3)}, {"x": np.zeros((3, 1))}, r"'x' is float64 \[3\].*float64 \[3, 1\]"),
        ({"x": np.zeros(3)}, {"x": np.zeros(4, "f4")}, r"float64 \[3\].*float32 \[4\]"),
        ({"x": np.zeros(3)}, {"y": np.zeros(4)}, "only one of them has 'x'"),
    ],
)
def test_only_sizes_may_differ(
    tmp_path: Path, shapes: Any, one: Arrays, other: Arrays, difference: str
) -> None:
    root = build(tmp_path / "v", {"a": [[Sample("0", one), Sample("1", other)]]})
    with pytest.raises(PlanError, match=rf"'a/0' and 'a/1' can't be in one batch: .*{difference}"):
        ShardDataset(root, batch_size=2, shapes=shapes)


def test_the_error_tells_the_remedy_where_there_is_one(tmp_path: Path) -> None:
    def message(*shapes: tuple[int, ...]) -> str:
        pair = [Sample(str(n), {"x": np.zeros(shape)}) for n, shape in enumerate(shapes)]
        with pytest.raises(PlanError) as caught:
            ShardDataset(build(tmp_path / str(shapes), {"a": [pair]}), batch_size=2)
        return str(caught.value)

    assert message((0, 3), (5, 3)).endswith("; shapes='pad' and shapes='list' allow for that")
    assert message((3,), (1, 3)).endswith("float64 [1, 3] in the other")
    version = tmp_path / "((3,), (1, 3))"
    for value in ("stack", None, 5, ["pad"]):
        with pytest.raises(PlanError, match="shapes must be 'error', 'pad' or 'list', not"):
            ShardDataset(version, batch_size=2, shapes=value)  # type: ignore[arg-type]


def test_names_of_our_own_entries_are_taken(tmp_path: Path) -> None:
    def dataset(name: str, names: list[str], **options: Any) -> ShardDataset:
        pair = [
            Sample(str(n), {"x": np.zeros(n)} | {name: np.zeros(2) for name in names})
            for n in range(1, 3)
        ]
        root = build(tmp_path / name, {"a": [pair]})
        return ShardDataset(root, batch_size=2, shapes="pad", **options)

    with pytest.raises(PlanError, match=r"fields: '__shape__\.x' is the name of an entry"):
        dataset("one", ["__shape__.x"])
    with pytest.raises(PlanError, match="fields: '__valid__' is the name"):
        dataset("two", ["__valid__"])
    with pytest.raises(PlanError, match="fields: '__key__' is the name"):
        dataset("three", ["__key__"], keys=True)
    assert set(next(iter(dataset("four", ["__shape__.x", "y"], fields=["y"])))) == {
        "y", "__valid__",
    }  # fmt: skip


def header(length: int) -> bytes:
    """The header of a member that has `length` doubles."""
    entry = {"dtype": "F64", "shape": [length], "data_offsets": [0, 8 * length]}
    text = json.dumps({"x": entry}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def lying(root: Path, length: int) -> Path:
    """A version of four samples, in whose manifest the third has `length` doubles."""
    build(root, {"a": [[Sample(str(n), {"x": np.arange(1.0 + n)}) for n in range(4)]]})
    parts = table.decode((root / "partitions.parquet").read_bytes())
    path = root / "manifests" / "a.parquet"
    found = manifest.decode(path.read_bytes())
    rows = found.rows()
    raw = min(8 * length + len(header(length)), 2**63 - 1)
    rows[2] = replace(rows[2], schema=4, raw_size=raw)
    meta = replace(found.meta, schemas=(*found.meta.schemas, header(length)))
    path.write_bytes(one_schema.encode_alone(rows, meta))
    (part,) = parts.partitions
    parts = replace(parts, partitions=(replace(part, manifest=ref_to(path)),))
    (root / "partitions.parquet").write_bytes(table.encode(parts))
    told = table.document_of_table(ref_to(root / "partitions.parquet"), parts)
    (root / "VERSION.json").write_bytes(document.encode(told))
    return root


def ref_to(path: Path) -> ObjectRef:
    data = path.read_bytes()
    return ObjectRef(Digest(hashlib.sha256(data).hexdigest()), len(data))


@pytest.mark.parametrize("shapes", ["pad", "list"])
def test_shapes_that_only_the_manifest_has(tmp_path: Path, shapes: Any) -> None:
    for length in (1 << 40, 1 << 59, (1 << 60) - 1):  # more than zstd could have saved
        root = lying(tmp_path / str(length), length)
        with pytest.raises(FormatError, match="manifest of partition 'a': a wrong raw size"):
            ShardDataset(root, batch_size=4, shapes=shapes)
    root = lying(tmp_path / "near", 1 << 17)
    told = "a/000000.tar: sample 'a/2' .*: the payload does not hold 1048704 bytes"
    for workers in (0, 1):
        data = ShardDataset(root, batch_size=2, shapes=shapes, shuffle=False)
        batches = iter(ShardLoader(data, workers))
        assert next(batches)["__valid__"].all()
        with pytest.raises(IntegrityError, match=told):
            next(batches)


def test_zeros_are_saved_as_far_as_zstd_can(tmp_path: Path) -> None:
    zeros = {"x": np.zeros(1 << 21)}
    root = build(tmp_path / "v", {"a": [[Sample("0", zeros)]]})
    (batch,) = ShardDataset(root, batch_size=1)
    assert not batch["x"].any()


def test_shapes_that_no_tensor_can_be_padded_to(tmp_path: Path) -> None:
    large = 1 << 59
    for name, one, other, reason in (
        ("product", (0, large), (5, 0), ""),
        ("strides", (large, 0, 1), (1, 0, large), r"'x' can't be padded to \[.*, 0, .*\]"),
    ):
        pair = [Sample(str(n), {"x": np.zeros(shape)}) for n, shape in enumerate((one, other))]
        root = build(tmp_path / name, {"a": [pair]})
        for workers in (0, 1):
            data = ShardDataset(root, batch_size=2, shapes="pad", on_error="skip", shuffle=False)
            with pytest.raises(LoadError, match=f"'a/.' .*no memory for a batch with it: {reason}"):
                next(iter(ShardLoader(data, workers)))
            alone = ShardDataset(root, batch_size=1, shapes="pad", shuffle=False)
            assert [b["x"].shape[1:] for b in ShardLoader(alone, workers)] == [one, other]
            listed = ShardDataset(root, batch_size=2, shapes="list", shuffle=False)
            (batch,) = ShardLoader(listed, workers)
            assert [tuple(tensor.shape) for tensor in batch["x"]] == [one, other]
