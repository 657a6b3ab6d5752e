"""The samples of one partition as one flat file, which a server maps: no Python object a sample.

It is made of a manifest by `sample_index`, in a helper process, and lives in memory only:

    magic       8 bytes
    length      8 bytes: of the JSON text that follows
    JSON text   number of rows; `schemas`; `texts`, the different values of `__text__`; `columns`,
                the text arrays' names and whether they are JSON; `faults`, why an npz can't be made
    sections    of numbers and of bytes, in the order and with the lengths that the JSON text tells

Numbers are 8 bytes in the machine's order. Paths stand sorted, with NUL for "/", so that a
directory is a range of them; everything else is in the order of the manifest's rows.
"""

from __future__ import annotations

import json
import mmap
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Any

from fsmount.errors import FormatError
from fsmount.vfs.memory_file import MemoryFile

SLASH, BEHIND = b"\0", b"\x01"  # "/" as it is sorted, and what sorts next
NUMBERS = ("shard", "offset", "size", "raw_size", "checksum", "schema", "text", "npz_size",
           "inside", "bare", "order", "place")  # fmt: skip
DESCRIPTORS = 2  # that a list holds: its file's, and the map's own
_MAGIC = b"fsmlist1"
_HEAD = Struct("=8sQ")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a sample's payload lies, in bytes, and what it must be."""

    shard: int
    offset: int
    size: int
    raw_size: int
    checksum: int


class SampleList:
    """A flat file, mapped. Safe in any thread."""

    def __init__(self, file: MemoryFile, partition: str) -> None:
        self.file = file
        self.partition = partition
        view = memoryview(mmap.mmap(file.fd, file.size, access=mmap.ACCESS_READ))
        magic, length = _HEAD.unpack_from(view)
        if magic != _MAGIC:
            raise FormatError("no list of samples")
        at = _HEAD.size + length
        self._told = json.loads(bytes(view[_HEAD.size : at]))
        self._sections: dict[str, memoryview] = {}
        for name, size in self._told["sections"]:
            self._sections[name] = view[at : at + size]
            at += size
        self._numbers = {name: self._sections[name].cast("q") for name in NUMBERS}
        self._checksums = self._sections["checksum"].cast("Q")
        self._paths = _Texts(self._sections, "paths")
        self._sidecars = _Texts(self._sections, "sidecars")

    @property
    def nbytes(self) -> int:
        """Memory in bytes that keeping it takes."""
        return self.file.size

    def __len__(self) -> int:
        return len(self._paths)

    def location(self, row: int) -> Location:
        """Where the payload of a row lies."""
        get = self._numbers
        return Location(
            get["shard"][row],
            get["offset"][row],
            get["size"][row],
            get["raw_size"][row],
            self._checksums[row],
        )

    def raw_size(self, row: int) -> int:
        """The decoded member's size in bytes."""
        return self._numbers["raw_size"][row]

    def npz_size(self, row: int) -> int:
        """The size in bytes of the sample's npz; FormatError where there can be none."""
        size = self._numbers["npz_size"][row]
        if size < 0:
            raise FormatError(self._told["faults"][-size - 1])
        return size

    def sidecar_size(self, row: int) -> int | None:
        """The sidecar's size in bytes, None if there is none."""
        return None if self._numbers["bare"][row] else self._sidecars.length(row)

    def sidecar(self, row: int) -> bytes:
        """The sidecar, empty if there is none."""
        return self._sidecars[row]

    def schema(self, row: int) -> str:
        """The JSON text of the member's header."""
        return str(self._told["schemas"][self._numbers["schema"][row]])

    def texts(self, row: int) -> list[tuple[str, str, str]]:
        """Name, numpy's dtype descriptor and text of each text array, by name; FormatError."""
        which = self._numbers["text"][row]
        if which < 0:
            return []
        descrs = json.loads(self._told["texts"][which])
        return [(name, descrs[name], self._text(name, row)) for name in sorted(descrs)]

    def _text(self, name: str, row: int) -> str:
        number, is_json = self._told["columns"][name]
        try:
            value = _Texts(self._sections, f"text {number}")[row].decode()
            found = json.loads(value) if is_json else value
        except ValueError as error:
            raise FormatError(f"text array {name!r} can't be read: {error}") from error
        if not isinstance(found, str):
            raise FormatError(f"text array {name!r} is no text")
        return found

    def rest(self, row: int) -> str:
        """The path of a row below the partition."""
        return self._paths[self._numbers["place"][row]].replace(SLASH, b"/").decode()

    def key(self, row: int) -> str:
        """The key of a row."""
        rest = self.rest(row)
        return f"{self.partition}/{rest}" if self._numbers["inside"][row] else rest

    def find(self, rest: str) -> list[int]:
        """The rows with this path: one, none, or several where keys differ only by the id."""
        wanted = _sortable(rest)
        low = bisect_left(self._paths, wanted)
        found = []
        while low < len(self) and self._paths[low] == wanted:
            found.append(self._numbers["order"][low])
            low += 1
        return found

    def first_below(self, rest: str) -> int | None:
        """The row that stands first in the directory `rest`, None if there is no such directory."""
        low, high = self._range(rest)
        return self._numbers["order"][low] if low < high else None

    def children(self, rest: str) -> Iterator[tuple[str, int | None]]:
        """What lies in the directory `rest`: (name without suffix, row) or (directory, None)."""
        here, end = self._range(rest)
        start = len(_sortable(rest)) + 1 if rest else 0
        while here < end:
            path = self._paths[here]
            head, slash, _ = path[start:].partition(SLASH)
            if slash:
                yield head.decode(), None
                here = bisect_left(self._paths, path[: start + len(head)] + BEHIND, here)
            else:
                yield head.decode(), self._numbers["order"][here]
                here += 1

    def _range(self, rest: str) -> tuple[int, int]:
        if not rest:
            return 0, len(self)
        directory = _sortable(rest)
        low = bisect_left(self._paths, directory + SLASH)
        return low, bisect_left(self._paths, directory + BEHIND, low)


class _Texts:
    """Texts that stand one after the other, as a sequence of bytes."""

    def __init__(self, sections: Mapping[str, memoryview], name: str) -> None:
        self._offsets = sections[f"{name} at"].cast("q")
        self._bytes = sections[name]

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, at: int) -> bytes:
        return bytes(self._bytes[self._offsets[at] : self._offsets[at + 1]])

    def length(self, at: int) -> int:
        return self._offsets[at + 1] - self._offsets[at]


def head(told: Mapping[str, Any], lengths: Mapping[str, int]) -> bytes:
    """What stands before the sections, whose names and lengths in bytes are given in order."""
    text = json.dumps({**told, "sections": list(lengths.items())}).encode()
    return _HEAD.pack(_MAGIC, len(text)) + text


def _sortable(rest: str) -> bytes:
    return rest.encode().replace(b"/", SLASH)
