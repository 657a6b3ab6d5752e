"""`keysets/`: the named selections of a version; they can grow while it is mounted.

What is there never changes, so what was found holds for ever; what was not found may come.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

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


class KeysetFiles:
    """The directory `keysets` (place 0) and its files, read from the store each time."""

    def __init__(
        self,
        keysets: Callable[[], Mapping[str, Keyset]],
        *,
        slot: int,
        attrs: Attrs,
        reader: ObjectReader,
        prefix: str,
    ) -> None:
        self._keysets = keysets
        self._slot = slot
        self._attrs = attrs
        self._reader = reader
        self._prefix = prefix
        self.root = node_number(slot, 0)

    def lookup(self, parent: int, name: str) -> Entry:
        self._check_directory(parent)
        stem = name.removesuffix(MANIFEST_SUFFIX)
        keysets = self._keysets()
        if stem == name or stem not in keysets:
            raise absent(f"{KEYSETS}/{name}")
        place = next(p for p, other in hashed_places(keysets).items() if other == stem)
        return self._attrs.file(node_number(self._slot, place), keysets[stem].keys.size)

    def getattr(self, node: int) -> Entry:
        if node == self.root:
            return self._attrs.directory(node, 2)
        return self._attrs.file(node, self._keyset(node).keys.size)

    def parent(self, node: int) -> int:
        """Of a file: it is no directory. Where `keysets` itself lies is the version's to say."""
        self._check_directory(node)
        raise stale(node)

    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]:
        self._check_directory(node)
        return self._list(offset)

    def open(self, node: int) -> Handle:
        if node == self.root:
            raise os_error(errno.EISDIR, KEYSETS)
        keyset = self._keyset(node)
        about = f"{self._prefix}{KEYSETS}/{keyset.name}{MANIFEST_SUFFIX}"
        return self._reader.open(keyset.keys, about, node, Verify.OPEN)

    def _list(self, offset: int) -> Iterator[DirEntry]:
        for place, name in hashed_places(self._keysets()).items():
            if place > offset:
                node = node_number(self._slot, place)
                yield DirEntry(f"{name}{MANIFEST_SUFFIX}", node, Kind.FILE, place)

    def _keyset(self, node: int) -> Keyset:
        keysets = self._keysets()
        name = hashed_places(keysets).get(slot_and_place(node)[1])
        if name is None:
            raise stale(node)
        return keysets[name]

    def _check_directory(self, node: int) -> None:
        if node != self.root:
            raise not_a_directory(f"{KEYSETS}/{self._keyset(node).name}")
