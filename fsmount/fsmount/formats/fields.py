"""Sidecars, and the typed columns that their fields become.

The verbatim bytes of a sidecar are in the manifest; the columns beside them exist for queries. A
field whose values no Parquet type holds faithfully becomes a column of their JSON texts. `kinds`
finds out which type each field has.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isinf
from typing import Any

import pyarrow as pa

from fsmount.errors import FormatError, SidecarError
from fsmount.formats.checked import is_unicode
from fsmount.formats.kinds import JSON, Literal, Schema, arrow_type

_DEPTH_MAX = 64  # of objects and arrays in a sidecar
_SIGNIFICANT = re.compile("[^eE]*[1-9]")  # a digit of a number that is not zero
_DIGITS_MAX = 1000  # of an integer that we compute with; Python refuses some 4300


def parse_sidecar(data: bytes) -> dict[str, Any]:
    """The one JSON object (RFC 8259, UTF-8) that a sidecar's bytes hold; SidecarError otherwise."""
    try:
        value = json.loads(
            data.decode(),
            parse_float=_number,
            parse_int=_integer,
            parse_constant=_refuse_constant,
            object_pairs_hook=_object,
        )
    except (ValueError, RecursionError) as error:
        raise SidecarError(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise SidecarError(f"not a JSON object but {_kind(value)}")
    if not all(map(is_unicode, value)):
        raise SidecarError("a field's name is not UTF-8")
    if _deep(value):
        raise SidecarError(f"nested more than {_DEPTH_MAX} deep")
    return value


def json_text(value: Any) -> str:
    """`value` as compact JSON in ASCII, its numbers exact and its objects' order kept."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{json_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(json_text, value)) + "]"
    return str(value) if isinstance(value, Literal) else json.dumps(value)


def columns(
    rows: Sequence[Mapping[str, Any]], schema: Schema
) -> tuple[dict[str, pa.Array], tuple[str, ...]]:
    """The columns of `schema`, filled with `rows`, and which of them are JSON texts.

    A row is a parsed sidecar. Missing and null fields are null; the verbatim bytes tell them apart.
    The schema must hold the fields of `rows`; FormatError for a value of quite another type.
    """
    arrays: dict[str, pa.Array] = {}
    for name, kind in schema.items():
        values = [row.get(name) for row in rows]
        try:
            arrays[name] = (
                json_column(values) if kind == JSON else pa.array(values, arrow_type(kind))
            )
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            raise FormatError(f"field {name!r} has other values than {kind}: {error}") from error
    return arrays, tuple(name for name, kind in schema.items() if kind == JSON)


def json_column(values: Iterable[Any]) -> pa.Array:
    """The JSON texts of `values`, null where a value is None."""
    return pa.array([None if v is None else json_text(v) for v in values], pa.string())


def _number(text: str) -> float | Literal:
    """The double nearest to a number; one that no finite double stands for keeps its text."""
    value = float(text)
    vanished = value == 0 and _SIGNIFICANT.match(text) is not None
    return Literal(text) if vanished or isinf(value) else value


def _integer(text: str) -> int | Literal:
    return int(text) if len(text) <= _DIGITS_MAX else Literal(text)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"field {twice!r} stands twice")
    return value


def _deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH_MAX):
        if not level:
            break
        level = [
            part
            for outer in level
            for part in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(part, dict | list)
        ]
    return bool(level)


def _kind(value: object) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
