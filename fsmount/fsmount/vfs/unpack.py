"""From a sample's payload to the file that is shown of it, in memory, a piece at a time.

Runs in a helper process: the memory that it takes, apart from the file that it makes, is a few
megabytes, and the largest array whose order has to be changed.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash
import zstandard

from fsmount.errors import FormatError, IntegrityError
from fsmount.formats import sample as samples
from fsmount.formats.manifest import header_of
from fsmount.formats.sample import Field, Schema
from fsmount.vfs import memory_file, npz
from fsmount.vfs.reads import ObjectHandle
from fsmount.vfs.sample_list import Location, SampleList

_CHUNK = 1 << 20  # bytes; what is smaller is read at once
_FRAME_HEADER = 18  # bytes at most
_WHOLE = 4 << 20  # bytes of a decoded member; one that is smaller is decoded at once


class _Reader(Protocol):
    def readinto(self, buffer: memoryview, /) -> int: ...


def member(shard: ObjectHandle, found: SampleList, row: int) -> int:
    """A memory file of the decoded member of a row, and its descriptor; IntegrityError."""
    location = found.location(row)
    reader = _decoded(shard, location)
    header = _header(reader, found, row)
    fd = memory_file.create()
    try:
        memory_file.write(fd, header, 0)
        at = len(header)
        for piece in _pieces(reader, location.raw_size - at):
            memory_file.write(fd, piece, at)
            at += len(piece)
        _check_end(reader)
        memory_file.seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def archive(shard: ObjectHandle, found: SampleList, row: int) -> int:
    """A memory file of the npz of a row, and its descriptor; IntegrityError, FormatError."""
    texts = found.texts(row)
    reader = _decoded(shard, found.location(row))
    schema = samples.read_schema(_header(reader, found, row))
    planned = npz.members(schema.fields, {name: descr for name, descr, _ in texts})
    fd = memory_file.create()
    try:
        crcs = _write_tensors(fd, reader, schema, planned)
        _check_end(reader)
        places = {member.name: member for member in planned}
        for name, descr, value in texts:
            data = npz.text_bytes(name, descr, value)
            memory_file.write(fd, data, places[name].data_at)
            crcs[name] = zlib.crc32(data, zlib.crc32(places[name].header))
        for place in planned:
            memory_file.write(fd, npz.local_header(place, crcs[place.name]), place.start)
        end = planned[-1].end if planned else 0
        memory_file.write(fd, npz.directory(planned, crcs), end)
        memory_file.seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_tensors(
    fd: int, reader: _Reader, schema: Schema, planned: Sequence[npz.Member]
) -> dict[str, int]:
    """Write the data of each tensor to its place; the CRC-32 of the npy files by name."""
    places = {member.name: member for member in planned}
    crcs = {}
    for field in schema.fields:
        at, crc = places[field.name].data_at, zlib.crc32(places[field.name].header)
        for piece in _restored(reader, field):
            memory_file.write(fd, piece, at)
            crc = zlib.crc32(piece, crc)
            at += len(piece)
        crcs[field.name] = crc
    return crcs


def _restored(reader: _Reader, field: Field) -> Iterator[bytes | memoryview]:
    """The bytes of an array as numpy had them, in its own byte order and memory order."""
    if field.dtype.byteorder != ">" and not field.fortran_order:
        yield from _pieces(reader, field.nbytes)
        return
    data = b"".join(map(bytes, _pieces(reader, field.nbytes)))
    array = np.frombuffer(data, field.dtype.newbyteorder("<")).reshape(field.shape)
    if field.dtype.byteorder == ">":
        array = array.byteswap()
    yield array.tobytes("F" if field.fortran_order else "C")


def _pieces(reader: _Reader, nbytes: int) -> Iterator[memoryview]:
    """The next `nbytes` bytes; a piece is good until the next one."""
    buffer = memoryview(bytearray(min(nbytes, _CHUNK)))
    while nbytes:
        done = reader.readinto(buffer[:nbytes])
        if not done:
            raise IntegrityError("the payload ends too early")
        yield buffer[:done]
        nbytes -= done


def _header(reader: _Reader, found: SampleList, row: int) -> bytes:
    """The member up to its data, which must be the one that the manifest names."""
    expected = header_of(found.schema(row))
    if found.location(row).raw_size < len(expected):
        raise FormatError("a tensor member's header is longer than the member")
    if b"".join(map(bytes, _pieces(reader, len(expected)))) != expected:
        raise IntegrityError("the tensor member's header is not the one in the manifest")
    return expected


def _check_end(reader: _Reader) -> None:
    if reader.readinto(memoryview(bytearray(1))):
        raise IntegrityError("the payload goes on behind the member")


class _Payload:
    """A payload as a file that is read from its beginning."""

    def __init__(self, shard: ObjectHandle, location: Location) -> None:
        self._shard = shard
        self._at = location.offset
        self._end = location.offset + location.size

    def read(self, size: int = -1) -> bytes:
        wanted = self._end - self._at if size < 0 else min(size, self._end - self._at)
        data = self._shard.read(wanted, self._at)
        self._at += wanted
        return data


def _decoded(shard: ObjectHandle, location: Location) -> _Reader:
    """The member of a payload, which has the right checksum."""
    digest = xxhash.xxh3_64()
    payload, data = _Payload(shard, location), b""
    while piece := payload.read(_CHUNK):
        digest.update(piece)
        data = piece
    if digest.intdigest() != location.checksum:
        raise IntegrityError("it is damaged: wrong checksum")
    if location.size <= _CHUNK and location.raw_size <= _WHOLE:
        return io.BytesIO(samples.decompress(data, location.raw_size))
    return _Streamed(shard, location)


class _Streamed:
    """A large member, decoded as it is read."""

    def __init__(self, shard: ObjectHandle, location: Location) -> None:
        samples.check_raw_size(_Payload(shard, location).read(_FRAME_HEADER), location.raw_size)
        payload: Any = _Payload(shard, location)  # nothing but `read` is asked of it
        self._stream = zstandard.ZstdDecompressor().stream_reader(payload, read_size=_CHUNK)

    def readinto(self, buffer: memoryview, /) -> int:
        try:
            return self._stream.readinto(buffer)
        except zstandard.ZstdError as error:
            raise IntegrityError(f"a payload that can't be decompressed: {error}") from error
