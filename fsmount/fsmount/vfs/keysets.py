"""`keysets/`: the named selections of a version; they can grow while it is mounted.

What is there never changes, so what was found holds for ever; what was not found may come.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fsmount.formats.keyset_pointer import Keyset
from fsmount.paths import MANIFEST_SUFFIX
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
from fsmount.vfs.layout import KEYSETS
from fsmount.vfs.reads import ObjectReader, Verify

_PLACES = 1 << 39


def hashed_places(names: Iterable[str], places: int = _PLACES) -> dict[int, str]:
    """A place from 1 to `places` for each name: its hash, or the next free one, in order of place.

    So a name keeps its place when others come, and a listing can go on behind any place.
    """
    taken: dict[int, str] = {}
    for name in names:
        digest = hashlib.sha256(name.encode()).digest()
        place = int.from_bytes(digest[:8], "big") % places
        while place + 1 in taken:
            place = (place + 1) % places
        taken[place + 1] = name
    return dict(sorted(taken.items()))


class KeysetSource(Protocol):
    """The key-sets of a version as a store has them; `fsmount.store.refs.Keysets` is one."""

    def names(self) -> Sequence[str]:
        """Their names now; StoreError if that can't be told."""
        ...

    def read(self, name: str) -> Keyset | None:
        """The key-set `name`, None if there is none; FormatError, StoreError."""
        ...


@dataclass(frozen=True, slots=True)
class _Listed:
    """The names at one moment, and their places."""

    names: tuple[str, ...]
    by_place: dict[int, str]
    places: dict[str, int]

    @classmethod
    def of(cls, names: tuple[str, ...]) -> _Listed:
        by_place = hashed_places(names)
        return cls(names, by_place, {name: place for place, name in by_place.items()})


class KeysetFiles:
    """The directory `keysets` (place 0) and its files.

    Names are listed anew each time. A key-set is read once, when it is first asked for.
    """

    def __init__(
        self,
        keysets: KeysetSource,
        *,
        slot: int,
        attrs: Attrs,
        reader: ObjectReader,
        prefix: str,
    ) -> None:
        self._source = keysets
        self._slot = slot
        self._attrs = attrs
        self._reader = reader
        self._prefix = prefix
        self._listed = _Listed.of(())
        self._found: dict[str, Keyset] = {}
        self.root = node_number(slot, 0)

    def lookup(self, parent: int, name: str) -> Entry:
        self._check_directory(parent)
        stem = name.removesuffix(MANIFEST_SUFFIX)
        keyset = None if stem == name else self._keyset(stem)
        if keyset is None:
            raise absent(f"{KEYSETS}/{name}")
        place = self._listed.places.get(stem) or self._list().places.get(stem)
        if place is None:
            raise absent(f"{KEYSETS}/{name}")
        return self._attrs.file(node_number(self._slot, place), keyset.keys.size)

    def getattr(self, node: int) -> Entry:
        if node == self.root:
            return self._attrs.directory(node, 2)
        return self._attrs.file(node, self._at(node).keys.size)

    def parent(self, node: int) -> int:
        """Of a file: it is no directory. Where `keysets` itself lies is the version's to say."""
        self._check_directory(node)
        raise stale(node)

    def settled(self, node: int) -> bool:
        del node
        return False

    def ready(self, node: int) -> bool:
        del node
        return False

    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]:
        self._check_directory(node)
        return self._entries(self._list(), offset)

    def path(self, node: int) -> str:
        name = "" if node == self.root else f"/{self._at(node).name}{MANIFEST_SUFFIX}"
        return f"{self._prefix}{KEYSETS}{name}"

    def open(self, node: int) -> Handle:
        if node == self.root:
            raise os_error(errno.EISDIR, KEYSETS)
        keyset = self._at(node)
        about = f"{self._prefix}{KEYSETS}/{keyset.name}{MANIFEST_SUFFIX}"
        return self._reader.open(keyset.keys, about, node, Verify.OPEN)

    def _entries(self, listed: _Listed, offset: int) -> Iterator[DirEntry]:
        for place, name in listed.by_place.items():
            if place > offset:
                node = node_number(self._slot, place)
                yield DirEntry(f"{name}{MANIFEST_SUFFIX}", node, Kind.FILE, place)

    def _list(self) -> _Listed:
        names = tuple(self._source.names())
        if names != self._listed.names:
            self._listed = _Listed.of(names)
        return self._listed

    def _keyset(self, name: str) -> Keyset | None:
        found = self._found.get(name)
        if found is None:
            found = self._source.read(name)
            if found is not None:
                self._found[name] = found
        return found

    def _at(self, node: int) -> Keyset:
        place = slot_and_place(node)[1]
        name = self._listed.by_place.get(place) or self._list().by_place.get(place)
        keyset = None if name is None else self._keyset(name)
        if keyset is None:
            raise stale(node)
        return keyset

    def _check_directory(self, node: int) -> None:
        if node != self.root:
            raise not_a_directory(f"{KEYSETS}/{self._at(node).name}")
