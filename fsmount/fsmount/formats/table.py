"""The partition table: one row a partition of a version, with what a version needs to exist."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from fsmount.errors import FormatError, InvalidNameError, PartitionError
from fsmount.formats import parquet
from fsmount.formats.checked import dump_compact, get
from fsmount.formats.document import (
    check_format,
    recipe_from_json,
    recipe_to_json,
    rule_from_json,
    rule_to_json,
)
from fsmount.formats.kinds import settle, unify_dumped
from fsmount.formats.partition import partition_from_json, partition_to_json
from fsmount.formats.revision import content_revision
from fsmount.model import (
    FORMAT,
    Digest,
    ObjectRef,
    Partition,
    Recipe,
    Rule,
    Totals,
    VersionDocument,
    check_partition_ids,
)

EPOCH = "1970-01-01T00:00:00Z"
_SHARDS = pa.list_(
    pa.struct([("digest", pa.string()), ("size", pa.int64()), ("samples", pa.int64())])
)
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("data_revision", pa.string()),
        ("metadata_revision", pa.string()),
        ("samples", pa.int64()),
        ("raw_bytes", pa.int64()),
        ("manifest", pa.string()),
        ("manifest_size", pa.int64()),
        ("shards", _SHARDS),
        ("source_fingerprint", pa.string()),
        ("fields", pa.int32()),
    ]
)


@dataclass(frozen=True, slots=True)
class PartitionTable:
    """A table's rows, sorted by id, and what its metadata says of them."""

    rule: Rule
    source_namespace: str
    recipe: Recipe
    partitions: tuple[Partition, ...]

    @property
    def content_revision(self) -> Digest:
        """The name of this content."""
        return content_revision(self.partitions)

    @property
    def schema(self) -> str:
        """The schema that the manifests of this version have, as compact JSON."""
        return dump_compact(settle(unify_dumped(part.fields for part in self.partitions)))


def encode(table: PartitionTable) -> bytes:
    """The Parquet bytes of `table`; FormatError if a manifest has not the version's schema."""
    schema = table.schema
    for part in table.partitions:
        if part.schema != schema:
            raise FormatError(f"the manifest of {part.id!r} has other columns than its version")
    places: dict[str, int] = {}
    rows = []
    for part in table.partitions:
        place = places.setdefault(part.fields, len(places))
        rows.append({**partition_to_json(part), "fields": place})
    return parquet.write(
        pa.Table.from_pylist(rows, schema=SCHEMA),
        {
            "format": FORMAT,
            "rule": rule_to_json(table.rule),
            "source_namespace": table.source_namespace,
            "recipe": recipe_to_json(table.recipe),
            "content_revision": table.content_revision,
            "fields": [json.loads(text) for text in places],
            "schema": json.loads(schema),
        },
    )


def decode(data: bytes) -> PartitionTable:
    """The table in `data`; FormatError if it is none, or contradicts itself."""
    what = "partition table"
    rows, metadata = parquet.read(data, what)
    if rows.schema.names != SCHEMA.names:
        raise FormatError(f"{what}: columns {rows.schema.names}")
    parquet.check_columns(rows, SCHEMA, what)
    try:
        check_format(metadata)
        table = PartitionTable(
            rule=rule_from_json(get(metadata, "rule", dict)),
            source_namespace=get(metadata, "source_namespace", str),
            recipe=recipe_from_json(get(metadata, "recipe", dict)),
            partitions=_partitions(rows, metadata),
        )
        check_partition_ids({part.id for part in table.partitions})
        named = get(metadata, "content_revision", str)
        schema = table.schema
    except (FormatError, InvalidNameError, PartitionError, UnicodeDecodeError) as error:
        raise FormatError(f"{what}: {error}") from error
    ids = [part.id.encode() for part in table.partitions]
    if named != table.content_revision or ids != sorted(set(ids)):
        raise FormatError(f"{what}: its rows do not belong to content revision {named}")
    if any(part.schema != schema for part in table.partitions):
        raise FormatError(f"{what}: its schema is not that of its partitions' fields")
    return table


def _partitions(rows: pa.Table, metadata: dict[str, Any]) -> tuple[Partition, ...]:
    texts = [dump_compact(value) for value in get(metadata, "fields", list)]
    schema = dump_compact(get(metadata, "schema", dict))
    found = []
    for row in rows.to_pylist():
        place = get(row, "fields", int)
        if not 0 <= place < len(texts):
            raise FormatError(f"field 'fields' points at none of {len(texts)}")
        found.append(partition_from_json({**row, "fields": texts[place], "schema": schema}))
    return tuple(found)


def document_of_table(ref: ObjectRef, table: PartitionTable) -> VersionDocument:
    """The document of a version that is known by its table alone: no tag, the time is 0."""
    return VersionDocument(
        tag=None,
        table=ref,
        parent=None,
        rule=table.rule,
        source_namespace=table.source_namespace,
        recipe=table.recipe,
        content_revision=table.content_revision,
        totals=Totals.of(table.partitions),
        created_at=EPOCH,
        message="",
        provenance={},
        replaces=None,
    )
