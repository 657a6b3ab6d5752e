"""A sample of named tensors as one member: our safetensors serializer, and zstd around it.

The bytes are specified in docs/format.md, "Tensor member". The file is valid safetensors (Hugging
Face's format: 8 bytes header length, a JSON header, the data), but written by this module, because
equal samples must give equal bytes, samples of one schema equal headers, and every numpy array the
format admits must come back bit for bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from operator import index
from typing import Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from fsmount.errors import FormatError, IntegrityError

SUFFIX = ".safetensors.zst"
ALIGNMENT = 64  # bytes; the data of a member starts at a multiple of it
_HEADER_MAX = 100_000_000  # bytes, safetensors' own limit
_DIMENSIONS_MAX = 64  # numpy's own limit
_DESCR = re.compile(r"[<>|][biufcMm]\d{1,2}(\[\d*[a-zA-Z]+\])?")
_STORED = {
    "b1": "BOOL", "i1": "I8", "u1": "U8", "i2": "I16", "u2": "U16", "i4": "I32", "u4": "U32",
    "i8": "I64", "u8": "U64", "f2": "F16", "f4": "F32", "f8": "F64",
    "c8": "F32", "c16": "F64", "M8": "I64", "m8": "I64",
}  # fmt: skip
_PLAIN = {stored: np.dtype(f"<{code}") for code, stored in reversed(_STORED.items())
          if code[0] not in "cMm"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a schema, described as numpy had it.

    `dtype` has the original's byte order, `fortran_order` the original's memory order; the bytes at
    `offset` (from the member's start) are little-endian and in C order all the same.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Schema:
    """What samples with byte-equal headers share: their fields in file order, and sizes."""

    fields: tuple[Field, ...]
    header: bytes  # the member up to its data
    raw_size: int  # bytes of the whole member


def supported(dtype: np.dtype[Any]) -> bool:
    """Whether a tensor of `dtype` can be stored: booleans, numbers, dates and time spans."""
    return not dtype.hasobject and f"{dtype.kind}{dtype.itemsize}" in _STORED


def representable(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Whether numpy can hold an array of `dtype` and `shape`, be it empty."""
    nbytes = dtype.itemsize * prod(n for n in shape if n)
    return len(shape) <= _DIMENSIONS_MAX and min(shape, default=0) >= 0 and nbytes < 1 << 63


@lru_cache(maxsize=64)  # samples have few schemas
def schema_of(fields: tuple[Field, ...]) -> Schema:
    """The schema of tensors like `fields`, whose order and offsets don't matter.

    Raises FormatError for names that are reserved, used twice, or not Unicode.
    """
    ordered = _in_file_order(fields)
    try:
        header = _header(ordered)
    except UnicodeEncodeError as error:
        raise FormatError(f"an array's name is not Unicode: {error}") from error
    placed, at = [], len(header)
    for field in ordered:
        placed.append(replace(field, offset=at))
        at += field.nbytes
    return Schema(tuple(placed), header, at)


def encode(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Serialize `arrays`; equal arrays (name, dtype, shape, order, bytes) give equal bytes.

    Raises FormatError for a dtype that is not `supported`, for the name `__metadata__` and for one
    that is not Unicode.
    """
    for name, array in arrays.items():
        if not supported(array.dtype):
            raise FormatError(f"array {name!r}: dtype {array.dtype} can't be stored")
    schema = schema_of(tuple(_field(name, array) for name, array in arrays.items()))
    data = (_little_endian(arrays[field.name]) for field in schema.fields)
    return b"".join([schema.header, *data])


def read_schema(member: bytes | memoryview) -> Schema:
    """The schema of a member, of which only the header need be given.

    Raises FormatError unless the header is the very one that `encode` would write.
    """
    length = int.from_bytes(member[:8], "little")
    if length > _HEADER_MAX or len(member) < 8 + length:
        raise FormatError("a tensor member's header is truncated")
    return _schema(bytes(member[: 8 + length]))


def decode(member: bytes | memoryview) -> dict[str, NDArray[Any]]:
    """The arrays that `encode` was given, bit for bit; they may share `member`'s memory.

    Raises FormatError if `member` is not exactly one member.
    """
    schema = read_schema(member)
    if len(member) != schema.raw_size:
        raise FormatError(f"a tensor member of {len(member)} bytes, not {schema.raw_size}")
    return {field.name: restore(member, field) for field in sorted_fields(schema)}


def sorted_fields(schema: Schema) -> list[Field]:
    """The fields of `schema` by name."""
    return sorted(schema.fields, key=lambda field: field.name)


def compress(member: bytes | memoryview, level: int) -> bytes:
    """One zstd frame with content size and checksum: the payload of a member."""
    compressor = zstandard.ZstdCompressor(level, write_checksum=True, write_content_size=True)
    return compressor.compress(member)


def decompress(payload: bytes | memoryview, raw_size: int) -> bytes:
    """The member in `payload`; IntegrityError unless it is one intact frame of `raw_size` bytes."""
    check_raw_size(payload, raw_size)
    try:
        return zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"a payload that can't be decompressed: {error}") from error


def check_raw_size(payload: bytes | memoryview, raw_size: int) -> None:
    """Raise IntegrityError unless `payload` begins as a frame that holds `raw_size` bytes."""
    try:
        held = zstandard.frame_content_size(payload)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"a payload that can't be decompressed: {error}") from error
    if held != raw_size:
        raise IntegrityError(f"a payload that does not hold {raw_size} bytes")


def checksum(payload: bytes | memoryview) -> int:
    """The XXH3-64 of a payload (https://xxhash.com), as the manifest has it."""
    return xxhash.xxh3_64_intdigest(payload)


@lru_cache(maxsize=64)  # samples have few schemas
def _schema(header: bytes) -> Schema:
    try:
        entries = json.loads(header[8:])
        fields = _fields(entries, entries.pop("__metadata__", {}), len(header))
        canonical = _header(fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"a tensor member's header can't be read: {error}") from error
    if canonical != header or fields != _in_file_order(fields):
        raise FormatError("a tensor member's header is not in the canonical form")
    return Schema(tuple(fields), header, len(header) + sum(field.nbytes for field in fields))


def _in_file_order(fields: Iterable[Field]) -> list[Field]:
    return sorted(fields, key=lambda field: (-field.dtype.itemsize, field.name))


def _field(name: str, array: NDArray[Any]) -> Field:
    flags = array.flags
    fortran = bool(flags.f_contiguous and not flags.c_contiguous)
    return Field(name, array.dtype, array.shape, fortran, 0, array.nbytes)


def _header(fields: list[Field]) -> bytes:
    entries: dict[str, object] = {}
    if notes := {f"numpy.{f.name}": note for f in fields if (note := _note(f))}:
        entries["__metadata__"] = dict(sorted(notes.items()))
    at = 0
    for field in fields:
        if field.name in entries or field.name == "__metadata__":
            raise FormatError(f"array name {field.name!r} is reserved or used twice")
        stored = _STORED[f"{field.dtype.kind}{field.dtype.itemsize}"]
        shape = [*field.shape, 2] if field.dtype.kind == "c" else list(field.shape)
        offsets = [at, at + field.nbytes]
        entries[field.name] = {"dtype": stored, "shape": shape, "data_offsets": offsets}
        at += field.nbytes
    text = _compact(entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _note(field: Field) -> str | None:
    """What numpy needs beyond safetensors' own dtype and shape, in the words of the npy format."""
    plain = _PLAIN[_STORED[f"{field.dtype.kind}{field.dtype.itemsize}"]]
    note: dict[str, object] = {}
    if field.dtype != plain:
        note["descr"] = field.dtype.str
    if field.fortran_order:
        note["fortran_order"] = True
    return _compact(note) if note else None


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _little_endian(array: NDArray[Any]) -> bytes:
    if array.dtype.byteorder == ">":
        array = array.byteswap()
    return array.tobytes("C")


def _fields(entries: dict[str, Any], notes: dict[str, str], start: int) -> list[Field]:
    fields = []
    for name, entry in entries.items():
        note = json.loads(notes.get(f"numpy.{name}", "{}"))
        dtype = _dtype(note["descr"]) if "descr" in note else _PLAIN[entry["dtype"]]
        shape = tuple(map(index, entry["shape"]))
        shape = shape[:-1] if dtype.kind == "c" else shape
        fortran = bool(note.get("fortran_order"))
        if not representable(dtype, shape) or (fortran and not has_fortran_order(shape)):
            raise ValueError(f"array {name!r}: {dtype} {shape}")
        nbytes = dtype.itemsize * prod(shape)
        fields.append(Field(name, dtype, shape, fortran, start, nbytes))
        start += nbytes
    return fields


def _dtype(descr: str) -> np.dtype[Any]:
    if not _DESCR.fullmatch(descr) or not supported(dtype := np.dtype(descr)):
        raise ValueError(f"not a dtype of ours: {descr!r}")
    return dtype


def has_fortran_order(shape: tuple[int, ...]) -> bool:
    """Whether the memory order of an array of `shape` makes a difference."""
    return 0 not in shape and sum(n > 1 for n in shape) > 1


def restore(member: bytes | memoryview, field: Field) -> NDArray[Any]:
    """One tensor of `member`, by a field of its schema; it may share the member's memory."""
    little = field.dtype.newbyteorder("<")
    count = field.nbytes // little.itemsize
    array = np.frombuffer(member, little, count, field.offset).reshape(field.shape)
    if field.dtype.byteorder == ">":
        array = array.byteswap().view(field.dtype)
    return np.asfortranarray(array) if field.fortran_order else array
