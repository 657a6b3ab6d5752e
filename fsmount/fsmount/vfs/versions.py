"""All versions of a store as a file system: `versions/<tag>/`, and `latest`, a symbolic link.

Versions appear as they are published. A version is read and leased when somebody first looks into
it, and from then on stays as it is, whatever becomes of its document. One that can't be read is EIO
under its own name and touches no other.
"""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fsmount.errors import FsmountError
from fsmount.model import LATEST, VersionDocument
from fsmount.store.refs import Survey
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
from fsmount.vfs.parted import KEYSET_FILES, SLOTS, Look, PartedTree, root_entry

VERSIONS = "versions"
_VERSIONS_NODE = node_number(0, 1)
_LATEST_NODE = node_number(0, 2)
_NAMES = {ROOT_NODE: "", _VERSIONS_NODE: VERSIONS, _LATEST_NODE: LATEST}
_SETTLED = 2 * MOMENT  # after that no listing is kept that was made of an earlier look
_FAMILIES = (1 << 21) - 1  # groups of SLOTS slots; the first is the store's own


class Catalogue(Protocol):
    """What tells which versions there are; `fsmount.store.Store` is one."""

    def survey(self) -> Survey: ...
    def latest(self) -> str | None: ...


class Build(Protocol):
    """Makes the tree of a version, in SLOTS slots from `first_slot` on."""

    def __call__(
        self, document: VersionDocument, *, first_slot: int, prefix: str
    ) -> PartedTree: ...


@dataclass(frozen=True, slots=True)
class _Seen:
    """The store's versions at one moment; numbers are families."""

    documents: dict[int, VersionDocument]
    families: dict[str, int]  # by tag
    faults: dict[str, FsmountError]  # of what can't be read, by tag, and LATEST
    latest: str | None
    read_at: float


class VersionsTree:
    """A FileSystem of all versions."""

    def __init__(
        self,
        store: Catalogue,
        build: Build,
        look: Look,
        *,
        clock: Callable[[], float],
        on_first_use: Callable[[VersionDocument], None],
    ) -> None:
        """`build` may take its time, and is called once a version, after `on_first_use`.

        `clock` counts seconds.
        """
        self._store = store
        self._build_one = build
        self._look = look
        self._clock = clock
        self._on_first_use = on_first_use
        self._attrs = Attrs(look.owner, 0)
        self._trees: dict[int, PartedTree] = {}
        self._building = threading.Lock()
        self._seen: _Seen | None = None

    @property
    def ttl(self) -> float:
        """A moment, for `versions` and `latest`."""
        return MOMENT

    def lookup(self, parent: int, name: str) -> Entry:
        if parent == ROOT_NODE:
            if name in (VERSIONS, LATEST):
                return self.getattr(_VERSIONS_NODE if name == VERSIONS else _LATEST_NODE)
            raise absent(name)
        if parent == _VERSIONS_NODE:
            catalogue = self._catalogue()
            if name not in catalogue.families:
                raise catalogue.faults.get(name, absent(f"{VERSIONS}/{name}"))
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

    def parent(self, node: int) -> int:
        if node in (ROOT_NODE, _VERSIONS_NODE):
            return ROOT_NODE
        if node == _version_root(self._family(node)):
            return _VERSIONS_NODE
        return self._tree(node).parent(node)

    def settled(self, node: int) -> bool:
        tree = self._trees.get(slot_and_place(node)[0] // SLOTS)
        return tree is not None and tree.settled(node)

    def ready(self, node: int) -> bool:
        tree = self._trees.get(slot_and_place(node)[0] // SLOTS)
        return tree is not None and tree.ready(node)

    def grows(self, node: int) -> bool:
        if node in (ROOT_NODE, _VERSIONS_NODE):
            return True
        tree = self._trees.get(slot_and_place(node)[0] // SLOTS)
        return tree is not None and tree.grows(node)

    def growing(self) -> Collection[int]:
        keysets = (f * SLOTS + KEYSET_FILES for f in self._catalogue().documents)
        return [ROOT_NODE, _VERSIONS_NODE, *(node_number(slot, 0) for slot in keysets)]

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
        catalogue = self._catalogue()
        if catalogue.latest is None:
            raise catalogue.faults.get(LATEST, absent(LATEST))
        return f"{VERSIONS}/{catalogue.latest}"

    def path(self, node: int) -> str:
        if node in _NAMES:
            return _NAMES[node]
        return self._tree(node).path(node)

    def xattrs(self, node: int) -> dict[str, str]:
        if node in (ROOT_NODE, _VERSIONS_NODE, _LATEST_NODE):
            return {}
        return self._tree(node).xattrs(node)

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

    def _root_entry(self, catalogue: _Seen, family: int) -> Entry:
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

    def _tree(self, node: int) -> PartedTree:
        family = self._family(node)
        tree = self._trees.get(family)
        return tree if tree is not None else self._build(family, node)

    def _build(self, family: int, node: int) -> PartedTree:
        with self._building:
            if family in self._trees:
                return self._trees[family]
            document = self._catalogue().documents.get(family)
            if document is None or document.tag is None:
                raise stale(node)
            self._on_first_use(document)
            self._trees[family] = self._build_one(
                document, first_slot=family * SLOTS, prefix=f"{VERSIONS}/{document.tag}/"
            )
            return self._trees[family]

    def _catalogue(self) -> _Seen:
        """What the store has, as of less than a moment ago, and what was looked into before."""
        seen, now = self._seen, self._clock()
        if seen is None or now - seen.read_at >= MOMENT:
            faults: dict[str, FsmountError] = {}
            latest = self._latest(faults)  # first: what it names is published by then
            found = self._store.survey()
            faults |= found.faults
            documents = families_of(found.versions)
            if seen is not None:
                documents |= {family: seen.documents[family] for family in self._trees}
            families = {str(document.tag): family for family, document in documents.items()}
            latest = self._followed(latest, families, now)
            self._seen = seen = _Seen(
                dict(sorted(documents.items())), families, faults, latest, now
            )
        return seen

    def _followed(self, latest: str | None, families: dict[str, int], now: float) -> str | None:
        """What `latest` is said to be: one look behind where its version is new.

        A kernel may have kept a listing of `versions` from the look before, a moment longer.
        """
        seen = self._seen
        if seen is not None and now - seen.read_at < _SETTLED and latest not in seen.families:
            latest = seen.latest
        return latest if latest in families else None

    def _latest(self, faults: dict[str, FsmountError]) -> str | None:
        try:
            return self._store.latest()
        except FsmountError as error:
            faults[LATEST] = error
            return None


def families_of(documents: Sequence[VersionDocument]) -> dict[int, VersionDocument]:
    """A family of slots from 1 on for each version, from its tag and table.

    `documents` are ordered by creation: where two want one family, the older one keeps it.
    """
    taken: dict[int, VersionDocument] = {}
    for document in documents:
        digest = hashlib.sha256(f"{document.tag}\n{document.table.digest}".encode()).digest()
        family = int.from_bytes(digest[:8], "big") % _FAMILIES
        while family + 1 in taken:
            family = (family + 1) % _FAMILIES
        taken[family + 1] = document
    return taken


def _version_root(family: int) -> int:
    return node_number(family * SLOTS, 0)
