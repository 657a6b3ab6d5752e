"""What of a file is in the page cache, and getting it out of there."""

from __future__ import annotations

import ctypes
import os

_CACHESTAT = 451  # the system call's number, the same on all machines that we run on; Linux 6.5
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Range(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _Counts(ctypes.Structure):  # struct cachestat of linux/mman.h
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")
    )


def cached(descriptor: int, size: int) -> int | None:
    """Bytes of the page cache that an open file's first `size` bytes take, in whole pages.

    None where the kernel can't say. A mounted file that is read by passthrough has no pages of its
    own: they are its object's.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    counts, beginning = _Counts(), _Range(0, size)
    failed = libc.syscall(
        ctypes.c_long(_CACHESTAT),
        ctypes.c_uint(descriptor),
        ctypes.byref(beginning),
        ctypes.byref(counts),
        ctypes.c_uint(0),
    )
    return None if failed else int(counts.cache) * _PAGE


def drop(path: str) -> None:
    """Ask the kernel to forget the pages of the inode at `path`; it may keep some."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def drop_all() -> None:
    """Drop all clean pages, names and inodes of this machine; needs root."""
    os.sync()
    with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
        file.write("3")
