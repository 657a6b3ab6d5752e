"""Bytes in memory that have a descriptor, so that processes can hand them to each other."""

from __future__ import annotations

import fcntl
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class MemoryFile:
    """Owns a descriptor of such bytes, which are freed with the last object that refers to them.

    A reader that holds it can go on whatever a cache does with it. Safe in any thread.
    """

    __slots__ = ("fd", "size")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size

    @classmethod
    def of(cls, data: bytes) -> MemoryFile:
        """A memory file that holds `data`."""
        fd = create()
        write(fd, data, 0)
        return cls(fd)

    def read(self, size: int, offset: int) -> bytes:
        """The `size` bytes at `offset`, fewer only at the end."""
        return os.pread(self.fd, max(0, min(size, self.size - offset)), offset)

    def __del__(self) -> None:
        os.close(self.fd)


def create() -> int:
    """A descriptor of a new, empty memory file."""
    return os.memfd_create("fsmount", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def write(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def seal(fd: int) -> None:
    """Have the kernel refuse every further change; who maps the bytes can rely on them."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
