"""The tree of a version's fixed files as one flat file, which a server maps and is ready.

It is a cache, made of a version document and its table, and never rewritten:

    header      magic, byte order, places, bytes of paths and of contents, blocks, document's size
    kinds       1 byte a place: directory, object, or bytes that are in this file
    offsets     8 bytes a place and one more: where its path begins in `paths`
    ends        8 bytes a place: one past all that lies below it
    links       8 bytes a place: the directories directly in it
    sizes       8 bytes a place: of the file
    names       32 bytes a place: the object's digest, or where its bytes begin in `contents`
    paths       UTF-8, "/" as NUL, so that they are sorted
    contents    the bytes of the files that are no objects
    document    the version document
    digest      SHA-256 of all before

Numbers are of the machine's byte order; a file of another machine is not taken.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
from bisect import bisect_left
from collections.abc import Iterator
from struct import Struct

from fsmount.errors import FormatError
from fsmount.model import Digest, ObjectRef
from fsmount.vfs.filesystem import Usage
from fsmount.vfs.layout import Content, VersionFiles

_MAGIC = b"fsmpath2"  # another one whenever this format or what `version_tree` makes changes
_HEADER = Struct("=8sQQQQQQ")
_ORDER = 0x0102030405060708
_SUM = hashlib.sha256().digest_size
_DIRECTORY, _OBJECT, _BYTES = range(3)
_SLASH = b"\0"
_NAME = Struct("=Q24x")  # where a file's bytes begin, as long as a digest


def encode(tree: VersionFiles, usage: Usage, document: bytes) -> bytes:
    """The flat file of `tree`, with what `statfs` says and the document it was made for."""
    places = range(len(tree))
    paths = [tree.path(place).encode().replace(b"/", _SLASH) for place in places]
    inline: list[bytes] = []
    kinds, names, sizes = bytearray(), bytearray(), []
    at = 0
    for place in places:
        content = tree.content(place)
        if isinstance(content, ObjectRef):
            kinds.append(_OBJECT)
            names += bytes.fromhex(content.digest)
        else:
            kinds.append(_DIRECTORY if content is None else _BYTES)
            names += _NAME.pack(at)
            inline.append(content or b"")
            at += len(inline[-1])
        sizes.append(tree.size(place) or 0)
    offsets = [0]
    for path in paths:
        offsets.append(offsets[-1] + len(path))
    head = _HEADER.pack(_MAGIC, _ORDER, len(paths), offsets[-1], at, usage.blocks, len(document))
    numbers = (
        offsets,
        [tree.end(place) for place in places],
        [tree.subdirectories(place) for place in places],
        sizes,
    )
    packed = [Struct(f"={len(column)}Q").pack(*column) for column in numbers]
    data = b"".join([head, kinds, *packed, names, *paths, *inline, document])
    return data + hashlib.sha256(data).digest()


class PathList:
    """A flat file, mapped. A `Tree`; safe in any thread, and shared by processes that fork."""

    def __init__(self, data: memoryview | mmap.mmap) -> None:
        """Take `data` as it is: see `open_list`. Raises FormatError if it can't be one."""
        view = memoryview(data)
        if len(view) < _HEADER.size + _SUM:
            raise FormatError("path list: too short")
        magic, order, count, path_bytes, inline, self.blocks, document = _HEADER.unpack_from(view)
        if magic != _MAGIC or order != _ORDER:
            raise FormatError("path list: none of this machine")
        lengths = (count, 8 * count + 8, *(3 * (8 * count,)), 32 * count, path_bytes, inline)
        if _HEADER.size + sum(lengths) + document + _SUM != len(view):
            raise FormatError("path list: wrong length")
        sections, at = [], _HEADER.size
        for length in lengths:
            sections.append(view[at : at + length])
            at += length
        self._kinds = sections[0]
        self._offsets, self._ends, self._links, self._sizes = (s.cast("Q") for s in sections[1:5])
        self._names, self._paths, self._contents = sections[5:]
        self.document = bytes(view[at : at + document])
        self._keys = _Keys(self._offsets, self._paths)

    def __len__(self) -> int:
        return len(self._kinds)

    def __contains__(self, place: int) -> bool:
        return 0 <= place < len(self._kinds)

    @property
    def usage(self) -> Usage:
        """What `statfs` says."""
        return Usage(self.blocks, len(self))

    def path(self, place: int) -> str:
        return self._keys[place].replace(_SLASH, b"/").decode()

    def name(self, place: int) -> str:
        return self._keys[place].rpartition(_SLASH)[2].decode()

    def content(self, place: int) -> Content | None:
        kind, size = self._kinds[place], self._sizes[place]
        if kind == _DIRECTORY:
            return None
        name = self._names[32 * place : 32 * place + 32]
        if kind == _OBJECT:
            return ObjectRef(Digest(name.hex()), size)
        (at,) = _NAME.unpack(name)
        return bytes(self._contents[at : at + size])

    def size(self, place: int) -> int | None:
        return None if self._kinds[place] == _DIRECTORY else self._sizes[place]

    def is_directory(self, place: int) -> bool:
        return self._kinds[place] == _DIRECTORY

    def subdirectories(self, place: int) -> int:
        return self._links[place]

    def parent(self, place: int) -> int:
        return bisect_left(self._keys, self._keys[place].rpartition(_SLASH)[0])

    def child(self, place: int, name: str) -> int | None:
        try:
            wanted = name.encode()
        except UnicodeEncodeError:
            return None
        if _SLASH in wanted or b"/" in wanted or not wanted:
            return None
        if place:
            wanted = self._keys[place] + _SLASH + wanted
        end = self._ends[place]
        found = bisect_left(self._keys, wanted, place + 1, end)
        return found if found < end and self._keys[found] == wanted else None

    def children(self, place: int, start: int = 0) -> Iterator[tuple[int, int]]:
        here, end = max(place + 1, start), self._ends[place]
        while here < end:
            behind = self._ends[here]
            yield here, behind
            here = behind


class _Keys:
    """The sorted paths as a sequence of bytes."""

    def __init__(self, offsets: memoryview, paths: memoryview) -> None:
        self._offsets = offsets
        self._paths = paths

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, place: int) -> bytes:
        return bytes(self._paths[self._offsets[place] : self._offsets[place + 1]])


def _open(path: str) -> int:
    """A descriptor of the regular file `path`; a link, a FIFO or a device is a FormatError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
            raise FormatError(f"{path}: not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(f"{path}: not a regular file")
    return fd


def open_list(path: str) -> PathList:
    """Map the flat file `path`, all of whose bytes are checked; FormatError, OSError."""
    fd = _open(path)
    try:
        size = os.fstat(fd).st_size
        if size < _SUM:
            raise FormatError(f"{path}: too short")
        data = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    view = memoryview(data)
    if hashlib.sha256(view[:-_SUM]).digest() != view[-_SUM:]:
        raise FormatError(f"{path}: damaged")
    data.madvise(mmap.MADV_DONTNEED)  # what is used is mapped again; the rest is no memory of ours
    return PathList(data)
