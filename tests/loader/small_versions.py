"""Builds small versions as plain directories in a mount's layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsmount.formats import document, keyset, manifest, revision, sample, shard, table
from fsmount.model import Digest, DirectoryRule, ObjectRef, Partition, Recipe, ShardRef
from fsmount.paths import manifest_path, shard_path
from fsmount.testing import one_schema

Arrays = Mapping[str, NDArray[Any]]
RECIPE = Recipe(shard_bytes=1 << 20)


@dataclass(frozen=True)
class Sample:
    """A sample to pack: its key in its partition, its tensors and its sidecar."""

    name: str
    arrays: Arrays
    sidecar: Mapping[str, Any] | None = None


def numbered(count: int, partition: int = 0, **fields: Any) -> list[Sample]:
    """`count` samples; `x` is unique in a version of up to 1,000 samples a partition."""
    return [
        Sample(
            f"{place:04d}",
            {
                "x": np.arange(3, dtype=np.float32) + 1000 * partition + place,
                "label": np.array(place % 3, np.int64),
            },
            {"n": 1000 * partition + place, "label3": place % 3, **fields},
        )
        for place in range(count)
    ]


def build(root: Path, partitions: Mapping[str, Sequence[Sequence[Sample]]]) -> Path:
    """Write a version under `root`: for each partition, its shards, each a list of samples."""
    rows = tuple(
        _partition(root, name, shards)
        for name, shards in sorted(partitions.items(), key=lambda item: item[0].encode())
    )
    parts = table.PartitionTable(DirectoryRule(), "", RECIPE, _conform(root, rows))
    data = table.encode(parts)
    ref = ObjectRef(Digest(hashlib.sha256(data).hexdigest()), len(data))
    (root / "partitions.parquet").write_bytes(data)
    (root / "VERSION.json").write_bytes(document.encode(table.document_of_table(ref, parts)))
    return root


def add_keyset(root: Path, name: str, keys: Sequence[str]) -> None:
    """Add `keysets/<name>.parquet` to a version."""
    (root / "keysets").mkdir(exist_ok=True)
    (root / "keysets" / f"{name}.parquet").write_bytes(keyset.encode_keys(keys))


def damage(path: Path, offset: int, flip: int = 1) -> None:
    """Flip bits of one byte."""
    data = bytearray(path.read_bytes())
    data[offset] ^= flip
    path.write_bytes(data)


def _partition(root: Path, name: str, shards: Sequence[Sequence[Sample]]) -> Partition:
    folder = (root / shard_path(name, 0)).parent
    folder.mkdir(parents=True)
    rows: list[manifest.Row] = []
    schemas: dict[bytes, int] = {}
    refs = []
    for place, samples in enumerate(shards):
        data = b"".join(_members(name, place, samples, rows, schemas))
        (folder / f"{place:06d}.tar").write_bytes(data)
        digest = Digest(hashlib.sha256(data).hexdigest())
        refs.append(ShardRef(digest, len(data), len(samples)))
    revised = revision.data_revision(RECIPE, [(row.key, row.sha256) for row in rows])
    beside = [(row.key, revision.metadata_bytes(row.texts_json(), row.sidecar)) for row in rows]
    renamed = revision.metadata_revision(revised, beside)
    meta = manifest.ManifestMeta(
        name, revised, renamed, tuple(refs), tuple(schemas), (), "zstd 1.5"
    )
    data = one_schema.encode_alone(rows, meta)
    path = root / manifest_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    raw = sum(row.raw_size for row in rows)
    ref = ObjectRef(Digest(hashlib.sha256(data).hexdigest()), len(data))
    return Partition(name, revised, renamed, len(rows), raw, ref, tuple(refs), "")


def _conform(root: Path, parts: Sequence[Partition]) -> tuple[Partition, ...]:
    paths = [root / manifest_path(part.id) for part in parts]
    found = one_schema.conform([path.read_bytes() for path in paths])
    conformed = []
    for part, path, each in zip(parts, paths, found, strict=True):
        path.write_bytes(each.data)
        ref = ObjectRef(Digest(hashlib.sha256(each.data).hexdigest()), len(each.data))
        conformed.append(replace(part, manifest=ref, fields=each.fields, schema=each.schema))
    return tuple(conformed)


def _members(
    partition: str,
    place: int,
    samples: Sequence[Sample],
    rows: list[manifest.Row],
    schemas: dict[bytes, int],
) -> Iterator[bytes]:
    """The bytes of one shard; a row for each member is appended to `rows`."""
    at = 0
    for index, one in enumerate(samples):
        key = f"{partition}/{one.name}"
        member = sample.encode(one.arrays)
        payload = sample.compress(member, RECIPE.level)
        header = shard.member_header(shard.member_name(key), len(payload))
        rows.append(
            manifest.Row(
                key=key,
                shard=place,
                index=index,
                offset=at + len(header),
                size=len(payload),
                raw_size=len(member),
                checksum=sample.checksum(payload),
                sha256=hashlib.sha256(member).digest(),
                schema=schemas.setdefault(sample.read_schema(member).header, len(schemas)),
                texts=(),
                sidecar=None if one.sidecar is None else json.dumps(one.sidecar).encode(),
            )
        )
        data = header + payload + shard.padding(len(payload))
        at += len(data)
        yield data
    yield shard.END
