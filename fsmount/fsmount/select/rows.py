"""Rows of manifests for which an SQL expression is true."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fsmount.formats import fields, manifest
from fsmount.select.expression import Engine, Expression, Params, Rows, refusal

ReadManifest = Callable[[], bytes | memoryview | pa.Buffer]

_ROWS_AT_ONCE = 1 << 16  # of all manifests that one query looks at


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns an expression needs, each with one type over all manifests."""

    types: dict[str, pa.DataType]
    texts: frozenset[str]  # those compared as JSON text

    def to_read(self) -> list[str]:
        """The columns to read of each manifest."""
        verbatim = {"__sidecar__", "__text__"} if self.texts else set()
        return sorted({*self.types, *verbatim})


def rows_where(
    manifests: Sequence[ReadManifest], where: str, params: Params = None
) -> Iterator[Rows]:
    """For each manifest in turn, the ascending numbers of the rows for which `where` is true.

    `where` is one SQL expression over a manifest's columns; NULL is not true. A field has one type
    over all manifests (`fields.unify`) and is NULL where a manifest lacks it; one of mixed types is
    its JSON text. `params` fill `?` and `$1` (a sequence) or `$name` (a mapping). Each manifest
    is read once or twice and dropped: memory does not grow with their number.

    Raises PlanError for anything but such an expression, with DuckDB's message where it has one;
    FormatError for a manifest that is none.
    """
    with Engine() as engine:
        expression = engine.parse(where)
        columns = _resolve(engine, manifests, expression, params)
        group: list[pa.Table] = []
        for read in manifests:
            group.append(_conformed(read, columns, where))
            if sum(table.num_rows for table in group) >= _ROWS_AT_ONCE:
                yield from _matches(engine, group, expression, params)
                group = []
        if group:
            yield from _matches(engine, group, expression, params)


def _matches(
    engine: Engine, group: list[pa.Table], expression: Expression, params: Params
) -> list[Rows]:
    found = engine.matches(pa.concat_tables(group), expression, params)
    ends = np.cumsum([table.num_rows for table in group])
    parts = np.split(found, np.searchsorted(found, ends[:-1]))
    return [part - start for part, start in zip(parts, [0, *ends[:-1]], strict=True)]


def _resolve(
    engine: Engine, manifests: Sequence[ReadManifest], expression: Expression, params: Params
) -> _Columns:
    """Find the columns that `expression` names and the type of each over all manifests."""
    own = {field.name: field.type for field in manifest.SCHEMA}
    if own.keys() >= set(expression.names):
        return _Columns({name: own[name] for name in expression.names}, frozenset())
    known: dict[str, set[pa.DataType | None]] = {name: {kind} for name, kind in own.items()}
    for read in manifests:
        for name, kind in _types(read).items():
            known.setdefault(name, set()).add(kind)
    _refuse_unknown(engine, expression, params, list(known))
    types: dict[str, pa.DataType] = {}
    texts = set()
    for name in sorted(_referenced(expression, known)):
        kind = fields.unify(known[name])
        types[name] = pa.string() if kind is None else kind
        if kind is None:
            texts.add(name)
    return _Columns(types, frozenset(texts))


def _types(read: ReadManifest) -> dict[str, pa.DataType | None]:
    """The type of each column of a manifest, None where it is JSON text."""
    data = read()
    meta = manifest.decode(data, []).meta
    schema = pq.read_schema(pa.BufferReader(data))
    return {f.name: None if f.name in meta.json_columns else f.type for f in schema}


def _refuse_unknown(
    engine: Engine, expression: Expression, params: Params, known: list[str]
) -> None:
    """Let DuckDB say what it thinks of a name that is no column and that no lambda introduces."""
    folded = {name.lower(): name for name in known}
    for name in expression.names:
        if name.lower() not in folded and name not in expression.lambda_names:
            engine.matches(pa.table({c: pa.nulls(0) for c in folded.values()}), expression, params)
            raise refusal(expression.sql, f"{name!r} is no column")


def _referenced(expression: Expression, known: Collection[str]) -> set[str]:
    """The columns that the names of `expression` mean; SQL does not tell upper from lower case."""
    found: dict[str, str] = {}
    for name in expression.names:
        alike = sorted(column for column in known if column.lower() == name.lower())
        if not alike:
            continue  # a lambda's own name
        column = name if name in alike else alike[0]
        ambiguous = name not in alike and len(alike) > 1
        if ambiguous or found.setdefault(name.lower(), column) != column:
            raise refusal(expression.sql, f"columns {alike} differ only in case")
    return set(found.values())


def _conformed(read: ReadManifest, columns: _Columns, where: str) -> pa.Table:
    """The columns of one manifest in the types that they have over all of them."""
    found = manifest.decode(read(), columns.to_read())
    arrays = []
    for name, kind in columns.types.items():
        if name not in found.table.column_names:
            arrays.append(pa.chunked_array([pa.nulls(found.table.num_rows, kind)]))
        elif name in columns.texts:
            arrays.append(_json_texts(found, name))
        else:
            arrays.append(_cast(found.table.column(name), kind, name, where))
    # A table without columns has no rows, so one that is always there is kept.
    arrays.append(pa.chunked_array([pa.nulls(found.table.num_rows)]))
    return pa.table(arrays, names=[*columns.types, "__fsmount_rows_count__"])


def _cast(column: pa.ChunkedArray, kind: pa.DataType, name: str, where: str) -> pa.ChunkedArray:
    try:
        return column.cast(kind)
    except pa.ArrowInvalid as error:
        raise refusal(where, f"field {name!r} can't be compared as {kind}: {error}") from None


def _json_texts(found: manifest.Manifest, name: str) -> pa.ChunkedArray:
    """The JSON text of a field in each row, from the verbatim sidecar where there is one."""
    column = found.table.column(name)
    if name in found.meta.json_columns:
        return column.cast(pa.string())
    values = column.to_pylist()
    for row, sidecar in enumerate(found.table.column("__sidecar__").to_pylist()):
        parsed = {} if sidecar is None else fields.parse_sidecar(sidecar)
        values[row] = parsed.get(name, values[row])
    return pa.chunked_array([fields.json_column(values)])
