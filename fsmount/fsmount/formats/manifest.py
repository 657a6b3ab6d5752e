"""A manifest: one Parquet row a sample of a partition, in shard order.

Where each payload lies, what it must hash to, and everything that is known of a sample beside its
tensors. docs/format.md, "Manifest", has the columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fsmount.errors import (
    FormatError,
    IntegrityError,
    InvalidNameError,
    SidecarError,
    shortened,
)
from fsmount.formats import fields, kinds, parquet
from fsmount.formats.checked import dump_compact, get, is_unicode, load_object
from fsmount.formats.document import check_format
from fsmount.formats.kinds import Fields, Schema
from fsmount.formats.partition import shard_from_json, shard_to_json
from fsmount.formats.sample import ALIGNMENT
from fsmount.formats.shard import BLOCK
from fsmount.model import FORMAT, Digest, Partition, ShardRef, check_key, check_partition_id

SCHEMA = pa.schema(
    [
        ("__key__", pa.string()),
        ("__shard__", pa.int32()),
        ("__index__", pa.int64()),
        ("__offset__", pa.int64()),
        ("__size__", pa.int64()),
        ("__raw_size__", pa.int64()),
        ("__checksum__", pa.uint64()),
        ("__sha256__", pa.binary(32)),
        ("__schema__", pa.int32()),
        ("__text__", pa.string()),
        ("__sidecar__", pa.binary()),
    ]
)
OWN_COLUMNS: tuple[str, ...] = tuple(SCHEMA.names)
_NO_KEY = r"(^|/)\.{0,2}(/|$)|\x00"  # an empty component, "." or ".."; a NUL
_SHORT_KEY = 200  # bytes; no key so short has too many or too long components
_TEXT_DESCR = re.compile(r"[<>]U([1-9]\d{0,9})|\|S([1-9]\d{0,9})")
TEXT_PADDING_MAX = 1 << 20  # characters of a text array's dtype beyond its text
_NUMBERS = ("__shard__", "__index__", "__offset__", "__size__", "__raw_size__", "__schema__")


@dataclass(frozen=True, slots=True)
class Text:
    """A 0-d text array of the source: numpy's dtype descriptor, and the text."""

    name: str
    descr: str
    value: str

    def __post_init__(self) -> None:
        """Raise FormatError for a dtype that is no text's, or not of about this text's size."""
        room = text_room(self.name, self.descr)
        length = len(self.value if self.descr[1:2] == "U" else self.value.encode())
        if not 0 <= room - length <= TEXT_PADDING_MAX:
            raise no_dtype_of_text(self.name, self.descr)


@dataclass(frozen=True, slots=True)
class Row:
    """One sample: where its payload lies and what it is. Offsets and sizes are bytes."""

    key: str
    shard: int  # place in the manifest's shards
    index: int  # place in the shard
    offset: int  # of the payload, from the shard's start
    size: int  # of the payload
    raw_size: int  # of the decoded member
    checksum: int  # XXH3-64 of the payload
    sha256: bytes  # of the decoded member
    schema: int  # place in the manifest's schemas
    texts: tuple[Text, ...]  # sorted by name
    sidecar: bytes | None

    def texts_json(self) -> str | None:
        """The text arrays as one JSON text, None where there are none; revisions hash it."""
        if not self.texts:
            return None
        return dump_compact({text.name: [text.descr, text.value] for text in self.texts})


@dataclass(frozen=True, slots=True)
class ManifestMeta:
    """What a manifest says of itself, so that one that does not belong is noticed."""

    partition: str
    data_revision: Digest
    metadata_revision: Digest
    shards: tuple[ShardRef, ...]
    schemas: tuple[bytes, ...]  # headers of tensor members
    json_columns: tuple[str, ...]  # fields whose column is JSON text
    compressor: str  # the zstd release that made the payloads

    def __post_init__(self) -> None:
        check_partition_id(self.partition)

    def check_belongs(self, partition: Partition) -> None:
        """Raise IntegrityError unless this is the manifest that `partition` names."""
        mine = (self.partition, self.data_revision, self.metadata_revision, self.shards)
        if mine != (
            partition.id,
            partition.data_revision,
            partition.metadata_revision,
            partition.shards,
        ):
            raise IntegrityError(
                f"the manifest of partition {partition.id!r} belongs to {self.partition!r} "
                f"at revision {self.metadata_revision}"
            )


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest's metadata and its rows, all columns or those that were asked for.

    The methods raise FormatError for texts that can't be read.
    """

    meta: ManifestMeta
    table: pa.Table

    def rows(self) -> list[Row]:
        """The rows as values; needs all columns."""
        try:
            rows = self.table.select([*OWN_COLUMNS, *self.text_names()]).to_pylist()
        except (KeyError, UnicodeDecodeError) as error:
            raise FormatError(f"manifest: {error}") from error
        return [_row(row, self.meta.json_columns) for row in rows]

    def text_names(self) -> list[str]:
        """The names of text arrays that some sample has, sorted; needs `__text__`."""
        try:
            texts = pc.unique(self.table.column("__text__")).to_pylist()
        except UnicodeDecodeError as error:
            raise FormatError(f"manifest: {error}") from error
        return sorted({name for text in texts if text is not None for name in descrs_of(text)})


def fields_of(rows: Sequence[Row]) -> Fields:
    """The fields and text arrays of `rows`; SidecarError naming the key, as `encode`."""
    texts = {text.name for row in rows for text in row.texts}
    return kinds.fields_of(map(_fields, rows), texts)


def encode(rows: Sequence[Row], meta: ManifestMeta, schema: Schema) -> bytes:
    """The Parquet bytes of `rows`, in shard order; `meta.json_columns` is filled in here.

    `schema` is the version's; FormatError if it does not hold the fields of `rows`. Raises
    SidecarError naming the key for a sidecar that can't become columns.
    """
    own = [
        pa.array([_own(row, name) for row in rows], SCHEMA.field(name).type) for name in OWN_COLUMNS
    ]
    typed, json_columns = fields.columns([_fields(row) for row in rows], schema)
    table = pa.table([*own, *typed.values()], names=[*OWN_COLUMNS, *typed])
    return parquet.write(
        table,
        {
            "format": FORMAT,
            "partition": meta.partition,
            "data_revision": meta.data_revision,
            "metadata_revision": meta.metadata_revision,
            "shards": [shard_to_json(shard) for shard in meta.shards],
            "schemas": [header[8:].rstrip(b" ").decode() for header in meta.schemas],
            "json_columns": list(json_columns),
            "compressor": meta.compressor,
        },
    )


def decode(data: bytes | memoryview | pa.Buffer, columns: Sequence[str] | None = None) -> Manifest:
    """The manifest in `data`, all columns or those of `columns` that it has.

    Raises FormatError if `data` is no manifest, or one whose numbers point outside its shards or
    whose keys are no keys, or not unique.
    """
    table, metadata = parquet.read(data, "manifest", columns)
    parquet.check_columns(table, SCHEMA, "manifest")
    missing = set(OWN_COLUMNS if columns is None else columns) & set(OWN_COLUMNS)
    if not missing <= set(table.column_names):
        raise FormatError(f"manifest: columns {sorted(missing - set(table.column_names))} missing")
    try:
        meta = _meta(metadata)
    except (FormatError, InvalidNameError) as error:
        raise FormatError(f"manifest: {error}") from error
    _check_numbers(table, meta)
    _check_keys(table)
    return Manifest(meta, table)


def column_types(data: bytes | memoryview | pa.Buffer) -> dict[str, pa.DataType]:
    """The type of each column of the manifest in `data`; no row is read.

    Raises FormatError if `data` is no manifest, as far as its footer shows.
    """
    schema, metadata = parquet.read_schema(data, "manifest")
    try:
        check_format(metadata)
    except FormatError as error:
        raise FormatError(f"manifest: {error}") from error
    return {field.name: field.type for field in schema}


def check_fields(fields_of_row: dict[str, Any], texts: Sequence[Text]) -> None:
    """Raise SidecarError if fields and text arrays of one sample can't be columns together."""
    for name in (*fields_of_row, *(text.name for text in texts)):
        if name in OWN_COLUMNS:
            raise SidecarError(f"field {name!r} has the name of a manifest's own column")
    for text in texts:
        if text.name in fields_of_row:
            raise SidecarError(f"field {text.name!r} is in the sidecar and a text array as well")


def _own(row: Row, name: str) -> Any:
    if name == "__text__":
        return dump_compact({t.name: t.descr for t in row.texts}) if row.texts else None
    return getattr(row, name.strip("_"))


def _fields(row: Row) -> dict[str, Any]:
    try:
        parsed = {} if row.sidecar is None else fields.parse_sidecar(row.sidecar)
        check_fields(parsed, row.texts)
    except SidecarError as error:
        raise SidecarError(f"{row.key!r}: {error}") from error
    return {**parsed, **{text.name: text.value for text in row.texts}}


def text_room(name: str, descr: str) -> int:
    """The length of the longest text of a dtype: characters of `U`, bytes of `S`; FormatError."""
    match = _TEXT_DESCR.fullmatch(descr)
    if match is None:
        raise no_dtype_of_text(name, descr)
    return int(match[1] or match[2])


def no_dtype_of_text(name: str, descr: str) -> FormatError:
    """The error for a dtype that is no text's, or not of about its text's size."""
    return FormatError(f"text array {name!r}: {shortened(repr(descr))} is no dtype of its text")


def descrs_of(text: str) -> dict[str, str]:
    """Name to numpy dtype descriptor of a value of `__text__`, by name; FormatError."""
    descrs = load_object(text, "manifest: __text__")
    return {name: get(descrs, name, str) for name in sorted(descrs)}


def _text(value: object, is_json: bool) -> object:
    try:
        return json.loads(value) if is_json and isinstance(value, str) else value
    except ValueError as error:
        raise FormatError(f"manifest: not JSON: {value!r}") from error


def _row(row: dict[str, Any], json_columns: Sequence[str]) -> Row:
    descrs = descrs_of(row["__text__"] or "{}")
    values = {name: _text(row[name], name in json_columns) for name in descrs}
    texts = tuple(Text(name, descr, get(values, name, str)) for name, descr in descrs.items())
    own = {name.strip("_"): row[name] for name in OWN_COLUMNS if name != "__text__"}
    return Row(**own, texts=texts)


def _meta(metadata: dict[str, Any]) -> ManifestMeta:
    check_format(metadata)
    return ManifestMeta(
        partition=get(metadata, "partition", str),
        data_revision=Digest(get(metadata, "data_revision", str)),
        metadata_revision=Digest(get(metadata, "metadata_revision", str)),
        shards=tuple(map(shard_from_json, get(metadata, "shards", list))),
        schemas=tuple(map(header_of, _texts(metadata, "schemas"))),
        json_columns=_texts(metadata, "json_columns"),
        compressor=get(metadata, "compressor", str),
    )


def _texts(metadata: dict[str, Any], name: str) -> tuple[str, ...]:
    texts = get(metadata, name, list)
    if not all(isinstance(text, str) and is_unicode(text) for text in texts):
        raise FormatError(f"field {name!r} is not a list of texts")
    return tuple(texts)


def header_of(text: str) -> bytes:
    """The header of a tensor member, of which a manifest has the JSON text."""
    header = text.encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def _check_numbers(table: pa.Table, meta: ManifestMeta) -> None:
    """Offsets, sizes and places are hostile until they are seen to lie inside the shards."""
    have = {name: table.column(name) for name in table.column_names if name in OWN_COLUMNS}
    for name, column in have.items():
        if column.null_count and name not in ("__text__", "__sidecar__"):
            raise FormatError(f"manifest: column {name!r} has nulls")
    numbers = {name: have[name].to_numpy() for name in _NUMBERS if name in have}
    for name, limit in (("__shard__", len(meta.shards)), ("__schema__", len(meta.schemas))):
        if name in numbers and not _within(numbers[name], limit):
            raise FormatError(f"manifest: column {name!r} points at none of {limit}")
    for name in ("__index__", "__raw_size__"):
        if name in numbers and not (numbers[name] >= 0).all():
            raise FormatError(f"manifest: column {name!r} is negative")
    if {"__shard__", "__offset__", "__size__"} <= numbers.keys():
        end = np.array([shard.size for shard in meta.shards], np.int64)[numbers["__shard__"]]
        offset, size = numbers["__offset__"], numbers["__size__"]
        if not ((offset >= BLOCK).all() and (size > 0).all() and (size <= end - offset).all()):
            raise FormatError("manifest: a payload lies outside its shard")


def _check_keys(table: pa.Table) -> None:
    """Keys become paths and names: all are looked at at once, the doubtful ones one by one."""
    if "__key__" not in table.column_names:
        return
    keys = table.column("__key__")
    try:
        keys.validate(full=True)
        doubtful = pc.or_(
            pc.match_substring_regex(keys, _NO_KEY), pc.greater(pc.binary_length(keys), _SHORT_KEY)
        )
        for key in keys.filter(doubtful).to_pylist():
            check_key(key)
    except pa.ArrowInvalid as error:
        raise FormatError(f"manifest: a key that is not UTF-8: {error}") from error
    except InvalidNameError as error:
        raise FormatError(f"manifest: {error}") from error
    if pc.count_distinct(keys).as_py() != len(keys):
        raise FormatError(f"manifest: key {_twice(keys)!r} stands twice")


def _twice(keys: pa.ChunkedArray) -> str:
    counts = keys.value_counts()
    places = counts.field("counts").to_numpy().argmax()
    return str(counts.field("values")[int(places)].as_py())


def _within(values: Any, limit: int) -> bool:
    return bool((values >= 0).all() and (values < limit).all())
