"""Rows of manifests for which an SQL expression is true."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from fsmount.formats import manifest
from fsmount.formats.manifest import Manifest
from fsmount.select import guarded
from fsmount.select.columns import (
    OWN_TYPES,
    Columns,
    ReadManifest,
    column_types,
    fields_alike,
    read_ahead,
)
from fsmount.select.expression import Engine, Expression, Params, Rows, refusal

_ROWS_AT_ONCE = 1 << 16  # of all manifests that one query looks at


def rows_where(
    manifests: Sequence[ReadManifest], where: str, params: Params = None, also: Sequence[str] = ()
) -> Iterator[tuple[Rows, Manifest]]:
    """For each manifest in turn, the ascending numbers of the rows for which `where` is true.

    With them comes the manifest, decoded with the columns `also` and perhaps others.

    `where` is one SQL expression over the manifests' columns; NULL is not true. `params` fill `?`
    and `$1` (a sequence) or `$name` (a mapping). Memory does not grow with the number of manifests.
    A call of a function whose cost has no bound is evaluated with one (`fsmount.select.guarded`).

    Raises PlanError for anything but such an expression, with DuckDB's message where it has one;
    FormatError for a manifest that is none, or has not the columns of the first one.
    """
    with Engine() as engine:
        expression = engine.parse(where)
        columns = _resolve(engine, manifests, expression, params)
        needed = sorted({*columns.needed, *also})
        for group in _groups(manifest.decode(data, needed) for data in read_ahead(manifests)):
            table = pa.concat_tables(map(columns.of, group))
            found = _matches(engine, table, expression, params)
            ends = np.cumsum([each.table.num_rows for each in group])
            parts = np.split(found, np.searchsorted(found, ends[:-1]))
            for each, part, start in zip(group, parts, [0, *ends[:-1]], strict=True):
                yield part - start, each


def _matches(engine: Engine, table: pa.Table, expression: Expression, params: Params) -> Rows:
    if expression.bounded:
        return engine.matches(table, expression, params)
    return guarded.matches(table, expression, params)


def _groups(manifests: Iterable[Manifest]) -> Iterator[list[Manifest]]:
    """Manifests in groups of many rows, since each query costs as much as many rows do."""
    group: list[Manifest] = []
    rows = 0
    for each in manifests:
        group.append(each)
        rows += each.table.num_rows
        if rows >= _ROWS_AT_ONCE:
            yield group
            group, rows = [], 0
    if group:
        yield group


def _resolve(
    engine: Engine, manifests: Sequence[ReadManifest], expression: Expression, params: Params
) -> Columns:
    """Find the columns that `expression` names and the type of each."""
    if set(manifest.OWN_COLUMNS) >= set(expression.names):
        return Columns.of_types(OWN_TYPES, expression.names)
    known = column_types(manifests)
    _refuse_unknown(engine, expression, params, list(known))
    columns = Columns.of_types(known, _referenced(expression, known))
    for name, kind in columns.types.items():
        alike = fields_alike(kind)
        if alike:
            raise refusal(
                expression.sql,
                f"column {name!r} is ambiguous, its fields {alike} differ only in case; "
                "json_extract(decode(__sidecar__), path) tells them apart",
            )
    return columns


def _refuse_unknown(
    engine: Engine, expression: Expression, params: Params, known: list[str]
) -> None:
    """Let DuckDB say what it thinks of a name that is no column and that no lambda introduces."""
    folded = {name.lower(): name for name in known}
    for name in expression.names:
        if name.lower() not in folded and name not in expression.lambda_names:
            none = pa.table({column: pa.nulls(0) for column in folded.values()})
            _matches(engine, none, expression, params)
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
