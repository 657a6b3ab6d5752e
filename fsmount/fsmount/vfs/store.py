"""All versions of a store as a file system: `versions/<tag>/`, and `latest`, a symbolic link.

Versions appear as they are published. A version is read and leased when somebody first looks into
it, and from then on stays as it is.
"""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fsmount.formats.keyset import Keyset
from fsmount.model import LATEST, Digest, TagRef, Version, VersionDocument
from fsmount.vfs.attrs import Attrs
from fsmount.vfs.filesystem import (
    BLOCK,
    MOMENT,
    ROOT_NODE,
    DirEntry,
    Entry,
    Handle,
    Kind,
    Usage,
    absent,
    node_number,
    not_a_directory,
    os_error,
    slot_and_place,
    stale,
)
from fsmount.vfs.reads import ObjectReader
from fsmount.vfs.version import SLOTS, Look, VersionTree, root_entry

VERSIONS = "versions"
_VERSIONS_NODE = node_number(0, 1)
_LATEST_NODE = node_number(0, 2)
_FAMILIES = (1 << 21) - 1  # groups of SLOTS slots; the first is the store's own


class Source(Protocol):
    """What is needed of a store; `fsmount.store.Store` is one."""

    def versions(self) -> Sequence[VersionDocument]: ...
    def latest(self) -> str | None: ...
    def version(self, ref: TagRef) -> Version: ...
    def keysets(self, table: Digest) -> dict[str, Keyset]: ...


@dataclass(frozen=True, slots=True)
class _Catalogue:
    """The store's versions at one moment; numbers are families."""

    documents: dict[int, VersionDocument]
    families: dict[str, int]  # by tag
    latest: str | None
    read_at: float


class StoreTree:
    """A FileSystem of all versions."""

    def __init__(
        self,
        store: Source,
        reader: ObjectReader,
        look: Look,
        *,
        clock: Callable[[], float],
        on_first_use: Callable[[VersionDocument], None],
    ) -> None:
        """`clock` counts seconds; `on_first_use` is called before a version's parts are read."""
        self._store = store
        self._reader = reader
        self._look = look
        self._clock = clock
        self._on_first_use = on_first_use
        self._attrs = Attrs(look.owner, 0)
        self._trees: dict[int, VersionTree] = {}
        self._building = threading.Lock()
        self._seen: _Catalogue | None = None

    @property
    def ttl(self) -> float:
        """A moment, for `versions` and `latest`."""
        return MOMENT

    def lookup(self, parent: int, name: str) -> Entry:
        if parent == ROOT_NODE:
            if name == VERSIONS or (name == LATEST and self._catalogue().latest is not None):
                return self.getattr(_VERSIONS_NODE if name == VERSIONS else _LATEST_NODE)
            raise absent(name)
        if parent == _VERSIONS_NODE:
            catalogue = self._catalogue()
            if name not in catalogue.families:
                raise absent(f"{VERSIONS}/{name}")
            return self._root_entry(catalogue, catalogue.families[name])
        return self._tree(parent).lookup(parent, name)

    def getattr(self, node: int) -> Entry:
        match node:
            case 1:  # ROOT_NODE
                return self._attrs.directory(node, 2 + 1, MOMENT)
            case n if n == _VERSIONS_NODE:
                return self._attrs.directory(node, 2 + len(self._catalogue().documents), MOMENT)
            case n if n == _LATEST_NODE:
                return self._attrs.symlink(node, self.readlink(node), MOMENT)
        family = self._family(node)
        if node == _version_root(family) and family not in self._trees:
            return self._root_entry(self._catalogue(), family)
        return self._tree(node).getattr(node)

    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]:
        if node == ROOT_NODE:
            return iter(self._list_root()[offset:])
        if node == _VERSIONS_NODE:
            return self._list_versions(offset)
        return self._tree(node).readdir(node, offset)

    def open(self, node: int) -> Handle:
        if node in (ROOT_NODE, _VERSIONS_NODE):
            raise os_error(errno.EISDIR, VERSIONS)
        return self._tree(node).open(node)

    def readlink(self, node: int) -> str:
        if node != _LATEST_NODE:
            self.getattr(node)
            raise os_error(errno.EINVAL, f"node {node} is no symbolic link")
        latest = self._catalogue().latest
        if latest is None:
            raise absent(LATEST)
        return f"{VERSIONS}/{latest}"

    def statfs(self) -> Usage:
        documents = self._catalogue().documents.values()
        stored = sum(d.totals.stored_bytes + d.table.size for d in documents)
        files = sum(d.totals.partitions + d.totals.shards for d in documents)
        return Usage(-(-stored // BLOCK), files)

    def _list_root(self) -> list[DirEntry]:
        entries = [DirEntry(VERSIONS, _VERSIONS_NODE, Kind.DIRECTORY, 1)]
        if self._catalogue().latest is not None:
            entries.append(DirEntry(LATEST, _LATEST_NODE, Kind.SYMLINK, 2))
        return entries

    def _list_versions(self, offset: int) -> Iterator[DirEntry]:
        for family, document in self._catalogue().documents.items():
            if family > offset:
                name, node = str(document.tag), _version_root(family)
                yield DirEntry(name, node, Kind.DIRECTORY, family)

    def _root_entry(self, catalogue: _Catalogue, family: int) -> Entry:
        if family not in catalogue.documents:
            raise stale(_version_root(family))
        return root_entry(catalogue.documents[family], _version_root(family), self._look)

    def _family(self, node: int) -> int:
        family = slot_and_place(node)[0] // SLOTS
        if family == 0:
            if node == _LATEST_NODE:
                raise not_a_directory(LATEST)
            raise stale(node)
        return family

    def _tree(self, node: int) -> VersionTree:
        family = self._family(node)
        tree = self._trees.get(family)
        return tree if tree is not None else self._build(family, node)

    def _build(self, family: int, node: int) -> VersionTree:
        with self._building:
            if family in self._trees:
                return self._trees[family]
            document = self._catalogue().documents.get(family)
            if document is None or document.tag is None:
                raise stale(node)
            self._on_first_use(document)
            version, table = self._store.version(TagRef(document.tag)), document.table.digest
            self._trees[family] = VersionTree(
                version,
                lambda: self._store.keysets(table),
                self._reader,
                self._look,
                first_slot=family * SLOTS,
                prefix=f"{VERSIONS}/{document.tag}/",
            )
            return self._trees[family]

    def _catalogue(self) -> _Catalogue:
        """What the store has, as of less than a moment ago."""
        seen, now = self._seen, self._clock()
        if seen is None or now - seen.read_at >= MOMENT:
            documents = families_of(self._store.versions())
            families = {str(document.tag): family for family, document in documents.items()}
            latest = self._store.latest()
            latest = latest if latest in families else None
            self._seen = seen = _Catalogue(documents, families, latest, now)
        return seen


def families_of(documents: Sequence[VersionDocument]) -> dict[int, VersionDocument]:
    """A family of slots from 1 on for each version, from its tag and table; sorted by family.

    `documents` are ordered by creation: where two want one family, the older one keeps it.
    """
    taken: dict[int, VersionDocument] = {}
    for document in documents:
        digest = hashlib.sha256(f"{document.tag}\n{document.table.digest}".encode()).digest()
        family = int.from_bytes(digest[:8], "big") % _FAMILIES
        while family + 1 in taken:
            family = (family + 1) % _FAMILIES
        taken[family + 1] = document
    return dict(sorted(taken.items()))


def _version_root(family: int) -> int:
    return node_number(family * SLOTS, 0)
