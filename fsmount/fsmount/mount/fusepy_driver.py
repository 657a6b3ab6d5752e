"""The portable driver: libfuse 2 through fusepy.

A thin translation of paths to the nodes of a `vfs.FileSystem`. fusepy 3.0.1 has traps that would
break the first tenet: an exception without an errno becomes an empty read, a `memoryview` is
refused, a ValueError becomes EINVAL. All of them are met in one place, `_Fuse._wrapper`: whatever
goes wrong in a call, also in fusepy's own part of it, is the errno that `faults.errno_of` gives.

libfuse's times to live are per mount, so the smallest of the file system's is used. What libfuse
is not asked for (locks, extended attributes) the kernel does itself, or refuses with ENOTSUP.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import fuse

from fsmount.errors import MountError
from fsmount.vfs.faults import errno_of
from fsmount.vfs.filesystem import (
    BLOCK,
    ROOT_NODE,
    Attr,
    Entry,
    FileSystem,
    Handle,
    Kind,
    os_error,
)

SUBTYPE = "fsmount"
_LONGEST = 365 * 86400.0  # seconds; what "for ever" is to libfuse
_NAME_MAX = 255


@dataclass(frozen=True, slots=True)
class FuseOptions:
    """What a mount is called, and who may look into it."""

    source: str  # the first column of /proc/mounts
    allow_other: bool = False


def serve(
    filesystem: FileSystem, mountpoint: str, options: FuseOptions, started: Callable[[], None]
) -> None:
    """Mount and serve until the file system is unmounted or the process gets SIGTERM or SIGINT.

    Must be called in the main thread. `started` is called from another thread, and must return
    quickly, when the kernel has begun to ask. Raises MountError where libfuse refuses; its reason
    is on stderr.
    """
    try:
        mountpoint.encode()
    except UnicodeEncodeError:
        raise MountError(f"mountpoint is not UTF-8: {mountpoint!r}") from None
    try:
        _Fuse(
            Adapter(filesystem, started), mountpoint, raw_fi=True, **_arguments(filesystem, options)
        )
    except RuntimeError as error:
        raise MountError(f"libfuse could not mount on {mountpoint}") from error


def _arguments(filesystem: FileSystem, options: FuseOptions) -> dict[str, object]:
    ttl = min(filesystem.ttl, _LONGEST)
    return {
        "foreground": True,
        "ro": True,
        "default_permissions": True,
        "use_ino": True,
        "attr_timeout": ttl,
        "entry_timeout": ttl,
        "negative_timeout": 0,
        "fsname": _escaped(options.source),
        "subtype": SUBTYPE,
        "allow_other": options.allow_other,
    }


def _escaped(text: str) -> str:
    """`text` as the value of a libfuse option."""
    return text.replace("\\", "\\\\").replace(",", "\\,")


class _Fuse(fuse.FUSE):  # type: ignore[misc]
    """fusepy with its error handling replaced."""

    @staticmethod
    def _wrapper(func: Callable[..., Any], *args: Any) -> int:
        try:
            return func(*args) or 0
        except UnicodeDecodeError as error:
            # No name of a version is other than UTF-8, so there is none by this name.
            named = bool(args) and error.object == args[0]
            return -(errno.ENOENT if named else errno_of(error, func.__name__))
        except BaseException as error:  # noqa: BLE001 - what leaves this function is lost
            return -errno_of(error, f"{func.__name__} {_path(args)}")


def _keep_from_children() -> None:
    """libfuse leaves its descriptor open for programs that this process might run."""
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > 2:
            with suppress(OSError):  # the listing's own
                os.set_inheritable(fd, False)


def _path(args: tuple[Any, ...]) -> str:
    path = args[0] if args else None
    return os.fsdecode(path) if isinstance(path, bytes) else "(open file)"


class Adapter:
    """fusepy's operations on paths, made of a file system's on nodes.

    An operation that is not here is answered by libfuse or the kernel. Handles are numbers, since
    libfuse leaves out the path where it has one.
    """

    use_ns = True
    flag_nullpath_ok = 1
    flag_nopath = 1

    def __init__(self, filesystem: FileSystem, started: Callable[[], None]) -> None:
        self._filesystem = filesystem
        self._started = started
        self._handles: dict[int, Handle] = {}
        self._directories: dict[int, tuple[int, int]] = {}  # node and its parent's
        self._numbers = itertools.count(1)

    def __call__(self, operation: str, *args: Any) -> Any:
        return getattr(self, operation)(*args)

    def init(self, path: str) -> None:
        del path
        _keep_from_children()
        self._started()

    def access(self, path: str, mode: int) -> int:
        self._resolve(path)
        if mode & os.W_OK:
            raise os_error(errno.EROFS, path)
        return 0

    def getattr(self, path: str | None, info: Any = None) -> dict[str, int]:
        if path is None:
            return stat_of(self._filesystem.getattr(self._handles[info.fh].node).attr)
        return stat_of(self._resolve(path).attr)

    def readlink(self, path: str) -> str:
        return self._filesystem.readlink(self._resolve(path).node)

    def statfs(self, path: str) -> dict[str, int]:
        del path
        usage = self._filesystem.statfs()
        return {
            "f_bsize": BLOCK,
            "f_frsize": BLOCK,
            "f_blocks": usage.blocks,
            "f_files": usage.files,
            "f_namemax": _NAME_MAX,
        }

    def opendir(self, path: str) -> int:
        node = self._resolve(path).node
        number = next(self._numbers)
        self._directories[number] = (node, self._resolve(os.path.dirname(path)).node)
        return number

    def readdir(self, path: str | None, number: int) -> Iterator[tuple[str, dict[str, int], int]]:
        """All names. libfuse keeps them with the handle and gives them offsets itself."""
        del path
        node, parent = self._directories[number]
        entries = self._filesystem.readdir(node)
        yield ".", {"st_ino": node, "st_mode": Kind.DIRECTORY}, 0
        yield "..", {"st_ino": parent, "st_mode": Kind.DIRECTORY}, 0
        for entry in entries:
            yield entry.name, {"st_ino": entry.node, "st_mode": entry.kind}, 0

    def releasedir(self, path: str | None, number: int) -> int:
        del path
        del self._directories[number]
        return 0

    def open(self, path: str, info: Any) -> int:
        if info.flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            raise os_error(errno.EROFS, path)
        handle = self._filesystem.open(self._resolve(path).node)
        number = next(self._numbers)
        self._handles[number] = handle
        info.fh = number
        info.keep_cache = handle.keep_cache
        return 0

    def read(self, path: str | None, size: int, offset: int, info: Any) -> bytes:
        del path
        return self._handles[info.fh].read(size, offset)

    def release(self, path: str | None, info: Any) -> int:
        del path
        self._handles.pop(info.fh).close()
        return 0

    def refuse(self, path: str, *args: object) -> int:
        """Whatever would change something."""
        del args
        raise os_error(errno.EROFS, path)

    chmod = chown = create = link = mkdir = mknod = rename = refuse
    rmdir = setxattr = removexattr = symlink = truncate = unlink = utimens = write = refuse

    def _resolve(self, path: str) -> Entry:
        node, entry = ROOT_NODE, None
        for name in path.split("/"):
            if name:
                entry = self._filesystem.lookup(node, name)
                node = entry.node
        return self._filesystem.getattr(node) if entry is None else entry


def stat_of(attr: Attr) -> dict[str, int]:
    """An Attr as fusepy wants it."""
    return {
        "st_ino": attr.node,
        "st_mode": attr.mode,
        "st_nlink": attr.nlink,
        "st_uid": attr.uid,
        "st_gid": attr.gid,
        "st_size": attr.size,
        "st_blocks": attr.blocks,
        "st_blksize": BLOCK,
        "st_atime": attr.time_ns,
        "st_mtime": attr.time_ns,
        "st_ctime": attr.time_ns,
    }
