"""Requests of the kernel, translated to calls of a file system, and what comes of them to bytes.

Node numbers are those of the file system, so nothing is remembered of what the kernel looked up. An
open file's handle is the number of its OPEN request; where this server did not open it (another one
did, and died) the file is opened again when it is read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from fsmount.errors import FsmountError
from fsmount.mount.kernel import protocol
from fsmount.mount.kernel.backing import CACHED
from fsmount.mount.kernel.protocol import RESENT, Opcode, OpenFlag
from fsmount.vfs.filesystem import (
    FOREVER,
    DirEntry,
    FileSystem,
    Handle,
    Kind,
    os_error,
)

_CHANGES = frozenset(
    {
        Opcode.SETATTR,
        Opcode.SYMLINK,
        Opcode.MKNOD,
        Opcode.MKDIR,
        Opcode.UNLINK,
        Opcode.RMDIR,
        Opcode.RENAME,
        Opcode.LINK,
        Opcode.WRITE,
        Opcode.SETXATTR,
        Opcode.REMOVEXATTR,
        Opcode.CREATE,
        Opcode.FALLOCATE,
        Opcode.RENAME2,
        Opcode.COPY_FILE_RANGE,
        Opcode.TMPFILE,
    }
)
_ASKS_NODE = frozenset(
    {
        Opcode.LOOKUP,
        Opcode.GETATTR,
        Opcode.GETXATTR,
        Opcode.LISTXATTR,
        Opcode.OPENDIR,
    }
)
_LISTS = frozenset({Opcode.READDIR, Opcode.READDIRPLUS})
_MAY_WAIT = frozenset({Opcode.READLINK, Opcode.STATFS})
_DOTS = (b".", b"..")

Head = Callable[[DirEntry], bytes]  # what stands before a name in a listing


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `body` is what follows its header, and good only while it is being answered."""

    opcode: int
    unique: int
    node: int
    body: memoryview | bytes


class Backing(Protocol):
    """Who decides how an open node is read; see `backing.OpenNodes`."""

    def open(self, node: int, opener: int, fd: int, device: int) -> int: ...
    def release(self, node: int, opener: int) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A handle and, where it has a descriptor, the size of the file behind that."""

    handle: Handle
    size: int


@dataclass(frozen=True, slots=True)
class Range:
    """The part of an open file that a READ asks for."""

    file: OpenFile
    size: int
    offset: int


class Answers:
    """All operations but INIT. Safe in any thread."""

    def __init__(
        self,
        filesystem: FileSystem,
        backing: Backing | None,
        *,
        xattrs: bool = False,
        on_listed: Callable[[int], None] | None = None,
    ) -> None:
        """`backing` is None where passthrough is not to be had. `xattrs`: whether extended
        attributes are shown; an `ls -l` asks for those of each file, each time. `on_listed` is
        called with each growing directory that is listed, if the kernel opens directories without
        asking and keeps all listings; None if it asks.
        """
        self._filesystem = filesystem
        self._backing = backing
        self._on_listed = on_listed
        self._open: dict[int, OpenFile] = {}
        self._table: dict[int, Callable[[Request], bytes | Range]] = {
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._getattr,
            Opcode.READLINK: self._readlink,
            Opcode.OPEN: self._open_file,
            Opcode.READ: self._read,
            Opcode.STATFS: self._statfs,
            Opcode.RELEASE: self._release,
            Opcode.OPENDIR: self._opendir,
            Opcode.READDIR: self._readdir,
            Opcode.READDIRPLUS: self._readdirplus,
            Opcode.RELEASEDIR: _nothing,
            Opcode.ACCESS: _access,
            Opcode.DESTROY: _nothing,
        }
        if xattrs:
            self._table |= {Opcode.GETXATTR: self._getxattr, Opcode.LISTXATTR: self._listxattr}

    def may_wait(self, request: Request) -> bool:
        """Whether the answer may need the store, and so take any time."""
        if request.opcode in _ASKS_NODE:
            return not self._filesystem.settled(request.node)
        if request.opcode in _LISTS:
            return not (
                self._filesystem.settled(request.node) and self._filesystem.ready(request.node)
            )
        if request.opcode == Opcode.OPEN:
            return not self._filesystem.ready(request.node)
        if request.opcode == Opcode.READ:
            file = self._open.get(protocol.READ_IN.unpack_from(request.body)[0])
            return file is None or not file.handle.ready
        return request.opcode in _MAY_WAIT

    def answer(self, request: Request) -> bytes | Range:
        """The body of the answer; whatever it raises is for `errno_of`."""
        operation = self._table.get(request.opcode)
        if operation is None:
            code = errno.EROFS if request.opcode in _CHANGES else errno.ENOSYS
            raise os_error(code, _name(request.opcode))
        return operation(request)

    def undo(self, request: Request) -> None:
        """The answer to `request` reaches nobody: give back what an OPEN holds."""
        if request.opcode == Opcode.OPEN:
            self._close(request.node, request.unique & ~RESENT)

    def _lookup(self, request: Request) -> bytes:
        name = bytes(request.body).rstrip(b"\0")
        node = request.node
        if name in _DOTS:
            here = node if name == b"." else self._filesystem.parent(node)
            return protocol.pack_entry(self._filesystem.getattr(here))
        try:
            return protocol.pack_entry(self._filesystem.lookup(node, name.decode()))
        except (FileNotFoundError, UnicodeDecodeError):
            # No name of a version is other than UTF-8.
            if self._filesystem.settled(node):
                return protocol.pack_absent(FOREVER)
            raise os_error(errno.ENOENT, name) from None

    def _getattr(self, request: Request) -> bytes:
        return protocol.pack_attr_answer(self._filesystem.getattr(request.node))

    def _readlink(self, request: Request) -> bytes:
        return self._filesystem.readlink(request.node).encode()

    def _statfs(self, request: Request) -> bytes:
        del request
        return protocol.pack_statfs(self._filesystem.statfs())

    def _getxattr(self, request: Request) -> bytes:
        name = bytes(request.body[protocol.GETXATTR_IN.size :]).rstrip(b"\0")
        value = self._filesystem.xattrs(request.node).get(name.decode(errors="replace"))
        if value is None:
            raise os_error(errno.ENODATA, name)
        return _sized(request, value.encode())

    def _listxattr(self, request: Request) -> bytes:
        names = self._filesystem.xattrs(request.node)
        return _sized(request, b"".join(name.encode() + b"\0" for name in names))

    # Directories.

    def _opendir(self, request: Request) -> bytes:
        if self._on_listed is not None:  # stands for all directories from now on
            raise os_error(errno.ENOSYS, _name(request.opcode))
        settled = self._filesystem.settled(request.node)
        flags = OpenFlag.CACHE_DIR | OpenFlag.KEEP_CACHE if settled else OpenFlag(0)
        return protocol.OPEN_OUT.pack(0, flags, 0)

    def _readdir(self, request: Request) -> bytes:
        return self._list(request, b"", lambda entry: b"")

    def _readdirplus(self, request: Request) -> bytes:
        return self._list(request, protocol.UNTOLD, self._attributes)

    def _attributes(self, entry: DirEntry) -> bytes:
        """What stands before a name; attributes that take time, or can't be told, are left out."""
        if self._filesystem.settled(entry.node):
            with suppress(FsmountError):  # of that name alone: who asks for it is told
                return protocol.pack_entry(self._filesystem.getattr(entry.node))
        return protocol.UNTOLD

    def _list(self, request: Request, blank: bytes, head: Head) -> bytes:
        """As many entries as fit."""
        _, offset, size, *_ = protocol.READ_IN.unpack_from(request.body)
        found = bytearray()
        for packed in self._entries(request.node, offset, blank, head):
            if len(found) + len(packed) > size:
                break
            found += packed
        if self._on_listed is not None and self._filesystem.grows(request.node):
            self._on_listed(request.node)
        return bytes(found)

    def _entries(self, node: int, offset: int, blank: bytes, head: Head) -> Iterator[bytes]:
        """The entries behind `offset`; `blank` stands before "." and "..", `head` makes the rest's.

        Offsets 1 and 2 are those behind the dots, so the file system's are moved by two.
        """
        for at in range(offset, len(_DOTS)):
            inode = node if at == 0 else self._filesystem.parent(node)
            yield blank + protocol.pack_dirent(inode, Kind.DIRECTORY, _DOTS[at], at + 1)
        for entry in self._filesystem.readdir(node, max(0, offset - len(_DOTS))):
            yield head(entry) + protocol.pack_dirent(
                entry.node, entry.kind, entry.name.encode(), entry.offset + len(_DOTS)
            )

    # Files.

    def _open_file(self, request: Request) -> bytes:
        flags, _ = protocol.OPEN_IN.unpack_from(request.body)
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            raise os_error(errno.EROFS, f"node {request.node}")
        opener = request.unique & ~RESENT
        handle = self._filesystem.open(request.node)
        backing_id = self._back(request.node, opener, handle)
        if backing_id != CACHED:
            handle.close()
            how = OpenFlag.PASSTHROUGH | OpenFlag.NOFLUSH
            return protocol.OPEN_OUT.pack(opener, how, backing_id)
        self._open[opener] = _open_file(handle)
        how = OpenFlag.NOFLUSH | (OpenFlag.KEEP_CACHE if handle.keep_cache else OpenFlag(0))
        return protocol.OPEN_OUT.pack(opener, how, 0)

    def _back(self, node: int, opener: int, handle: Handle) -> int:
        if self._backing is None or handle.descriptor is None:
            return CACHED
        try:
            device = os.fstat(handle.descriptor).st_dev
            return self._backing.open(node, opener, handle.descriptor, device)
        except BaseException:
            handle.close()
            raise

    def _read(self, request: Request) -> Range:
        number, offset, size, *_ = protocol.READ_IN.unpack_from(request.body)
        file = self._open.get(number)
        if file is None:
            file = self._open_again(request.node, number)
        return Range(file, size, offset)

    def _open_again(self, node: int, number: int) -> OpenFile:
        fresh = _open_file(self._filesystem.open(node))
        kept = self._open.setdefault(number, fresh)
        if kept is not fresh:
            fresh.handle.close()
        return kept

    def _release(self, request: Request) -> bytes:
        self._close(request.node, protocol.RELEASE_IN.unpack_from(request.body)[0])
        return b""

    def _close(self, node: int, number: int) -> None:
        file = self._open.pop(number, None)
        if file is not None:
            with suppress(OSError):  # it was only read
                file.handle.close()
        if self._backing is not None:
            self._backing.release(node, number)


def _open_file(handle: Handle) -> OpenFile:
    fd = handle.descriptor
    return OpenFile(handle, 0 if fd is None else os.fstat(fd).st_size)


def _access(request: Request) -> bytes:
    mask, _ = protocol.ACCESS_IN.unpack_from(request.body)
    if mask & os.W_OK:
        raise os_error(errno.EROFS, f"node {request.node}")
    return b""


def _sized(request: Request, value: bytes) -> bytes:
    """What is asked for: the value, or how long it is."""
    size, _ = protocol.GETXATTR_IN.unpack_from(request.body)
    if size == 0:
        return protocol.GETXATTR_OUT.pack(len(value), 0)
    if size < len(value):
        raise os_error(errno.ERANGE, f"node {request.node}")
    return value


def _nothing(request: Request) -> bytes:
    del request
    return b""


def _name(opcode: int) -> str:
    return Opcode(opcode).name if opcode in set(Opcode) else f"operation {opcode}"
