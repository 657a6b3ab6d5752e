"""Columns of many manifests, which all have the same ones."""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fsmount.errors import FormatError, PlanError
from fsmount.formats import manifest

ManifestData: TypeAlias = bytes | memoryview | pa.Buffer
ReadManifest = Callable[[], ManifestData]
Types = Mapping[str, pa.DataType]

_READERS = 4  # threads that read manifests
_AT_ONCE = 8  # manifests that one of them reads in a go
_AHEAD = 8  # times as many are read ahead
_SHOWN_MAX = 50  # names in a message

OWN_TYPES: Types = {field.name: field.type for field in manifest.SCHEMA}


def read_ahead(manifests: Iterable[ReadManifest]) -> Iterator[ManifestData]:
    """What each of `manifests` reads, in turn, some of them read ahead in threads.

    Decoding holds Python's lock most of the time, so it is left to the caller's thread.
    """
    rest = iter(manifests)
    with ThreadPoolExecutor(_READERS) as pool:
        running: deque[Future[list[ManifestData]]] = deque()
        while some := list(islice(rest, _AT_ONCE)):
            running.append(pool.submit(_read_all, some))
            if len(running) >= _AHEAD:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()


def _read_all(manifests: list[ReadManifest]) -> list[ManifestData]:
    return [read() for read in manifests]


def column_types(manifests: Sequence[ReadManifest]) -> Types:
    """The type of each column in `manifests`, as the first one has it; FormatError."""
    return manifest.column_types(manifests[0]()) if manifests else OWN_TYPES


def read_columns(
    manifests: Sequence[ReadManifest], names: Sequence[str], rows: Iterable[npt.NDArray[np.int64]]
) -> pa.Table:
    """The columns `names` of the given rows of each manifest in turn, as one table.

    `gps.lat` is a field of the struct column `gps`, unless there is a column of that name. Raises
    PlanError for a name that is no column, FormatError naming a manifest whose columns are not
    those of the first one.
    """
    known = OWN_TYPES if set(names) <= OWN_TYPES.keys() else column_types(manifests)
    whole = {name: _column_of(name, known) for name in names}
    columns = Columns.of_types(known, set(whole.values()))
    inside = {name: _path_in(columns, whole[name], name) for name in names}
    wanted = [(read, chosen) for read, chosen in zip(manifests, rows, strict=True) if len(chosen)]
    data = read_ahead([read for read, _ in wanted])
    parts = [
        columns.of(manifest.decode(each, columns.needed)).take(pa.array(chosen))
        for each, (_, chosen) in zip(data, wanted, strict=True)
    ]
    table = pa.concat_tables(parts)
    taken = [_taken(table.column(whole[name]), inside[name]) for name in names]
    return pa.table(taken, names=list(names))


def no_such(name: str, known: Collection[str], kind: str = "") -> str:
    """That there is no such `kind` of name, for a message, with the nearest ones that there are."""
    shown = sorted(known)
    near = difflib.get_close_matches(name, shown, 3)
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    more = f" and {len(shown) - _SHOWN_MAX} more" if len(shown) > _SHOWN_MAX else ""
    return f"no {kind}{name!r}{hint}; there are {', '.join(shown[:_SHOWN_MAX]) or 'none'}{more}"


def _column_of(name: str, known: Collection[str]) -> str:
    """The column that `name` is, or is a field of."""
    whole = name
    while whole not in known:
        whole, dot, _ = whole.rpartition(".")
        if not dot:
            raise PlanError(no_such(name, known, "column "))
    return whole


def _path_in(columns: Columns, column: str, name: str) -> list[str]:
    """The names of the fields, from outside in, that `name` has behind the name of its `column`."""
    kind, rest, path = columns.types[column], name[len(column) + 1 :], list[str]()
    while rest:
        fields = [kind.field(n) for n in range(kind.num_fields)] if pa.types.is_struct(kind) else []
        there = {field.name: field.type for field in fields}
        found = rest
        while found not in there:
            found, dot, _ = found.rpartition(".")
            if not dot:
                before = ".".join([column, *path])
                why = no_such(rest, there) if there else f"{before!r} is {kind}, without fields"
                raise PlanError(f"column {name!r}: {why}")
        kind, rest = there[found], rest[len(found) + 1 :]
        path.append(found)
    return path


def _taken(column: pa.ChunkedArray, path: list[str]) -> pa.ChunkedArray:
    for field in path:
        column = pc.struct_field(column, field)
    return column


@dataclass(frozen=True, slots=True)
class Columns:
    """Some columns that each manifest of a version has, and their types."""

    types: dict[str, pa.DataType]

    @classmethod
    def of_types(cls, known: Types, names: Iterable[str]) -> Columns:
        """The columns `names`, which have the types `known`."""
        return cls({name: known[name] for name in sorted(names)})

    @property
    def needed(self) -> list[str]:
        """The columns of a manifest that `of` looks at."""
        return list(self.types) or ["__index__"]

    def of(self, found: manifest.Manifest) -> pa.Table:
        """These columns of one manifest; another one for none, since it has the number of rows."""
        there = found.table.schema
        for name, kind in self.types.items():
            its = there.field(name).type if name in there.names else "missing"
            if its != kind:
                raise FormatError(
                    f"the manifest of partition {found.meta.partition!r} is not of this version: "
                    f"column {name!r} is {its}, and {kind} in the first manifest"
                )
        return found.table.select(self.needed)


def unlike(name: str, names: Iterable[str]) -> str:
    """`name`, in lower case, with as many underscores behind it as make it none of `names`."""
    taken = {other.lower() for other in names}
    while name in taken:
        name += "_"
    return name


def fields_alike(kind: pa.DataType) -> list[str]:
    """Names of one struct in `kind`, at any depth, that differ only in case, which SQL ignores."""
    parts = [kind.field(place) for place in range(kind.num_fields)]
    names = sorted(part.name for part in parts)
    for name in names:
        alike = [other for other in names if other.lower() == name.lower()]
        if len(alike) > 1:
            return alike
    return next(filter(None, (fields_alike(part.type) for part in parts)), [])
