"""The members of a zip archive in pieces of bounded size, whatever the archive says of itself.

zipfile reads the archive's directory; its members are inflated here, since it inflates bzip2 and
LZMA by the whole (700 bytes of bzip2 may hold a gigabyte). Formats: PKWARE's APPNOTE.TXT.
"""

from __future__ import annotations

import bz2
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, Protocol

PIECE = 1 << 20  # bytes that are inflated at a time
_DIRECTORY_MAX = 16 << 20  # bytes of an archive's directory: some 100,000 members
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_MAGIC = b"PK\3\4"
_LZMA_HEADER = struct.Struct("<2BH")
_LZMA_PROPERTIES = struct.Struct("<BI")
_LZMA_LEAST_DICTIONARY = 4096
_UTF8 = 0x800


class _Inflater(Protocol):
    @property
    def eof(self) -> bool:
        """Whether the stream has ended."""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """At most `max_length` bytes; what is left of the input is kept for the next call."""


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """The archive in `file`; BadZipFile and the other errors of zipfile if it is none."""
    return zipfile.ZipFile(_Limited(file))


def pieces(file: BinaryIO, info: zipfile.ZipInfo, size: int = PIECE) -> Iterator[bytes]:
    """The bytes of a member, at most `size` in a piece: as many as there are, not as are declared.

    Raises BadZipFile, NotImplementedError and the errors of the decompressors.
    """
    at, left = _begin(file, info), info.compress_size
    if info.compress_type == zipfile.ZIP_STORED:
        yield from _stored(file, at, left, size)
    elif info.compress_type == zipfile.ZIP_LZMA:
        inflater, used = _lzma(file, info)
        yield from _inflated(inflater, _stored(file, at + used, left - used, size), size)
    else:
        yield from _inflated(_inflater(info.compress_type), _stored(file, at, left, size), size)


def _stored(file: BinaryIO, at: int, left: int, size: int) -> Iterator[bytes]:
    while left > 0:
        file.seek(at)
        data = file.read(min(size, left))
        if not data:
            return
        yield data
        at, left = at + len(data), left - len(data)


def _inflated(inflater: _Inflater, chunks: Iterator[bytes], size: int) -> Iterator[bytes]:
    for chunk in chunks:
        data = inflater.decompress(chunk, size)
        while data:
            yield data
            if inflater.eof:
                return
            data = inflater.decompress(b"", size)


class _Deflate:
    """zlib's object, with the interface of those of bz2 and lzma."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(-zlib.MAX_WBITS)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


def _inflater(method: int) -> _Inflater:
    if method == zipfile.ZIP_DEFLATED:
        return _Deflate()
    if method == zipfile.ZIP_BZIP2:
        return bz2.BZ2Decompressor()
    raise NotImplementedError(f"compression method {method}, which numpy can't read either")


def _lzma(file: BinaryIO, info: zipfile.ZipInfo) -> tuple[_Inflater, int]:
    """An inflater by the properties in front of the data, and the bytes that they take.

    The dictionary need not be larger than what it is for.
    """
    version = file.read(_LZMA_HEADER.size)
    _, _, length = _LZMA_HEADER.unpack(version)
    packed, dictionary = _LZMA_PROPERTIES.unpack(file.read(length))
    rest, lc = divmod(packed, 9)
    pb, lp = divmod(rest, 5)
    least = max(_LZMA_LEAST_DICTIONARY, min(dictionary, info.file_size))
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": least, "lc": lc, "lp": lp, "pb": pb}]
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters), len(version) + length


def _begin(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Where a member's data begins; BadZipFile unless the member lies where the directory says."""
    file.seek(info.header_offset)
    fixed = file.read(_LOCAL_HEADER.size)
    if len(fixed) < _LOCAL_HEADER.size or fixed[:4] != _MAGIC:
        raise zipfile.BadZipFile("no member where the archive's directory says")
    flags, name_size, extra_size = (_LOCAL_HEADER.unpack(fixed)[i] for i in (2, 9, 10))
    name = file.read(name_size).decode("utf-8" if flags & _UTF8 else "cp437")
    if name != info.orig_filename:
        raise zipfile.BadZipFile(f"the archive's directory has another name for {name!r}")
    return file.seek(extra_size, os.SEEK_CUR)


class _Limited:
    """A file that is never read by the gigabyte because its last bytes say so."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > _DIRECTORY_MAX:
            raise zipfile.BadZipFile(f"a directory of {size} bytes, over {_DIRECTORY_MAX}")
        return self._file.read(size)

    def close(self) -> None:
        """Leave the file open: it is not ours."""
