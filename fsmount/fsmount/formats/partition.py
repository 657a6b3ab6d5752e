"""A partition as a JSON object: the row of a table, and what processes tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsmount.errors import FormatError
from fsmount.formats.checked import get
from fsmount.model import Digest, ObjectRef, Partition, ShardRef


def partition_to_json(part: Partition) -> dict[str, Any]:
    """`part` as a JSON object, the row of a table."""
    return {
        "id": part.id,
        "data_revision": part.data_revision,
        "metadata_revision": part.metadata_revision,
        "samples": part.samples,
        "raw_bytes": part.raw_bytes,
        "manifest": part.manifest.digest,
        "manifest_size": part.manifest.size,
        "shards": [shard_to_json(shard) for shard in part.shards],
        "source_fingerprint": part.source_fingerprint,
        "fields": part.fields,
        "schema": part.schema,
    }


def partition_from_json(row: Mapping[str, Any]) -> Partition:
    """The partition in a JSON object; FormatError or InvalidNameError otherwise."""
    return Partition(
        id=get(row, "id", str),
        data_revision=Digest(get(row, "data_revision", str)),
        metadata_revision=Digest(get(row, "metadata_revision", str)),
        samples=get(row, "samples", int),
        raw_bytes=get(row, "raw_bytes", int),
        manifest=ObjectRef(Digest(get(row, "manifest", str)), get(row, "manifest_size", int)),
        shards=tuple(map(shard_from_json, get(row, "shards", list))),
        source_fingerprint=get(row, "source_fingerprint", str),
        fields=get(row, "fields", str),
        schema=get(row, "schema", str),
    )


def shard_to_json(shard: ShardRef) -> dict[str, Any]:
    """`shard` as a JSON object."""
    return {"digest": shard.digest, "size": shard.size, "samples": shard.samples}


def shard_from_json(value: object) -> ShardRef:
    """The shard reference in a JSON object; FormatError or InvalidNameError otherwise."""
    if not isinstance(value, dict):
        raise FormatError("a shard reference that is no object")
    return ShardRef(
        Digest(get(value, "digest", str)), get(value, "size", int), get(value, "samples", int)
    )
