"""The fixed files of a version: document, checksums, table, manifests and shards."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from fsmount.model import ObjectRef
from fsmount.paths import SHARDS, partition_of
from fsmount.vfs.attrs import Attrs
from fsmount.vfs.filesystem import (
    DirEntry,
    Entry,
    Handle,
    Kind,
    absent,
    node_number,
    not_a_directory,
    os_error,
    slot_and_place,
    stale,
)
from fsmount.vfs.layout import Content
from fsmount.vfs.reads import BytesHandle, ObjectReader, Verify
from fsmount.vfs.tree import Tree

_SHARDS = f"{SHARDS}/"


class FixedFiles:
    """A tree as nodes of one slot, place for place.

    Shards are checked as the reader does. What is small and decides what else is read, the table
    and the manifests, is always hashed.
    """

    def __init__(
        self,
        tree: Tree[Content],
        *,
        slot: int,
        attrs: Attrs,
        reader: ObjectReader,
        prefix: str,
    ) -> None:
        """`prefix` stands before the paths in messages."""
        self._tree = tree
        self._slot = slot
        self._attrs = attrs
        self._reader = reader
        self._prefix = prefix

    def lookup(self, parent: int, name: str) -> Entry:
        place = self._directory(parent)
        found = self._tree.child(place, name)
        if found is None:
            raise absent(f"{self._tree.path(place)}/{name}")
        return self._entry(found)

    def getattr(self, node: int) -> Entry:
        return self._entry(self._place(node))

    def parent(self, node: int) -> int:
        return node_number(self._slot, self._tree.parent(self._directory(node)))

    def settled(self, node: int) -> bool:
        del node
        return True

    def ready(self, node: int) -> bool:
        """Whether it is no object."""
        place = slot_and_place(node)[1]
        return place in self._tree and not isinstance(self._tree.content(place), ObjectRef)

    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]:
        return self._list(self._directory(node), offset)

    def open(self, node: int) -> Handle:
        place = self._place(node)
        content = self._tree.content(place)
        if content is None:
            raise os_error(errno.EISDIR, self._tree.path(place))
        if isinstance(content, ObjectRef):
            path = self._tree.path(place)
            verify = Verify.SIZE if path.startswith(_SHARDS) else Verify.OPEN
            return self._reader.open(content, self._prefix + path, node, verify)
        return BytesHandle(node, content)

    def path(self, node: int) -> str:
        return f"{self._prefix}{self._tree.path(self._place(node))}".rstrip("/")

    def xattrs(self, node: int) -> dict[str, str]:
        """`digest` and `partition`, without the prefix that all names have."""
        place = self._place(node)
        content = self._tree.content(place)
        if not isinstance(content, ObjectRef):
            return {}
        partition = partition_of(self._tree.path(place))
        digest = {"digest": f"sha256:{content.digest}"}
        return digest if partition is None else {**digest, "partition": partition}

    def _list(self, place: int, offset: int) -> Iterator[DirEntry]:
        tree = self._tree
        for child, behind in tree.children(place, offset):
            kind = Kind.DIRECTORY if tree.is_directory(child) else Kind.FILE
            yield DirEntry(tree.name(child), node_number(self._slot, child), kind, behind)

    def _place(self, node: int) -> int:
        place = slot_and_place(node)[1]
        if place not in self._tree:
            raise stale(node)
        return place

    def _directory(self, node: int) -> int:
        place = self._place(node)
        if not self._tree.is_directory(place):
            raise not_a_directory(self._tree.path(place))
        return place

    def _entry(self, place: int) -> Entry:
        node = node_number(self._slot, place)
        size = self._tree.size(place)
        if size is None:
            return self._attrs.directory(node, 2 + self._tree.subdirectories(place))
        return self._attrs.file(node, size)
