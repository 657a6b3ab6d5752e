"""Rows of manifests whose key is in a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fsmount.errors import PlanError
from fsmount.formats import manifest
from fsmount.select.columns import ReadManifest, read_ahead

_ROWS_AT_ONCE = 1 << 20
_SHOWN = 3  # keys named in a message


def rows_of_keys(
    manifests: Sequence[ReadManifest], keys: Sequence[str]
) -> Iterator[npt.NDArray[np.int64]]:
    """For each manifest in turn, the ascending numbers of the rows whose key is one of `keys`.

    Raises PlanError if a key stands twice in `keys`, or, at the end, if one is in no manifest.
    """
    doubles = [key for key, times in Counter(keys).items() if times > 1]
    if doubles:
        raise PlanError(f"key {doubles[0]!r} is listed twice")
    wanted = pa.array(keys, pa.string())
    seen = np.zeros(len(keys), np.bool_)
    for group in _groups(manifests):
        place = pc.fill_null(pc.index_in(pa.chunked_array(group), value_set=wanted), -1).to_numpy()
        seen[place[place >= 0]] = True
        for part in np.split(place, np.cumsum([len(column) for column in group])[:-1]):
            yield np.flatnonzero(part >= 0)
    missing = np.flatnonzero(~seen)
    if len(missing):
        shown = ", ".join(repr(keys[at]) for at in missing[:_SHOWN])
        more = "" if len(missing) <= _SHOWN else f" and {len(missing) - _SHOWN} more"
        raise PlanError(f"not in this version: {shown}{more}")


def _groups(manifests: Sequence[ReadManifest]) -> Iterator[list[pa.Array]]:
    """The key columns in groups of many rows, since each look-up hashes all wanted keys anew."""
    group: list[pa.Array] = []
    for data in read_ahead(manifests):
        column = manifest.decode(data, ["__key__"]).table.column("__key__")
        group.append(column.combine_chunks())
        if sum(map(len, group)) >= _ROWS_AT_ONCE:
            yield group
            group = []
    if group:
        yield group
