"""What "a version as a file system" is: the one interface that drivers translate to a protocol.

It has no write methods: a version never changes. A node is named by a number, `slot << 40 | place
+ 1`; the numbers of one tree are the same after a restart. Each answer carries its time to live.

Failures are an OSError with an errno (no such name, not a directory, …) or an FsmountError, whose
class carries one; `faults.errno_of` is the only place where they become numbers. All methods may be
called from any thread at any time.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

FOREVER = math.inf  # the time to live of what can't change
MOMENT = 1.0  # seconds: the time to live of what can grow or move
ROOT_NODE = 1  # slot 0, place 0

_PLACE_BITS = 40
_PLACE_MASK = (1 << _PLACE_BITS) - 1
BLOCK = 4096  # preferred size of I/O and unit of `Usage`, bytes


def node_number(slot: int, place: int) -> int:
    """The number of the node at `place` in `slot`."""
    if not 0 <= place < _PLACE_MASK:
        raise OverflowError(f"no place {place} in a slot")
    return slot << _PLACE_BITS | place + 1


def slot_and_place(node: int) -> tuple[int, int]:
    """The slot and place that a node's number is made of."""
    return node >> _PLACE_BITS, (node & _PLACE_MASK) - 1


class Kind(IntEnum):
    """What a node is; the values are the type bits of a mode."""

    DIRECTORY = stat.S_IFDIR
    FILE = stat.S_IFREG
    SYMLINK = stat.S_IFLNK


@dataclass(frozen=True, slots=True)
class Owner:
    """Whom the nodes of a mount seem to belong to, and which permission bits are taken away."""

    uid: int
    gid: int
    umask: int = 0

    @classmethod
    def of_process(cls) -> Owner:
        """The effective user and group of this process."""
        return cls(os.geteuid(), os.getegid())

    def mode(self, kind: Kind) -> int:
        """Type and permission bits: 0444 for files, 0555 for directories, 0777 for links."""
        if kind is Kind.SYMLINK:
            return kind | 0o777
        return kind | (0o555 if kind is Kind.DIRECTORY else 0o444) & ~self.umask


@dataclass(frozen=True, slots=True)
class Attr:
    """What `stat` says of a node. All three times are the version's creation."""

    node: int
    kind: Kind
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int  # bytes; 0 for directories, so that `du` is the sum of the files
    time_ns: int

    @property
    def blocks(self) -> int:
        """Units of 512 bytes."""
        return -(-self.size // 512)


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer to `lookup` or `getattr`, and for how many seconds it holds."""

    attr: Attr
    ttl: float

    @property
    def node(self) -> int:
        return self.attr.node


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name of a directory; `offset` is where a listing goes on behind it."""

    name: str
    node: int
    kind: Kind
    offset: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What `statfs` says; a version is always full. Blocks are of BLOCK bytes."""

    blocks: int
    files: int


class Handle(Protocol):
    """An open file.

    `keep_cache` says that its bytes are those of the last time the node was opened, so that what a
    kernel has cached is still true. `ready` says that `read` needs nothing but memory. `descriptor`
    is one of a regular file with exactly the handle's bytes, as they were checked, and good until
    `close`; None where there is no such file.
    """

    node: int
    keep_cache: bool

    @property
    def descriptor(self) -> int | None: ...

    @property
    def ready(self) -> bool: ...

    def read(self, size: int, offset: int) -> bytes:
        """The `size` bytes at `offset`, fewer only at the file's end. Never a short read."""
        ...

    def close(self) -> None:
        """Give back what the handle holds."""
        ...


class FileSystem(Protocol):
    """A read-only tree of nodes below ROOT_NODE."""

    @property
    def ttl(self) -> float:
        """The smallest time to live of all positive answers, seconds."""
        ...

    def lookup(self, parent: int, name: str) -> Entry:
        """The child `name` of a directory; ENOENT, ENOTDIR."""
        ...

    def parent(self, node: int) -> int:
        """The directory that a directory lies in, the root's is itself; ENOTDIR, ESTALE."""
        ...

    def settled(self, node: int) -> bool:
        """Whether all that `lookup`, `getattr` and `readdir` say of a node and the names in it is
        in memory and can never change. Any number may be asked about; costs nothing.
        """
        ...

    def ready(self, node: int) -> bool:
        """Whether `open` of a file, or `readdir` of a directory that is settled, is done at once
        and needs nothing but memory. Any number may be asked about; costs nothing.
        """
        ...

    def grows(self, node: int) -> bool:
        """Whether names may appear in a directory. Any number may be asked about; costs nothing."""
        ...

    def growing(self) -> Collection[int]:
        """The directories that grow, as far as there are some by now; may need the store."""
        ...

    def getattr(self, node: int) -> Entry:
        """What `stat` says of a node; ESTALE for a number that names nothing."""
        ...

    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]:
        """The names of a directory behind `offset`, without "." and ".."; ENOTDIR.

        Offsets stay valid: a listing resumed at the offset of an entry goes on behind that entry.
        """
        ...

    def open(self, node: int) -> Handle:
        """A handle to read a file with; EISDIR, EIO."""
        ...

    def readlink(self, node: int) -> str:
        """Where a symbolic link points to; EINVAL if it is none."""
        ...

    def path(self, node: int) -> str:
        """Where a node lies in the mount, for people; may need the store. ESTALE."""
        ...

    def xattrs(self, node: int) -> dict[str, str]:
        """Where a node comes from, as extended attributes by name (`user.fsmount.…`); ESTALE.

        `digest` of an object, `partition` of a shard or manifest, `version` (if it has a tag) and
        `table` of all nodes of a version.
        """
        ...

    def statfs(self) -> Usage:
        """The size of the whole tree."""
        ...


def os_error(code: int, about: object) -> OSError:
    """The OSError (of the subclass that belongs to `code`) for a node or name."""
    return OSError(code, os.strerror(code), str(about))


def absent(name: object) -> OSError:
    """There is no such name."""
    return os_error(errno.ENOENT, name)


def not_a_directory(name: object) -> OSError:
    """A name was looked for in something that is no directory."""
    return os_error(errno.ENOTDIR, name)


def stale(node: int) -> OSError:
    """A number that names nothing."""
    return os_error(errno.ESTALE, f"node {node}")
