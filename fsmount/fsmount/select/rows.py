"""Rows of manifests for which an SQL expression is true."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa

from fsmount.formats import manifest
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
        for data in read_ahead(manifests):
            group.append(columns.read(data))
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
) -> Columns:
    """Find the columns that `expression` names and the type of each over all manifests."""
    if set(manifest.OWN_COLUMNS) >= set(expression.names):
        return Columns.unify(OWN_TYPES, expression.names)
    known = column_types(manifests)
    _refuse_unknown(engine, expression, params, list(known))
    columns = Columns.unify(known, _referenced(expression, known))
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
