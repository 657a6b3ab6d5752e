"""Reading `.npz` archives that nobody vouches for. Nothing is ever unpickled.

An `.npz` is a zip of `.npy` files (numpy's format description: numpy.lib.format). We read the zip
with the standard library and the headers with numpy, and believe neither about sizes: an array is
taken only if its header, its bytes and the archive's directory agree.
"""

from __future__ import annotations

import io
import lzma
import struct
import tokenize
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fsmount.errors import FormatError, InvalidNameError, SourceError
from fsmount.formats import sample
from fsmount.formats.manifest import Text
from fsmount.model import check_key

_RESERVED = frozenset({"__metadata__", "__key__", "__valid__"})
_ENCRYPTED = 0x1
_BROKEN = (  # what zipfile and its decompressors raise for bytes that are no archive
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, NotImplementedError),
    *(OSError, OverflowError, RuntimeError, MemoryError, ValueError),
)
_NO_HEADER = (  # what numpy raises for bytes that are no header
    *(ValueError, TypeError, SyntaxError, tokenize.TokenError, OverflowError, RecursionError),
    MemoryError,
)


@dataclass(frozen=True, slots=True)
class Arrays:
    """The content of one archive: tensors, and 0-d text arrays sorted by name."""

    tensors: dict[str, NDArray[Any]]
    texts: tuple[Text, ...]


def read_npz(data: bytes) -> Arrays:
    """The arrays in the bytes of an `.npz`; SourceError that names the array otherwise."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            _check_members(members)
            arrays = {info.filename[:-4]: _read_member(archive, info) for info in members}
    except _BROKEN as error:
        raise SourceError(f"not a readable zip archive: {_cause(error)}") from error
    texts = [_text(name, array) for name, array in arrays.items() if array.dtype.kind in "US"]
    tensors = {name: array for name, array in arrays.items() if array.dtype.kind not in "US"}
    return Arrays(tensors, tuple(sorted(texts, key=lambda text: text.name)))


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
        raise SourceError(f"array {name!r} has a name that is no plain relative path") from error


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    name = info.filename[:-4]
    try:
        return _parse_npy(_read_bytes(archive, info))
    except SourceError as error:
        raise SourceError(f"array {name!r}: {error}") from error
    except _BROKEN as error:
        raise SourceError(f"array {name!r} can't be read: {_cause(error)}") from error


def _read_bytes(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """A member's bytes, of which there must be as many as the archive's directory says.

    zipfile gives what there is, and compares no checksum then.
    """
    data = archive.read(info)
    stored = info.compress_type == zipfile.ZIP_STORED
    if len(data) != info.file_size or (stored and info.compress_size != info.file_size):
        raise SourceError(f"the archive says {info.file_size} bytes, but {len(data)} follow")
    return data


def _cause(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _parse_npy(data: bytes) -> NDArray[Any]:
    start = _header_length(data)
    try:
        shape, fortran_order, dtype = _parse_header(data[:start])
    except _NO_HEADER as error:
        raise SourceError(f"not an npy header: {_cause(error)}") from error
    if not all(type(size) is int for size in shape):  # numpy takes True for 1
        raise SourceError(f"not an npy header: a shape {shape}")
    if dtype.hasobject:
        raise SourceError("an object array, which only unpickling could read")
    if dtype.kind not in "US" and not sample.supported(dtype):
        raise SourceError(f"dtype {dtype} has no portable form")
    if dtype.kind in "US" and (shape != () or not dtype.itemsize):
        raise SourceError(f"a text array {dtype} {shape}; only 0-d text becomes a column")
    if not sample.representable(dtype, shape) or start + dtype.itemsize * prod(shape) != len(data):
        raise SourceError(f"the header says {dtype} {shape}, but {len(data) - start} bytes follow")
    array = np.frombuffer(data, dtype, offset=start)
    return array.reshape(shape, order="F" if fortran_order else "C")


def _header_length(data: bytes) -> int:
    """Where the array's bytes begin, by what the file says."""
    width = 2 if data[6:7] == b"\1" else 4
    return 8 + width + int.from_bytes(data[8 : 8 + width], "little")


@lru_cache(maxsize=1024)  # the archives of a tree have few different headers
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    file = io.BytesIO(header)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy reads what Python 2 wrote, and complains
        match npy.read_magic(file):
            case (1, 0):
                return npy.read_array_header_1_0(file)
            case (2, 0):
                return npy.read_array_header_2_0(file)
            case version:
                # 3.0 differs from 2.0 in nothing but field names that are not Latin-1
                raise ValueError(f"version {version} is for structured dtypes only")


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
