"""One version as a file system."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from fsmount.formats import document as documents
from fsmount.formats.keyset import Keyset
from fsmount.model import Version, VersionDocument
from fsmount.vfs.attrs import Attrs, nanoseconds
from fsmount.vfs.files import FixedFiles
from fsmount.vfs.filesystem import (
    BLOCK,
    FOREVER,
    DirEntry,
    Entry,
    Handle,
    Kind,
    Owner,
    Usage,
    node_number,
    os_error,
    slot_and_place,
    stale,
)
from fsmount.vfs.keysets import KeysetFiles
from fsmount.vfs.layout import KEYSETS, SAMPLES, size_of, version_tree
from fsmount.vfs.reads import ObjectReader
from fsmount.vfs.samples import SampleFiles

SLOTS = 4  # of one version: fixed files, key-sets, sample files, sample directories
_SUBDIRECTORIES = 3  # of a version's root: keysets, manifests, shards


@dataclass(frozen=True, slots=True)
class Look:
    """How versions are shown."""

    owner: Owner
    list_samples: bool = False  # or reached by name only


class _Part(Protocol):
    def lookup(self, parent: int, name: str) -> Entry: ...
    def getattr(self, node: int) -> Entry: ...
    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]: ...
    def open(self, node: int) -> Handle: ...


def root_entry(document: VersionDocument, root: int, look: Look) -> Entry:
    """The attributes of a version's root, which need nothing but its document."""
    attrs = Attrs(look.owner, nanoseconds(document.created_at))
    return attrs.directory(root, 2 + _SUBDIRECTORIES + look.list_samples)


class VersionTree:
    """A FileSystem of one version; its nodes are in SLOTS slots from `first_slot` on."""

    def __init__(
        self,
        version: Version,
        keysets: Callable[[], Mapping[str, Keyset]],
        reader: ObjectReader,
        look: Look,
        *,
        first_slot: int = 0,
        prefix: str = "",
    ) -> None:
        """`keysets` gives the version's key-sets as they are now; `prefix` names it in messages.

        Raises FormatError if the partitions' ids clash.
        """
        tree = version_tree(version, documents.encode(version.document))
        attrs = Attrs(look.owner, nanoseconds(version.document.created_at))
        self._document = version.document
        self._look = look
        self._first_slot = first_slot
        self._root = node_number(first_slot, 0)
        self._files = FixedFiles(tree, slot=first_slot, attrs=attrs, reader=reader, prefix=prefix)
        self._keysets = KeysetFiles(
            keysets, slot=first_slot + 1, attrs=attrs, reader=reader, prefix=prefix
        )
        self._samples = SampleFiles(
            version,
            file_slot=first_slot + 2,
            directory_slot=first_slot + 3,
            attrs=attrs,
            reader=reader,
            prefix=prefix,
        )
        self._parts: tuple[_Part, ...] = (
            self._files,
            self._keysets,
            self._samples,
            self._samples,
        )
        sizes = [size_of(content) for _, content in tree.files()]
        self._usage = Usage(sum(-(-size // BLOCK) for size in sizes), len(tree))

    @property
    def ttl(self) -> float:
        """For ever: nothing that has been seen can change, not even in the growing `keysets`."""
        return FOREVER

    def lookup(self, parent: int, name: str) -> Entry:
        if parent == self._root:
            if name == KEYSETS:
                return self._keysets.getattr(self._keysets.root)
            if name == SAMPLES:
                return self._samples.getattr(self._samples.root)
        return self._part(parent).lookup(parent, name)

    def getattr(self, node: int) -> Entry:
        if node == self._root:
            return root_entry(self._document, node, self._look)
        return self._part(node).getattr(node)

    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]:
        if node == self._root:
            return iter(self._list_root()[offset:])
        return self._part(node).readdir(node, offset)

    def open(self, node: int) -> Handle:
        return self._part(node).open(node)

    def readlink(self, node: int) -> str:
        self.getattr(node)
        raise os_error(errno.EINVAL, f"node {node} is no symbolic link")

    def statfs(self) -> Usage:
        return self._usage

    def _list_root(self) -> list[DirEntry]:
        found = [(e.name, e.node, e.kind) for e in self._files.readdir(self._root)]
        found.append((KEYSETS, self._keysets.root, Kind.DIRECTORY))
        if self._look.list_samples:
            found.append((SAMPLES, self._samples.root, Kind.DIRECTORY))
        return [DirEntry(*entry, offset) for offset, entry in enumerate(sorted(found), 1)]

    def _part(self, node: int) -> _Part:
        part = slot_and_place(node)[0] - self._first_slot
        if not 0 <= part < SLOTS:
            raise stale(node)
        return self._parts[part]
