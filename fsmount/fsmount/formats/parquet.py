"""Parquet as our formats use it: deterministic bytes, one JSON text of ours in the metadata."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fsmount.errors import FormatError
from fsmount.formats.checked import dump_compact, load_object

_METADATA_KEY = b"fsmount"
_ROWS_A_BYTE = 8  # at most, beyond 65,536: every row of ours has a name of its own
_INFLATION = 1024  # times its own size that a file's pages and texts may take, beyond these:
_PAGES = 64 << 20  # bytes of pages
_TEXTS = 1 << 30  # bytes of the texts of one column, of which a dictionary repeats one for nothing,
# and of all numbers, which a page repeats for nothing
_BITS = {"BOOLEAN": 1, "INT32": 32, "FLOAT": 32, "INT64": 64, "DOUBLE": 64}


def write(table: pa.Table, metadata: dict[str, Any]) -> bytes:
    """The Parquet file of `table`, with `metadata` as JSON under the key `fsmount`.

    Pages are compressed by zstd; where that makes so little of so much that `read` would take the
    file for a bomb, by snappy, which makes a twentieth of anything at the least.
    """
    data = _write(table, metadata, "zstd", dictionaries=True)
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        inflated, numbers = _inflated(file.metadata), _numbers(file.metadata)
    expanded = max(table.nbytes, numbers)
    if inflated <= _most(_PAGES, len(data)) and expanded <= _most(_TEXTS, len(data)):
        return data
    return _write(table, metadata, "snappy", dictionaries=False)


def _write(
    table: pa.Table, metadata: dict[str, Any], compression: str, *, dictionaries: bool
) -> bytes:
    sink = pa.BufferOutputStream()
    # without the copy of the Arrow schema: Parquet has all of our types itself
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression=compression,
        use_dictionary=dictionaries,
        store_schema=False,
    ) as writer:
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
            schema, metadata = _described(file, len(data), what)
            names = schema.names
            wanted = None if columns is None else [name for name in columns if name in names]
            asked = names if wanted is None else wanted
            _check_texts(data, file.metadata, asked, what)
            if any(pa.types.is_nested(schema.field(name).type) for name in asked):
                _check_numbers(file.metadata, len(data), what)
            # A thread that pyarrow starts just before the process ends can abort it.
            table = file.read(columns=wanted, use_threads=False)
            if wanted is not None:  # a name with a dot means a nested field as well to pyarrow
                table = table.select(wanted)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(what, error) from error
    return table, metadata


def read_schema(
    data: bytes | memoryview | pa.Buffer, what: str
) -> tuple[pa.Schema, dict[str, Any]]:
    """The columns and our metadata, of the footer alone; errors as `read`."""
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            return _described(file, len(data), what)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(what, error) from error


def _check_size(footer: pq.FileMetaData, size: int, what: str) -> None:
    """Refuse a small file that says it holds far more than any file of ours of that size."""
    inflated = _inflated(footer)
    if footer.num_rows > (1 << 16) + _ROWS_A_BYTE * size:
        raise FormatError(f"{what}: {footer.num_rows} rows in {size} bytes")
    if inflated > _most(_PAGES, size):
        raise FormatError(f"{what}: {size} bytes that would take {inflated}")


def _check_numbers(footer: pq.FileMetaData, size: int, what: str) -> None:
    """Refuse lists of numbers that take far more memory than their pages."""
    if _numbers(footer) > _most(_TEXTS, size):
        raise FormatError(f"{what}: {size} bytes whose numbers would take {_numbers(footer)}")


def _numbers(footer: pq.FileMetaData) -> int:
    """How many bytes all numbers of a file take in memory, also those inside lists."""
    chunks = (footer.row_group(g).column(c) for g, c in _places(footer))
    return sum(chunk.num_values * _BITS.get(chunk.physical_type, 0) // 8 for chunk in chunks)


def _inflated(footer: pq.FileMetaData) -> int:
    """How many bytes all pages of a file take, as its footer has it."""
    groups = range(footer.num_row_groups)
    return sum(footer.row_group(place).total_byte_size for place in groups)


def _most(free: int, size: int) -> int:
    """How many bytes what a file of `size` bytes holds may take, the first `free` for nothing."""
    return free + _INFLATION * size


def _check_texts(
    data: bytes | memoryview | pa.Buffer, footer: pq.FileMetaData, names: Sequence[str], what: str
) -> None:
    """Refuse texts that take far more memory than their pages: a page has each of them once."""
    most = _most(_TEXTS, len(data))
    if footer.num_rows * _inflated(footer) <= most:
        return
    chunks = (footer.row_group(g).column(c) for g, c in _places(footer))
    doubtful = {
        chunk.path_in_schema
        for chunk in chunks
        if chunk.physical_type == "BYTE_ARRAY"
        and chunk.num_values * chunk.total_uncompressed_size > most
    }
    for name in sorted(doubtful.intersection(names)):
        with pq.ParquetFile(pa.BufferReader(data), read_dictionary=[name]) as file:
            column = file.read(columns=[name], use_threads=False).column(name)
        if sum(map(_texts_size, column.chunks)) > most:
            raise FormatError(f"{what}: {len(data)} bytes whose {name!r} would take over {most}")


def _texts_size(chunk: pa.Array) -> int:
    """The bytes of the texts that `chunk`, a column read with its dictionary, repeats.

    A column of no texts has the name of a field of texts inside another one.
    """
    if not pa.types.is_dictionary(chunk.type):
        return 0
    lengths = pc.binary_length(chunk.dictionary).cast(pa.int64())
    return pc.sum(lengths.take(chunk.indices)).as_py() or 0


def _places(footer: pq.FileMetaData) -> Iterator[tuple[int, int]]:
    return product(range(footer.num_row_groups), range(footer.num_columns))


def _described(file: pq.ParquetFile, size: int, what: str) -> tuple[pa.Schema, dict[str, Any]]:
    schema = file.schema_arrow
    if len(set(schema.names)) != len(schema.names):
        raise FormatError(f"{what}: two columns of one name")
    _check_size(file.metadata, size, what)
    metadata = (file.metadata.metadata or {}).get(_METADATA_KEY)
    if metadata is None:
        raise FormatError(f"{what}: a Parquet file that is none of ours")
    return schema, load_object(metadata, what)


def _unreadable(what: str, error: Exception) -> FormatError:
    return FormatError(f"{what}: not a Parquet file that can be read: {error}")


def check_columns(table: pa.Table, schema: pa.Schema, what: str) -> None:
    """Raise FormatError unless each column of `schema` that `table` has is of the type given."""
    for name in table.column_names:
        index = schema.get_field_index(name)
        if index >= 0 and table.schema.field(name).type != schema.field(index).type:
            raise FormatError(f"{what}: column {name!r} is {table.schema.field(name).type}")
