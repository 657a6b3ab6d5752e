"""The tree of a version's fixed files as one flat file, which a server maps and is ready.

It is made of a version document and its table, and never rewritten. It is believed, so it lies
where only its user can write, or in memory:

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

import fcntl
import hashlib
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterator
from operator import le, lt
from struct import Struct

from fsmount.errors import FormatError
from fsmount.model import Digest, ObjectRef
from fsmount.private import open_private
from fsmount.vfs.filesystem import Usage
from fsmount.vfs.layout import Content, VersionFiles

_MAGIC = b"fsmpath3"  # another one whenever this format or what `version_tree` makes changes
_HEADER = Struct("=8sQQQQQQ")
_ORDER = 0x0102030405060708
_SUM = hashlib.sha256().digest_size
_DIRECTORY, _OBJECT, _BYTES = range(3)
_SLASH = b"\0"
_NAME = Struct("=Q24x")  # where a file's bytes begin, as long as a digest
_LARGEST = (1 << 63) - 1  # bytes of a file


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
        self._check()

    def _check(self) -> None:
        """Raise FormatError where numbers would lead astray: each walk goes on, and ends."""
        count = len(self._kinds)
        well = (
            count > 0
            and self._kinds[0] == _DIRECTORY
            and max(self._kinds) <= _BYTES
            and self._ends[0] == count == max(self._ends)
            and all(map(lt, range(count), self._ends))
            and self._offsets[0] == 0
            and self._offsets[count] == len(self._paths)
            and all(map(le, self._offsets, self._offsets[1:]))
            and max(self._links) < count
            and max(self._sizes) <= _LARGEST
            and all(map(self._has_bytes, self._inline()))
        )
        if not well:
            raise FormatError("path list: its numbers do not fit together")

    def _inline(self) -> Iterator[int]:
        """The places of files whose bytes are in the list."""
        kinds, place = bytes(self._kinds), -1
        while (place := kinds.find(_BYTES, place + 1)) >= 0:
            yield place

    def _has_bytes(self, place: int) -> bool:
        (at,) = _NAME.unpack(self._names[32 * place : 32 * place + 32])
        return int(at) + self._sizes[place] <= len(self._contents)

    def __len__(self) -> int:
        return len(self._kinds)

    def __contains__(self, place: int) -> bool:
        return 0 <= place < len(self._kinds)

    @property
    def usage(self) -> Usage:
        """What `statfs` says."""
        return Usage(self.blocks, len(self))

    def path(self, place: int) -> str:
        return _text(self._keys[place].replace(_SLASH, b"/"))

    def name(self, place: int) -> str:
        return _text(self._keys[place].rpartition(_SLASH)[2])

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


def _text(path: bytes) -> str:
    try:
        return path.decode()
    except UnicodeDecodeError:
        raise FormatError(f"path list: {path!r} is not UTF-8") from None


class _Keys:
    """The sorted paths as a sequence of bytes."""

    def __init__(self, offsets: memoryview, paths: memoryview) -> None:
        self._offsets = offsets
        self._paths = paths

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, place: int) -> bytes:
        return bytes(self._paths[self._offsets[place] : self._offsets[place + 1]])


def open_list(where: str | int) -> PathList:
    """Map the flat file at a path, or of a descriptor, which is closed; FormatError, OSError.

    All its bytes are checked. A file that somebody else could write, or cut, is not mapped.
    """
    fd = open_private(where) if isinstance(where, str) else where
    try:
        size = os.fstat(fd).st_size
        if size < _SUM:
            raise FormatError(f"{where}: too short")
        data = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    view = memoryview(data)
    if hashlib.sha256(view[:-_SUM]).digest() != view[-_SUM:]:
        raise FormatError(f"{where}: damaged")
    found = PathList(data)
    data.madvise(mmap.MADV_DONTNEED)  # what is used is mapped again; the rest is no memory of ours
    return found


def in_memory(data: bytes) -> int:
    """A descriptor of memory that holds `data`, for `open_list`; nobody can change or cut it."""
    fd = os.memfd_create("fsmount-paths", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
