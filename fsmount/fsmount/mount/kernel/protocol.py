"""The FUSE wire protocol: layouts, numbers, requests from bytes and answers to bytes. Pure.

From the Linux user API, include/uapi/linux/fuse.h, protocol 7.31 to 7.44. All numbers are of the
machine's byte order. Only what a read-only file system needs is here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import lru_cache
from struct import Struct

from fsmount.vfs.filesystem import BLOCK, Attr, Entry, Kind, Usage

MAJOR, MINOR = 7, 40  # 7.40 has passthrough; a kernel with less says so, and is asked for less
OLDEST_MINOR = 23  # from here on all layouts below are as they are

IN_HEADER = Struct("=IIQQIIIHH")  # len, opcode, unique, node, uid, gid, pid, extensions, padding
OUT_HEADER = Struct("=IiQ")  # len, error, unique
INIT_IN = Struct("=IIIII44x")  # major, minor, max_readahead, flags, flags2
INIT_OUT = Struct("=IIIIHHIIHHIIH22x")
ATTR = Struct("=QQQQQQIIIIIIIIII")
ENTRY_OUT = Struct("=QQQQII")  # node, generation, entry and attr validity; an ATTR follows
ATTR_OUT = Struct("=QII")  # validity: seconds, nanoseconds; padding; an ATTR follows
OPEN_IN = Struct("=II")  # flags, open_flags
OPEN_OUT = Struct("=QIi")  # handle, open flags, backing id
READ_IN = Struct("=QQIIQII")  # handle, offset, size, read flags, lock owner, flags, padding
RELEASE_IN = Struct("=QIIQ")  # handle, flags, release flags, lock owner
STATFS_OUT = Struct("=QQQQQIIII24x")
ACCESS_IN = Struct("=II")  # mask, padding
GETXATTR_IN = Struct("=II")  # size, padding; of GETXATTR the name follows
GETXATTR_OUT = Struct("=II")  # size, padding; where a size of 0 asked for it
INTERRUPT_IN = Struct("=Q")  # unique of the request that is interrupted
INVAL_INODE_OUT = Struct("=Qqq")  # node, first byte, how many; 0 is all that follow
DIRENT = Struct("=QQII")  # inode, offset, length of name, type; the name follows, padded to 8
BACKING_MAP = Struct("=iIQ")  # descriptor, flags, padding

MIN_READ_BUFFER = 8192
NAME_MAX = 255
_PADDING = [bytes(-length % 8) for length in range(8)]
RESENT = 1 << 63  # in a request's unique: it was sent to another server before
_LONGEST = 10 * 365 * 86400  # seconds; what "for ever" is on the wire


class Opcode(IntEnum):
    """What is asked."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    COPY_FILE_RANGE = 47
    TMPFILE = 51


SILENT = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET})  # the kernel expects no answer


class InitFlag(IntFlag):
    """What kernel and server agree on; those from bit 32 on travel in `flags2`."""

    ASYNC_READ = 1 << 0
    EXPORT_SUPPORT = 1 << 4
    SPLICE_WRITE = 1 << 7
    SPLICE_MOVE = 1 << 8
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    ABORT_ERROR = 1 << 21
    MAX_PAGES = 1 << 22
    NO_OPENDIR_SUPPORT = 1 << 24
    INIT_EXT = 1 << 30
    PASSTHROUGH = 1 << 37
    HAS_RESEND = 1 << 39


class OpenFlag(IntFlag):
    """How the kernel treats an open file or directory."""

    KEEP_CACHE = 1 << 1
    CACHE_DIR = 1 << 3
    NOFLUSH = 1 << 5
    PASSTHROUGH = 1 << 7


class Notify(IntEnum):
    """What a server tells the kernel unasked."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    RESEND = 7


def _ioctl(number: int, size: int) -> int:
    """_IOW(229, number, size)."""
    return 1 << 30 | size << 16 | 229 << 8 | number


BACKING_OPEN = _ioctl(1, BACKING_MAP.size)
BACKING_CLOSE = _ioctl(2, 4)


@dataclass(frozen=True, slots=True)
class Init:
    """What a kernel offers when a connection begins."""

    major: int
    minor: int
    max_readahead: int
    flags: InitFlag


@dataclass(frozen=True, slots=True)
class InitAnswer:
    """What a server takes of it."""

    minor: int
    max_readahead: int  # bytes
    flags: InitFlag
    max_background: int  # requests that nobody waits for, at once
    max_write: int  # bytes
    max_pages: int  # of one request
    max_stack_depth: int  # 1: files of a plain file system may back ours


def parse_init(body: memoryview) -> Init:
    """The body of an INIT request. A kernel older than 7.36 sends its first four numbers only."""
    padded = bytes(body[: INIT_IN.size]).ljust(INIT_IN.size, b"\0")
    major, minor, max_readahead, low, high = INIT_IN.unpack(padded)
    flags = low | (high << 32 if low & InitFlag.INIT_EXT else 0)
    return Init(major, minor, max_readahead, InitFlag(flags))


def pack_init(answer: InitAnswer) -> bytes:
    """The body of the answer to INIT."""
    flags = int(answer.flags)
    return INIT_OUT.pack(
        MAJOR,
        answer.minor,
        answer.max_readahead,
        flags & 0xFFFFFFFF,
        answer.max_background,
        answer.max_background,
        answer.max_write,
        1,  # nanosecond: the unit of times
        answer.max_pages,
        0,
        flags >> 32,
        answer.max_stack_depth,
        0,
    )


def pack_header(unique: int, length: int, error: int = 0) -> bytes:
    """The header of an answer with a body of `length` bytes; `error` is an errno or 0."""
    return OUT_HEADER.pack(OUT_HEADER.size + length, -error, unique)


def pack_notify(code: Notify, body: bytes = b"") -> bytes:
    """A notification."""
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), code, 0) + body


def pack_inval_inode(node: int) -> bytes:
    """The notification to drop attributes and pages of a node; a listing is in its pages."""
    return pack_notify(Notify.INVAL_INODE, INVAL_INODE_OUT.pack(node, 0, 0))


def pack_attr(attr: Attr) -> bytes:
    """struct fuse_attr."""
    seconds, nanoseconds = _split(attr.time_ns)
    return ATTR.pack(
        attr.node,
        attr.size,
        attr.blocks,
        seconds,
        seconds,
        seconds,
        nanoseconds,
        nanoseconds,
        nanoseconds,
        attr.mode,
        attr.nlink,
        attr.uid,
        attr.gid,
        0,
        BLOCK,
        0,
    )


def pack_entry(entry: Entry) -> bytes:
    """The answer to a lookup, whose name and attributes hold equally long."""
    seconds, nanoseconds = _validity(entry.ttl)
    head = ENTRY_OUT.pack(entry.node, 0, seconds, seconds, nanoseconds, nanoseconds)
    return head + pack_attr(entry.attr)


def pack_absent(ttl: float) -> bytes:
    """The answer to a lookup of a name that is not there, and will not be for `ttl` seconds."""
    seconds, nanoseconds = _validity(ttl)
    return ENTRY_OUT.pack(0, 0, seconds, 0, nanoseconds, 0) + bytes(ATTR.size)


def pack_attr_answer(entry: Entry) -> bytes:
    """The answer to a getattr."""
    seconds, nanoseconds = _validity(entry.ttl)
    return ATTR_OUT.pack(seconds, nanoseconds, 0) + pack_attr(entry.attr)


def pack_statfs(usage: Usage) -> bytes:
    """The answer to a statfs: full."""
    return STATFS_OUT.pack(usage.blocks, 0, 0, usage.files, 0, BLOCK, NAME_MAX, BLOCK, 0)


def pack_dirent(node: int, kind: Kind, name: bytes, offset: int) -> bytes:
    """One name of a listing that goes on at `offset`."""
    return DIRENT.pack(node, offset, len(name), kind >> 12) + name + _PADDING[len(name) % 8]


UNTOLD = bytes(ENTRY_OUT.size + ATTR.size)  # before a dirent: its attributes are not told here


@lru_cache(16)  # all nodes of a version have one time
def _split(time_ns: int) -> tuple[int, int]:
    """Seconds and nanoseconds."""
    return divmod(time_ns, 10**9)


@lru_cache(16)
def _validity(ttl: float) -> tuple[int, int]:
    """Seconds and nanoseconds."""
    fraction, seconds = math.modf(min(ttl, _LONGEST))
    return int(seconds), int(fraction * 1e9)
