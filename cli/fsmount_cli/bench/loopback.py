"""`python -P -m fsmount_cli.bench.loopback MOUNTPOINT FILE …`: the least that fusepy can do.

It shows each FILE as 0, 1, … and answers a read by nothing but pread: what a Python file system on
libfuse could reach at best, without any of its own work.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import fuse

_NAMES = ("st_mode", "st_nlink", "st_size", "st_mtime", "st_ctime", "st_atime", "st_uid", "st_gid")


class _Loopback(fuse.Operations):  # type: ignore[misc] # fusepy has no types
    def __init__(self, root: str, files: list[str]) -> None:
        self._files = {f"/{number}": path for number, path in enumerate(files)}
        self._root = os.stat(root)  # before it is mounted

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        del fh
        found = self._root if path == "/" else os.stat(self._path(path))
        return {name: getattr(found, name) for name in _NAMES}

    def readdir(self, path: str, fh: int) -> list[str]:
        del path, fh
        return [".", "..", *(name[1:] for name in self._files)]

    def open(self, path: str, flags: int) -> int:
        return os.open(self._path(path), flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        del path
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> int:
        del path
        os.close(fh)
        return 0

    def _path(self, path: str) -> str:
        try:
            return self._files[path]
        except KeyError:
            raise fuse.FuseOSError(errno.ENOENT) from None


def main(mountpoint: str, *files: str) -> None:
    """Serve until SIGTERM."""
    loopback = _Loopback(mountpoint, list(files))
    fuse.FUSE(loopback, mountpoint, foreground=True, ro=True, fsname="fsmount-bench-loopback")


if __name__ == "__main__":
    main(*sys.argv[1:])
