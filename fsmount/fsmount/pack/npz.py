"""Reading `.npz` archives that nobody vouches for. Nothing is ever unpickled.

An `.npz` is a zip of `.npy` files (numpy's format description: numpy.lib.format). An array is taken
only if its header, its bytes and the archive's directory agree. The directory's sizes are bounded
before anything is inflated, and each array is inflated to its place in the tensor member, so that
reading takes little more memory than the member.
"""

from __future__ import annotations

import lzma
import struct
import tokenize
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.lib import format as npy
from numpy.typing import NDArray

from fsmount.errors import FormatError, IntegrityError, InvalidNameError, SourceError, shortened
from fsmount.formats import sample
from fsmount.formats.manifest import Text
from fsmount.formats.sample import Field, Schema
from fsmount.model import check_key
from fsmount.pack.unzip import open_zip, pieces

_RESERVED = frozenset({"__metadata__", "__key__", "__valid__"})
_ENCRYPTED = 0x1
_HEADER_MAX = 10_000  # bytes of an npy header: numpy's own limit
_HEAD = 256  # bytes of a member that are looked at first; most headers end at 128
_TEXT_MAX = 16 << 20  # bytes of a text array, which goes into the manifest
_BROKEN = (  # what zipfile and the decompressors raise for bytes that are no archive
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, NotImplementedError),
    *(OSError, OverflowError, RuntimeError, MemoryError, ValueError),
)
_NO_HEADER = (  # what numpy raises for bytes that are no header
    *(ValueError, TypeError, SyntaxError, tokenize.TokenError, OverflowError, RecursionError),
    MemoryError,
)


@dataclass(frozen=True, slots=True)
class Arrays:
    """The content of one archive: its tensors as one member, and 0-d texts sorted by name."""

    member: memoryview
    schema: Schema
    texts: tuple[Text, ...]

    @property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """The tensors by name, decoded from the member."""
        return sample.decode(self.member)


@dataclass(frozen=True, slots=True)
class _Array:
    """An array as its npy header has it, and where its bytes are."""

    info: zipfile.ZipInfo
    start: int  # of its data in the npy file
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool

    @property
    def name(self) -> str:
        return self.info.filename[:-4]

    @property
    def field(self) -> Field:
        """The tensor as a schema has it, wherever it is put."""
        fortran = self.fortran_order and sample.has_fortran_order(self.shape)
        return Field(
            self.name, self.dtype, self.shape, fortran, 0, self.info.file_size - self.start
        )


def read_npz(file: BinaryIO, limit: int) -> Arrays:
    """The arrays in an `.npz` that inflates to `limit` bytes at most.

    Raises SourceError that names the array, and IntegrityError if the member does not decode to
    the very bytes that were inflated.
    """
    try:
        with open_zip(file) as archive:
            members = archive.infolist()
    except _BROKEN as error:
        raise SourceError(f"not a readable zip archive: {_cause(error)}") from error
    _check_members(members)
    size = sum(info.file_size for info in members)
    if size > limit:
        raise SourceError(
            f"its arrays have {size:,} bytes, more than the {limit:,} that a sample may have "
            "(--max-sample-size)"
        )
    arrays = [_read_header(file, info) for info in members]
    texts = [_read_text(file, array) for array in arrays if array.dtype.kind in "US"]
    member, schema = _read_tensors(file, [a for a in arrays if a.dtype.kind not in "US"])
    return Arrays(member, schema, tuple(sorted(texts, key=lambda text: text.name)))


def _check_members(members: list[zipfile.ZipInfo]) -> None:
    names = set()
    for info in members:
        name = info.filename[:-4]
        if not info.filename.endswith(".npy") or not name:
            raise SourceError(f"member {info.filename!r} is not an array")
        if name in _RESERVED:
            raise SourceError(f"array {name!r} has a reserved name")
        _check_path(name)
        if info.filename in names:
            raise SourceError(f"array {name!r} is in the archive twice")
        if info.flag_bits & _ENCRYPTED:
            raise SourceError(f"array {name!r} is encrypted")
        names.add(info.filename)


def _check_path(name: str) -> None:
    """An array's name becomes a path again where an archive is rebuilt and unpacked."""
    try:
        check_key(name)
    except InvalidNameError as error:
        raise SourceError(
            f"array {shortened(name)!r} has a name that can't be a file's path "
            f"({shortened(str(error))}): rename the array"
        ) from error


def _cause(error: Exception) -> str:
    return shortened(" ".join(str(error).split()) or type(error).__name__)


def _read_header(file: BinaryIO, info: zipfile.ZipInfo) -> _Array:
    name = info.filename[:-4]
    try:
        return _parse_npy(file, info)
    except SourceError as error:
        raise SourceError(f"array {name!r}: {error}") from error
    except _BROKEN as error:
        raise SourceError(f"array {name!r} can't be read: {_cause(error)}") from error


def _parse_npy(file: BinaryIO, info: zipfile.ZipInfo) -> _Array:
    stored = info.compress_type == zipfile.ZIP_STORED
    if stored and info.compress_size != info.file_size:
        raise _sizes_differ(info, info.compress_size)
    head = _head(file, info)
    start = _header_length(head)
    if start > _HEADER_MAX + 12:
        raise SourceError(
            f"an npy header of {start} bytes; only structured dtypes need one of over "
            f"{_HEADER_MAX}, and they have no portable form: save each of its fields as an array"
        )
    try:
        shape, fortran_order, dtype = _parse_header(head[:start])
    except _NO_HEADER as error:
        raise SourceError(f"not an npy header: {_cause(error)}") from error
    if not all(type(size) is int for size in shape):  # numpy takes True for 1
        raise SourceError(f"not an npy header: a shape {shortened(str(shape))}")
    _check_dtype(dtype, shape)
    follow = info.file_size - start
    if not sample.representable(dtype, shape) or dtype.itemsize * prod(shape) != follow:
        what = shortened(f"{dtype} {shape}")
        raise SourceError(f"the header says {what}, but {follow} bytes follow")
    return _Array(info, start, dtype, shape, fortran_order)


def _head(file: BinaryIO, info: zipfile.ZipInfo) -> bytes:
    """The first bytes of a member, with its npy header if that is not too long."""
    head = b""
    for piece in pieces(file, info, _HEAD):
        head += piece
        if len(head) >= min(_header_length(head), _HEADER_MAX + 12):
            break
    if len(head) > info.file_size:
        raise SourceError(f"the archive says {info.file_size} bytes, but more follow")
    return head


def _check_dtype(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if dtype.hasobject:
        raise SourceError("an object array, which only unpickling could read")
    if dtype.kind in "US":
        if shape != () or not 0 < dtype.itemsize <= _TEXT_MAX:
            what = shortened(f"{dtype} {shape}")
            raise SourceError(
                f"a text array {what}; only 0-d text of up to {_TEXT_MAX >> 20} MiB becomes a "
                "column: put the rest into the sidecar"
            )
    elif dtype.names is None and dtype.kind == "V":
        raise SourceError(
            f"dtype {dtype} has no portable form: bare bytes, as which numpy saves bfloat16, "
            "float8 and others that it does not know; save their bits, x.view(numpy.uint8) or "
            "uint16, and view them as what they are after loading"
        )
    elif not sample.supported(dtype):
        raise SourceError(f"dtype {shortened(str(dtype))} has no portable form")


def _header_length(data: bytes) -> int:
    """Where the array's bytes begin, by what the file says."""
    width = 2 if data[6:7] == b"\1" else 4
    return 8 + width + int.from_bytes(data[8 : 8 + width], "little")


@lru_cache(maxsize=1024)  # the archives of a tree have few different headers
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    file = BytesIO(header)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy reads what Python 2 wrote, and complains
        match npy.read_magic(file):
            case (1, 0):
                return npy.read_array_header_1_0(file)
            case (2, 0) | (3, 0):  # which differ in how the names of fields are encoded
                return npy.read_array_header_2_0(file)
            case version:
                raise ValueError(f"version {version} is not known")


def _sizes_differ(info: zipfile.ZipInfo, size: int) -> SourceError:
    return SourceError(f"the archive says {info.file_size} bytes, but {size} follow")


def _copy(file: BinaryIO, array: _Array, target: memoryview) -> None:
    """Fill `target` with the array's data; there must be as much as the archive's directory says.

    Raises SourceError naming the array.
    """
    size, crc = 0, 0
    try:
        for piece in pieces(file, array.info):
            crc = zlib.crc32(piece, crc)
            if size + len(piece) > array.info.file_size:
                raise _sizes_differ(array.info, size + len(piece))
            data = memoryview(piece)[max(0, array.start - size) :]
            at = max(0, size - array.start)
            target[at : at + len(data)] = data
            size += len(piece)
        if size != array.info.file_size:
            raise _sizes_differ(array.info, size)
    except SourceError as error:
        raise SourceError(f"array {array.name!r}: {error}") from error
    except _BROKEN as error:
        raise SourceError(f"array {array.name!r} can't be read: {_cause(error)}") from error
    if crc != array.info.CRC:
        raise SourceError(f"array {array.name!r} can't be read: its checksum differs")


def _read_tensors(file: BinaryIO, arrays: list[_Array]) -> tuple[memoryview, Schema]:
    by_name = {array.name: array for array in arrays}
    fields = tuple(array.field for array in arrays)
    try:
        schema = sample.schema_of(fields)
    except FormatError as error:
        raise SourceError(str(error)) from error
    member = memoryview(np.empty(schema.raw_size, np.uint8))  # type: ignore[arg-type]
    member[: len(schema.header)] = schema.header
    digests = {}
    for field in schema.fields:
        place = member[field.offset :][: field.nbytes]
        _copy(file, by_name[field.name], place)
        digests[field.name] = xxhash.xxh3_128_digest(place)
        _make_portable(place, field)
    _check_decoded(member, fields, digests)
    return member, schema


def _make_portable(data: memoryview, field: Field) -> None:
    """Bring a tensor's bytes, in place, from its own byte and memory order into little-endian C."""
    if field.dtype.byteorder == ">":
        width = field.dtype.itemsize // (2 if field.dtype.kind == "c" else 1)
        np.frombuffer(data, f"u{width}").byteswap(inplace=True)
    if field.fortran_order:
        whole = np.frombuffer(data, f"V{field.dtype.itemsize}")
        whole[:] = whole.reshape(field.shape, order="F").copy(order="C").reshape(-1)


def _check_decoded(
    member: memoryview, fields: tuple[Field, ...], digests: dict[str, bytes]
) -> None:
    """Raise IntegrityError unless `member` decodes to the arrays that were put into it."""
    schema = sample.read_schema(member)
    places = {field.name: field for field in schema.fields}
    if places.keys() != {field.name for field in fields} or schema.raw_size != len(member):
        raise IntegrityError(f"arrays {sorted(places)} instead of {sorted(digests)}")
    for field in fields:
        array = sample.restore(member, places[field.name])
        same = (array.dtype, array.shape, array.flags.fnc) == (
            field.dtype,
            field.shape,
            field.fortran_order,
        )
        data = (array.T if array.flags.fnc else array).reshape(-1).view(np.uint8)
        digest = xxhash.xxh3_128_digest(data)  # type: ignore[arg-type]
        if not same or digest != digests.get(field.name):
            raise IntegrityError(f"array {field.name!r} does not survive encoding")


def _read_text(file: BinaryIO, array: _Array) -> Text:
    data = bytearray(array.dtype.itemsize)
    _copy(file, array, memoryview(data))
    return _text(array.name, np.frombuffer(data, array.dtype).reshape(()))


def _text(name: str, array: NDArray[Any]) -> Text:
    """A 0-d text array as its exact dtype and its text, from which it can be made again."""
    little = array.byteswap() if array.dtype.byteorder == ">" else array
    try:
        text = little.tobytes().decode("utf-32-le" if array.dtype.kind == "U" else "utf-8")
        text = text.rstrip("\0")
        restored = np.array(text if array.dtype.kind == "U" else text.encode(), array.dtype)
    except UnicodeDecodeError as error:
        raise SourceError(f"array {name!r}: a text that is not Unicode: {error}") from error
    if restored.tobytes() != array.tobytes():
        raise SourceError(f"array {name!r}: a text that numpy does not give back exactly")
    try:
        return Text(name, array.dtype.str, text)
    except FormatError as error:
        raise SourceError(f"{error}: {array.dtype.itemsize} bytes") from error
