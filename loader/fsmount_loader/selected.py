"""The selected rows of a version as arrays, and the file that processes of one node map them from.

The file: each column of `Rows`, and each array of `Schemas`, from a multiple of 64 bytes on, the
rest of `Selected` as JSON, and 24 bytes: the JSON's size, XXH3-64 of everything before, and a magic
number; little-endian.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from fsmount.errors import FormatError, LoadError
from fsmount_loader.order import Int64s
from fsmount_loader.schemas import Schemas

_MAGIC = b"fsmplan2"
_TAIL = 24
_ALIGNMENT = 64
_READ_AT_ONCE = 1 << 20
_COLUMNS: dict[str, np.dtype[Any]] = {
    "shard": np.dtype("<i4"), "offset": np.dtype("<i8"), "size": np.dtype("<i8"),
    "checksum": np.dtype("<u8"), "schema": np.dtype("<i4"), "number": np.dtype("<i8"),
}  # fmt: skip
_SCHEMA_TYPES = ("|u1", "<i8", "<i8", "<i4", "<i8", "<i8")  # of the arrays of Schemas


@dataclass(frozen=True, slots=True)
class Rows:
    """One entry a selected row, in the manifests' order. Offsets and sizes are bytes.

    Where they are mapped from a file, a pickled copy is its path.
    """

    shard: npt.NDArray[np.int32]  # place in the plan's shards; ascending
    offset: Int64s  # of the payload in its shard
    size: Int64s  # of the payload
    checksum: npt.NDArray[np.uint64]  # of the payload
    schema: npt.NDArray[np.int32]  # place in the layout's headers
    number: Int64s  # of the row in its manifest
    file: str | None = None

    def __len__(self) -> int:
        return len(self.shard)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.file is not None:
            return _rows_of, (self.file,)
        return Rows, tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    def empty(cls, count: int, file: str | None) -> Rows:
        """Rows to be filled in, in a new file or, without one, in this process's memory.

        Raises OSError if there is no room in a file, LoadError if there is none in memory.
        """
        size = _places(count)[-1]
        if file is None or size > sys.maxsize:
            return cls._in(_memory(count, size), count, None)
        with open(file, "xb+") as opened:
            os.posix_fallocate(opened.fileno(), 0, max(size, 1))  # a full disk is an error here
            return cls._in(mmap.mmap(opened.fileno(), max(size, 1)), count, file)

    def first(self, count: int) -> Rows:
        """The first `count` rows, in the file that these were in, or in their memory."""
        if count == len(self):
            return self
        if self.file is None:
            return Rows(*(getattr(self, name)[:count] for name in _COLUMNS))
        starts, fewer = _places(len(self)), _places(count)
        with open(self.file, "rb+") as opened:
            with mmap.mmap(opened.fileno(), 0) as memory:
                for start, here, dtype in zip(starts, fewer, _COLUMNS.values(), strict=False):
                    memory.move(here, start, count * dtype.itemsize)
            opened.truncate(fewer[-1])
            return Rows._in(mmap.mmap(opened.fileno(), 0), count, self.file)

    @classmethod
    def _in(cls, memory: mmap.mmap, count: int, file: str | None) -> Rows:
        starts = dict(zip(_COLUMNS, _places(count), strict=False))
        column = {n: np.frombuffer(memory, _COLUMNS[n], count, at) for n, at in starts.items()}
        return cls(**column, file=file)


@dataclass(frozen=True, slots=True)
class Selected:
    """The rows that a run reads, and what they point at."""

    rows: Rows
    shards: tuple[str, ...]  # paths, from the version's root
    shard_partition: npt.NDArray[np.int32]  # place of each shard's partition in the version
    rows_per_shard: Int64s
    schemas: Schemas  # that rows point at
    digest: str  # names the rows by their content

    def seal(self) -> None:
        """Complete the file that the rows lie in, so that `load` takes it. Raises OSError."""
        assert self.rows.file is not None  # noqa: S101 - rows in memory have no file
        about = {
            "rows": len(self.rows),
            "shards": self.shards,
            "shard_partition": self.shard_partition.tolist(),
            "rows_per_shard": self.rows_per_shard.tolist(),
            "schemas": [len(array) for array in self.schemas.arrays()],
            "digest": self.digest,
        }
        index = json.dumps(about).encode()
        with open(self.rows.file, "rb+") as file:
            file.seek(_places(len(self.rows))[-1])
            for array, kind in zip(self.schemas.arrays(), _SCHEMA_TYPES, strict=True):
                data = array.astype(kind, copy=False).tobytes()
                file.write(data + bytes(-len(data) % _ALIGNMENT))
            file.write(index + len(index).to_bytes(8, "little"))
            size = file.tell()
            file.seek(0)
            file.write(b"")  # flushes what is buffered
            checksum = _checksum(file.fileno(), size)
            file.seek(size)
            file.write(checksum.to_bytes(8, "little") + _MAGIC)

    @classmethod
    def load(cls, path: str) -> Selected:
        """Map a sealed file. FormatError if it is not one or is damaged, OSError if it is gone."""
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            end = len(memory) - _TAIL
            tail = memory[max(end, 0) :]
            index = int.from_bytes(tail[:8], "little")
            checksum = int.from_bytes(tail[8:16], "little")
            if end < 0 or tail[16:] != _MAGIC or _checksum(file.fileno(), end + 8) != checksum:
                raise FormatError(f"not a plan: {path}")
        about = json.loads(memory[end - index : end])
        return cls(
            rows=Rows._in(memory, about["rows"], path),
            shards=tuple(about["shards"]),
            shard_partition=np.array(about["shard_partition"], np.int32),
            rows_per_shard=np.array(about["rows_per_shard"], np.int64),
            schemas=_schemas_in(memory, _places(about["rows"])[-1], about["schemas"]),
            digest=about["digest"],
        )

    def at(self, file: str) -> Selected:
        """The same after the rows' file was renamed to `file`."""
        return replace(self, rows=replace(self.rows, file=file))


def bincount(values: npt.NDArray[np.int32], count: int) -> Int64s:
    """How often each of 0 … count - 1 stands in `values`, which are ascending."""
    return np.diff(np.searchsorted(values, np.arange(count + 1)))


def _memory(count: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, max(size, 1))
    except (OSError, OverflowError) as error:
        raise LoadError(f"a plan of {count} rows takes {size} bytes: {error}") from error


def _rows_of(file: str) -> Rows:
    return Selected.load(file).rows


def _places(count: int) -> Sequence[int]:
    """Where each column of `count` rows starts, and where the last one ends."""
    places = [0]
    for dtype in _COLUMNS.values():
        size = count * dtype.itemsize
        places.append(places[-1] + size + -size % _ALIGNMENT)
    return places


def _schemas_in(memory: mmap.mmap, start: int, lengths: Sequence[int]) -> Schemas:
    arrays = []
    for kind, length in zip(_SCHEMA_TYPES, lengths, strict=True):
        array = np.frombuffer(memory, kind, length, start)
        arrays.append(array)
        start += array.nbytes + -array.nbytes % _ALIGNMENT
    return Schemas.of_arrays(arrays)


def _checksum(file: int, size: int) -> int:
    """XXH3-64 of a file's first `size` bytes, read and not mapped so that memory stays small."""
    state, buffer = xxhash.xxh3_64(), memoryview(bytearray(_READ_AT_ONCE))
    at = 0
    while at < size:
        got = os.preadv(file, [buffer[: size - at]], at)
        if not got:
            break
        state.update(buffer[:got])
        at += got
    return state.intdigest()
