"""A key-set: its document, and the object that holds its keys."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from fsmount.errors import FormatError, InvalidNameError
from fsmount.formats import parquet
from fsmount.formats.document import check_format
from fsmount.formats.keyset_pointer import Keyset, decode_pointer, encode_pointer
from fsmount.model import FORMAT, check_key

__all__ = ["Keyset", "decode_keys", "decode_pointer", "encode_keys", "encode_pointer"]

_SCHEMA = pa.schema([("__key__", pa.string())])


def encode_keys(keys: Sequence[str]) -> bytes:
    """The Parquet bytes of `keys`, sorted; FormatError for an empty or repeated key-set."""
    ordered = sorted(set(keys))
    if not ordered or len(ordered) != len(keys):
        raise FormatError("a key-set is empty, or names a key twice")
    table = pa.table([pa.array(ordered, pa.string())], schema=_SCHEMA)
    return parquet.write(table, {"format": FORMAT})


def decode_keys(data: bytes) -> tuple[str, ...]:
    """The keys in `data`, sorted; FormatError if it is no key-set."""
    table, metadata = parquet.read(data, "key-set")
    if not table.schema.equals(_SCHEMA):
        raise FormatError("key-set: not the one column __key__")
    check_format(metadata)
    try:
        keys = tuple(map(check_key, table.column(0).to_pylist()))
    except (InvalidNameError, AttributeError, UnicodeDecodeError) as error:
        raise FormatError(f"key-set: {error}") from error
    if not keys or list(keys) != sorted(set(keys)):
        raise FormatError("key-set: empty, not sorted, or a key twice")
    return keys
