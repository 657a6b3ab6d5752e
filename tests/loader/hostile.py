"""Changes small versions so that every digest is right and the content is not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from fsmount.errors import FsmountError
from fsmount.formats import parquet
from fsmount.formats.partition import partition_from_json
from fsmount.formats.revision import content_revision

Change = Callable[[list[Any]], list[Any]]


def at(place: int, value: Any) -> Change:
    """Put `value` at one place of a column."""
    return lambda values: [*values[:place], value, *values[place + 1 :]]


def everywhere(change: Callable[[Any], Any]) -> Change:
    """Change each value of a column."""
    return lambda values: list(map(change, values))


def change_manifest(
    root: Path,
    partition: str,
    *,
    columns: Mapping[str, Change] | None = None,
    types: Mapping[str, pa.DataType] | None = None,
    metadata: Mapping[str, Any] | None = None,
    rows: Sequence[int] | None = None,
    row: Mapping[str, Any] | None = None,
) -> None:
    """Change the manifest of a partition of the version at `root`, and its row in the table."""
    path = root / "manifests" / f"{partition}.parquet"
    table, told = parquet.read(path.read_bytes(), "manifest")
    if rows is not None:
        table = table.take(pa.array(rows, pa.int64()))
    for name, change in (columns or {}).items():
        place = table.schema.get_field_index(name)
        values = pa.array(change(table.column(name).to_pylist()), table.schema.field(place).type)
        table = table.set_column(place, name, values)
    for name, kind in (types or {}).items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, table.column(name).cast(kind))
    data = parquet.write(table, {**told, **(metadata or {})})
    path.write_bytes(data)
    named = {"manifest": hashlib.sha256(data).hexdigest(), "manifest_size": len(data)}
    change_table(root, partition, {**named, **(row or {})})


def change_table(root: Path, partition: str, row: Mapping[str, Any]) -> None:
    """Change a partition's row of the table, which is named in the document."""
    table, told = parquet.read((root / "partitions.parquet").read_bytes(), "table")
    rows = [{**one, **row} if one["id"] == partition else one for one in table.to_pylist()]
    with suppress(FsmountError):  # the row is refused before the revision is looked at
        told["content_revision"] = content_revision(
            tuple(partition_from_json({**one, "fields": "", "schema": ""}) for one in rows)
        )
    data = parquet.write(pa.Table.from_pylist(rows, schema=table.schema), told)
    (root / "partitions.parquet").write_bytes(data)
    change_document(root, ("table", "digest"), hashlib.sha256(data).hexdigest())
    change_document(root, ("table", "size"), len(data))


def change_document(root: Path, path: Sequence[str], value: Any) -> None:
    """Change one value of VERSION.json."""
    document = json.loads((root / "VERSION.json").read_bytes())
    inner = document
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    (root / "VERSION.json").write_text(json.dumps(document))
