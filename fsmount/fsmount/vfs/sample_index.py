"""The samples of one partition by path: a manifest, sorted, and no Python object a sample."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fsmount.formats import manifest as manifests
from fsmount.formats import sample as samples
from fsmount.formats.manifest import Manifest, Row
from fsmount.model import Partition
from fsmount.vfs import npz

_NPZ_DEPENDS_ON = ("__schema__", "__text__")
_SLASH, _BEHIND = b"\0", b"\x01"  # "/" as it is sorted, and what sorts next


class SampleIndex:
    """Rows of a manifest by the rest of their key behind the partition's id.

    The rest is the whole key where the key does not lie in the directory that the id names.
    """

    def __init__(self, manifest: Manifest, partition: Partition) -> None:
        self._manifest = manifest
        self._partition = partition
        self._npz_sizes: dict[tuple[object, ...], int | None] = {}
        rests = pc.replace_substring(_rests(manifest.table, partition.id), b"/", _SLASH)
        order = pc.sort_indices(rests)
        self._sorted = rests.take(order)
        self._order = order.to_numpy()
        self._raw_sizes = manifest.table.column("__raw_size__").to_numpy()
        self._sidecars = pc.binary_length(manifest.table.column("__sidecar__")).to_numpy(
            zero_copy_only=False
        )

    @property
    def nbytes(self) -> int:
        """Memory in bytes that keeping it takes."""
        kept = self._manifest.table.nbytes + self._sorted.nbytes
        return int(kept + self._order.nbytes + self._sidecars.nbytes)

    def __len__(self) -> int:
        return len(self._order)

    def row(self, number: int) -> Row:
        """The manifest's row `number`."""
        return Manifest(self._manifest.meta, self._manifest.table.slice(number, 1)).rows()[0]

    def raw_size(self, number: int) -> int:
        """The decoded member's size in bytes."""
        return int(self._raw_sizes[number])

    def npz_size(self, number: int) -> int | None:
        """The size in bytes of the sample's npz, None where it must be built to be known."""
        shape = tuple(self._manifest.table.column(c)[number].as_py() for c in _NPZ_DEPENDS_ON)
        if shape not in self._npz_sizes:
            row = self.row(number)
            schema = samples.read_schema(self._manifest.meta.schemas[row.schema])
            self._npz_sizes[shape] = npz.size(schema.fields, row.texts)
        return self._npz_sizes[shape]

    def sidecar_size(self, number: int) -> int | None:
        """The sidecar's size in bytes, None if there is none."""
        size = self._sidecars[number]
        return None if np.isnan(size) else int(size)

    def rest(self, number: int) -> str:
        """The path of row `number` below the partition."""
        return _rest(self._manifest.table.column("__key__")[number].as_py(), self._partition.id)

    def find(self, rest: str) -> list[int]:
        """The rows with this path: one, none, or several where keys differ only by the id."""
        wanted = _sortable(rest)
        low = self._bisect(wanted)
        found = []
        while low < len(self) and self._sorted[low].as_py() == wanted:
            found.append(int(self._order[low]))
            low += 1
        return found

    def first_below(self, rest: str) -> int | None:
        """The row that stands first in the directory `rest`, None if there is no such directory."""
        low, high = self._range(rest)
        return int(self._order[low]) if low < high else None

    def children(self, rest: str) -> Iterator[tuple[str, int | None]]:
        """What lies in the directory `rest`: (name without suffix, row) or (directory, None)."""
        here, end = self._range(rest)
        start = len(_sortable(rest)) + 1 if rest else 0
        while here < end:
            head, slash, _ = self._sorted[here].as_py()[start:].partition(_SLASH)
            if slash:
                yield head.decode(), None
                above = self._sorted[here].as_py()[: start + len(head)]
                here = self._bisect(above + _BEHIND, here)
            else:
                yield head.decode(), int(self._order[here])
                here += 1

    def _range(self, rest: str) -> tuple[int, int]:
        if not rest:
            return 0, len(self)
        directory = _sortable(rest)
        low = self._bisect(directory + _SLASH)
        return low, self._bisect(directory + _BEHIND, low)

    def _bisect(self, wanted: bytes, low: int = 0) -> int:
        return bisect_left(
            range(len(self)), wanted, lo=low, key=lambda at: self._sorted[at].as_py()
        )


def decode(data: bytes, partition: Partition) -> SampleIndex:
    """Index the manifest in `data`; FormatError or IntegrityError unless it is this partition's."""
    manifest = manifests.decode(data)
    manifest.meta.check_belongs(partition)
    return SampleIndex(manifest, partition)


def _sortable(rest: str) -> bytes:
    return rest.encode().replace(b"/", _SLASH)


def _rest(key: str, partition: str) -> str:
    return key.removeprefix(f"{partition}/")


def _rests(table: pa.Table, partition: str) -> pa.Array:
    keys = table.column("__key__").combine_chunks().cast(pa.binary())
    prefix = f"{partition}/".encode()
    inside = pc.starts_with(keys, prefix)
    return pc.if_else(inside, pc.replace_substring(keys, prefix, b"", max_replacements=1), keys)
