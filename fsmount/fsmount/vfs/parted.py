"""The tree of one version, made of its parts: fixed files, key-sets and samples."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from fsmount.model import VersionDocument
from fsmount.vfs.attrs import UNKNOWN_LINKS, Attrs, nanoseconds
from fsmount.vfs.files import FixedFiles
from fsmount.vfs.filesystem import (
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
from fsmount.vfs.layout import KEYSETS, SAMPLES

SLOTS = 4  # of one version: fixed files, key-sets, sample files, sample directories
KEYSET_FILES, SAMPLE_FILES, SAMPLE_DIRECTORIES = 1, 2, 3  # places of their slots among them
_OF_SAMPLES = (SAMPLE_FILES, SAMPLE_DIRECTORIES)
XATTR_PREFIX = "user.fsmount."
_SUBDIRECTORIES = 3  # of a version's root: keysets, manifests, shards


@dataclass(frozen=True, slots=True)
class Look:
    """How versions are shown."""

    owner: Owner
    list_samples: bool = False  # or reached by name only


class Part(Protocol):
    """A part of a version's tree, as a `FileSystem` of the nodes in its slots."""

    def lookup(self, parent: int, name: str) -> Entry: ...
    def getattr(self, node: int) -> Entry: ...
    def parent(self, node: int) -> int: ...
    def settled(self, node: int) -> bool: ...
    def ready(self, node: int) -> bool: ...
    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]: ...
    def open(self, node: int) -> Handle: ...
    def path(self, node: int) -> str: ...


class LatePart:
    """A part that is made when it is first asked; by one thread."""

    def __init__(self, make: Callable[[], Part]) -> None:
        self._make = make
        self._made: Part | None = None
        self._making = threading.Lock()

    def lookup(self, parent: int, name: str) -> Entry:
        return self._part().lookup(parent, name)

    def getattr(self, node: int) -> Entry:
        return self._part().getattr(node)

    def parent(self, node: int) -> int:
        return self._part().parent(node)

    def settled(self, node: int) -> bool:
        return self._made is not None and self._made.settled(node)

    def ready(self, node: int) -> bool:
        return self._made is not None and self._made.ready(node)

    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]:
        return self._part().readdir(node, offset)

    def open(self, node: int) -> Handle:
        return self._part().open(node)

    def path(self, node: int) -> str:
        return self._part().path(node)

    def _part(self) -> Part:
        with self._making:
            if self._made is None:
                self._made = self._make()
            return self._made


def root_entry(document: VersionDocument, root: int, look: Look) -> Entry:
    """The attributes of a version's root, which need nothing but its document."""
    attrs = Attrs(look.owner, nanoseconds(document.created_at))
    return attrs.directory(root, 2 + _SUBDIRECTORIES + look.list_samples)


class PartedTree:
    """A FileSystem of one version; its nodes are in SLOTS slots from `first_slot` on."""

    def __init__(
        self,
        document: VersionDocument,
        files: FixedFiles,
        keysets: KeysetFiles,
        samples: Part,
        *,
        attrs: Attrs,
        usage: Usage,
        look: Look,
        first_slot: int = 0,
    ) -> None:
        self._document = document
        self._attrs = attrs
        self._look = look
        self._first_slot = first_slot
        self._root = node_number(first_slot, 0)
        self._files = files
        self._keysets = keysets
        self._samples_root = node_number(first_slot + SAMPLE_DIRECTORIES, 0)
        self._samples = samples
        self._parts: tuple[Part, ...] = (files, keysets, samples, samples)
        self._usage = usage

    @property
    def ttl(self) -> float:
        """For ever: nothing that has been seen can change, not even in the growing `keysets`."""
        return FOREVER

    def lookup(self, parent: int, name: str) -> Entry:
        if parent == self._root:
            if name == KEYSETS:
                return self._keysets.getattr(self._keysets.root)
            if name == SAMPLES:
                return self.getattr(self._samples_root)
        return self._part(parent).lookup(parent, name)

    def getattr(self, node: int) -> Entry:
        if node == self._root:
            return root_entry(self._document, node, self._look)
        if node == self._samples_root:  # without reading what is below
            return self._attrs.directory(node, UNKNOWN_LINKS)
        return self._part(node).getattr(node)

    def parent(self, node: int) -> int:
        if node in (self._keysets.root, self._samples_root):
            return self._root
        return self._part(node).parent(node)

    def settled(self, node: int) -> bool:
        """Whether it is one of the fixed files, or a sample of a partition that is in memory."""
        part = slot_and_place(node)[0] - self._first_slot
        return part == 0 or (part in _OF_SAMPLES and self._samples.settled(node))

    def ready(self, node: int) -> bool:
        part = slot_and_place(node)[0] - self._first_slot
        return 0 <= part < SLOTS and self._parts[part].ready(node)

    def grows(self, node: int) -> bool:
        """Whether it is `keysets`."""
        return node == self._keysets.root

    def growing(self) -> Collection[int]:
        return [self._keysets.root]

    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]:
        if node == self._root:
            return iter(self._list_root()[offset:])
        return self._part(node).readdir(node, offset)

    def open(self, node: int) -> Handle:
        return self._part(node).open(node)

    def readlink(self, node: int) -> str:
        self.getattr(node)
        raise os_error(errno.EINVAL, f"node {node} is no symbolic link")

    def path(self, node: int) -> str:
        return self._part(node).path(node)

    def xattrs(self, node: int) -> dict[str, str]:
        self.getattr(node)
        fixed = slot_and_place(node)[0] == self._first_slot
        own = self._files.xattrs(node) if fixed else {}
        document = self._document
        tag = {} if document.tag is None else {"version": document.tag}
        found = {**own, **tag, "table": f"sha256:{document.table.digest}"}
        return {f"{XATTR_PREFIX}{name}": value for name, value in found.items()}

    def statfs(self) -> Usage:
        return self._usage

    def _list_root(self) -> list[DirEntry]:
        found = [(e.name, e.node, e.kind) for e in self._files.readdir(self._root)]
        found.append((KEYSETS, self._keysets.root, Kind.DIRECTORY))
        if self._look.list_samples:
            found.append((SAMPLES, self._samples_root, Kind.DIRECTORY))
        return [DirEntry(*entry, offset) for offset, entry in enumerate(sorted(found), 1)]

    def _part(self, node: int) -> Part:
        part = slot_and_place(node)[0] - self._first_slot
        if not 0 <= part < SLOTS:
            raise stale(node)
        return self._parts[part]
