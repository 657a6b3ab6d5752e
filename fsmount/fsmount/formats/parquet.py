"""Parquet as our formats use it: deterministic bytes, one JSON text of ours in the metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fsmount.errors import FormatError
from fsmount.formats.checked import dump_compact, load_object

_METADATA_KEY = b"fsmount"


def write(table: pa.Table, metadata: dict[str, Any]) -> bytes:
    """The Parquet file of `table`, with `metadata` as JSON under the key `fsmount`."""
    sink = pa.BufferOutputStream()
    # without the copy of the Arrow schema: Parquet has all of our types itself
    with pq.ParquetWriter(sink, table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_METADATA_KEY: dump_compact(metadata)})
    return bytes(sink.getvalue())


def read(
    data: bytes | memoryview | pa.Buffer, what: str, columns: Sequence[str] | None = None
) -> tuple[pa.Table, dict[str, Any]]:
    """The table and our metadata in `data`, all columns or those of `columns` that it has.

    Raises FormatError naming `what` if `data` is no Parquet file of ours.
    """
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            names = file.schema_arrow.names
            if len(set(names)) != len(names):
                raise FormatError(f"{what}: two columns of one name")
            wanted = None if columns is None else [name for name in columns if name in names]
            # A thread that pyarrow starts just before the process ends can abort it.
            table = file.read(columns=wanted, use_threads=False)
            if wanted is not None:  # a name with a dot means a nested field as well to pyarrow
                table = table.select(wanted)
            metadata = (file.metadata.metadata or {}).get(_METADATA_KEY)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{what}: not a Parquet file that can be read: {error}") from error
    if metadata is None:
        raise FormatError(f"{what}: a Parquet file that is none of ours")
    return table, load_object(metadata, what)


def check_columns(table: pa.Table, schema: pa.Schema, what: str) -> None:
    """Raise FormatError unless each column of `schema` that `table` has is of the type given."""
    for name in table.column_names:
        index = schema.get_field_index(name)
        if index >= 0 and table.schema.field(name).type != schema.field(index).type:
            raise FormatError(f"{what}: column {name!r} is {table.schema.field(name).type}")
