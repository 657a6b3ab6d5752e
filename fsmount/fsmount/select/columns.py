"""Columns of many manifests, each with the one type that it has over all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fsmount.errors import PlanError
from fsmount.formats import fields, manifest

ManifestData: TypeAlias = bytes | memoryview | pa.Buffer
ReadManifest = Callable[[], ManifestData]
Types = Mapping[str, Iterable[pa.DataType | None]]

_READERS = 4  # threads that read manifests
_AT_ONCE = 8  # manifests that one of them reads in a go
_AHEAD = 8  # times as many are read ahead

OWN_TYPES: Types = {field.name: (field.type,) for field in manifest.SCHEMA}


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
    """The types that each column has in `manifests`, None standing for JSON text."""
    known: dict[str, set[pa.DataType | None]] = {n: set(kinds) for n, kinds in OWN_TYPES.items()}
    for data in read_ahead(manifests):
        for name, kind in manifest.column_types(data).items():
            known.setdefault(name, set()).add(kind)
    return known


def read_columns(
    manifests: Sequence[ReadManifest], names: Sequence[str], rows: Iterable[npt.NDArray[np.int64]]
) -> pa.Table:
    """The columns `names` of the given rows of each manifest in turn, as one table.

    A field that a manifest lacks is null there. Raises PlanError for a name in no manifest, and for
    an integer that the field's common type can't hold.
    """
    known = OWN_TYPES if set(names) <= OWN_TYPES.keys() else column_types(manifests)
    unknown = [name for name in names if name not in known]
    if unknown:
        there = ", ".join(sorted(known.keys()))
        raise PlanError(f"no column {unknown[0]!r}; there are {there}")
    columns = Columns.unify(known, names)
    wanted = [(read, chosen) for read, chosen in zip(manifests, rows, strict=True) if len(chosen)]
    data = read_ahead([read for read, _ in wanted])
    parts = [
        columns.of(manifest.decode(each, columns.needed)).take(pa.array(chosen))
        for each, (_, chosen) in zip(data, wanted, strict=True)
    ]
    return pa.concat_tables(parts).select(list(names))


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of each manifest, and the types to give them."""

    types: dict[str, pa.DataType]
    texts: frozenset[str]  # those that become JSON text

    @classmethod
    def unify(cls, known: Types, names: Iterable[str]) -> Columns:
        """Join the types that each of `names` has, as docs/format.md says."""
        joined = {name: fields.unify(known[name]) for name in sorted(names)}
        texts = frozenset(name for name, kind in joined.items() if kind is None)
        return cls({n: pa.string() if k is None else k for n, k in joined.items()}, texts)

    @property
    def needed(self) -> list[str]:
        """The columns of a manifest that `of` looks at."""
        verbatim = {"__sidecar__", "__text__"} if self.texts else set()
        return sorted({*self.types, *verbatim}) or ["__index__"]

    def of(self, found: manifest.Manifest) -> pa.Table:
        """These columns of one manifest; another one for none, since it has the number of rows."""
        if not self.types:
            return found.table.select(["__index__"])
        arrays = [self._column(found, name, kind) for name, kind in self.types.items()]
        return pa.table(arrays, names=list(self.types))

    def _column(self, found: manifest.Manifest, name: str, kind: pa.DataType) -> pa.ChunkedArray:
        if name not in found.table.column_names:
            return pa.chunked_array([pa.nulls(found.table.num_rows, kind)])
        if name in self.texts and name not in found.meta.json_columns:
            return _json_texts(found, name)
        try:
            return found.table.column(name).cast(kind)
        except pa.ArrowInvalid as error:
            raise PlanError(f"field {name!r} can't be read as {kind}: {error}") from None


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


def _json_texts(found: manifest.Manifest, name: str) -> pa.ChunkedArray:
    """The JSON text of a field in each row, from the verbatim sidecar where it has the field."""
    values = found.table.column(name).to_pylist()
    for row, sidecar in enumerate(found.table.column("__sidecar__").to_pylist()):
        parsed = {} if sidecar is None else fields.parse_sidecar(sidecar)
        values[row] = parsed.get(name, values[row])
    return pa.chunked_array([fields.json_column(values)])
