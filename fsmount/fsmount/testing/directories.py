"""Directory streams as C has them, with what Python hides: inode, "." and "..", tell and seek."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass

_NAME_AT = 19  # bytes before d_name in the struct dirent of Linux with 64-bit offsets


@dataclass(frozen=True, slots=True)
class RawEntry:
    """One struct dirent; `type` is 0 where the file system does not tell."""

    name: bytes
    inode: int
    type: int


class DirectoryStream:
    """opendir(3) and its companions; a context manager and an iterator of entries."""

    def __init__(self, path: str) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.opendir.restype = ctypes.c_void_p
        self._libc.readdir.restype = ctypes.c_void_p
        self._libc.telldir.restype = ctypes.c_long
        handle = self._libc.opendir(os.fsencode(path))
        if not handle:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        self._stream = ctypes.c_void_p(handle)

    def __enter__(self) -> DirectoryStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._libc.closedir(self._stream)

    def __iter__(self) -> Iterator[RawEntry]:
        return self

    def __next__(self) -> RawEntry:
        ctypes.set_errno(0)
        address = self._libc.readdir(self._stream)
        if not address:
            if ctypes.get_errno():
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            raise StopIteration
        head = ctypes.string_at(address, _NAME_AT)
        name = ctypes.string_at(address + _NAME_AT)
        return RawEntry(name, int.from_bytes(head[:8], "little"), head[18])

    def tell(self) -> int:
        """The place behind the last entry."""
        return int(self._libc.telldir(self._stream))

    def seek(self, place: int) -> None:
        """Go on behind a place that `tell` gave."""
        self._libc.seekdir(self._stream, ctypes.c_long(place))

    def rewind(self) -> None:
        """Begin again."""
        self._libc.rewinddir(self._stream)
