"""Sidecars, and the typed columns that their fields become.

The verbatim bytes of a sidecar are in the manifest; the columns beside them exist for queries. A
field whose values no Parquet type holds faithfully becomes a column of their JSON texts.
docs/format.md, "Fields", has the rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Any

import pyarrow as pa

from fsmount.errors import SidecarError
from fsmount.formats.checked import is_unicode

_DEPTH_MAX = 64  # of objects and arrays in a sidecar
_LEVELS_MAX = 32  # of lists and structs in a column; pyarrow reads no Parquet of 50
_DIGITS_MAX = 1000  # of an integer that we compute with; Python refuses some 4300
_EXACT = 1 << 53  # every integer up to here is a double


class _Literal(str):
    """A number that Python has no exact value for, kept as it was written."""

    __slots__ = ()


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
    return str(value) if isinstance(value, _Literal) else json.dumps(value)


def columns(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, pa.Array], tuple[str, ...]]:
    """The columns of all fields of `rows`, sorted by name, and which of them are JSON texts.

    A row is a parsed sidecar. Missing and null fields are null; the verbatim bytes tell them apart.
    """
    names = sorted({name for row in rows for name in row})
    arrays: dict[str, pa.Array] = {}
    texts = []
    for name in names:
        values = [row.get(name) for row in rows]
        kind = _arrow(_join_all(map(_infer, values)))
        if kind is None or _levels(kind) > _LEVELS_MAX:
            arrays[name] = json_column(values)
            texts.append(name)
        else:
            arrays[name] = pa.array(values, kind)
    return arrays, tuple(texts)


def json_column(values: Iterable[Any]) -> pa.Array:
    """The JSON texts of `values`, null where a value is None."""
    return pa.array([None if v is None else json_text(v) for v in values], pa.string())


def unify(types: Iterable[pa.DataType | None]) -> pa.DataType | None:
    """The type that a field has over partitions, given its type in each; None stands for JSON text.

    Integers of both signs join as decimal(20, 0), integers and doubles as double (a reader must
    refuse an integer that a double can't hold), lists and structs by their parts. Any other
    mixture is JSON text.
    """
    joined: pa.DataType | None = pa.null()
    for kind in types:
        joined = None if joined is None or kind is None else _unify(joined, kind)
    return joined


def _unify(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    if _is_number(a) and _is_number(b):
        return pa.float64() if pa.float64() in (a, b) else pa.decimal128(20, 0)
    if pa.types.is_list(a) and pa.types.is_list(b):
        item = _unify(a.value_type, b.value_type)
        return None if item is None else pa.list_(item)
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        return _unify_structs(a, b)
    return None


def _unify_structs(a: pa.StructType, b: pa.StructType) -> pa.DataType | None:
    parts: dict[str, pa.DataType] = {field.name: field.type for field in a}
    for field in b:
        kind = _unify(parts.get(field.name, pa.null()), field.type)
        if kind is None:
            return None
        parts[field.name] = kind
    return pa.struct(sorted(parts.items()))


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


# What values a field takes, as small frozen values that join.


@dataclass(frozen=True, slots=True)
class _Null:
    pass


@dataclass(frozen=True, slots=True)
class _Scalar:
    type: pa.DataType


@dataclass(frozen=True, slots=True)
class _Number:
    real: bool  # some value is no integer
    low: int  # of the integers
    high: int


@dataclass(frozen=True, slots=True)
class _List:
    item: _Kind


@dataclass(frozen=True, slots=True)
class _Struct:
    parts: tuple[tuple[str, _Kind], ...]  # sorted by name


@dataclass(frozen=True, slots=True)
class _Mixed:
    """No Parquet type holds these values faithfully."""


_Kind = _Null | _Scalar | _Number | _List | _Struct | _Mixed


def _infer(value: Any) -> _Kind:  # noqa: PLR0911 - one case a line
    match value:
        case None:
            return _Null()
        case bool():
            return _Scalar(pa.bool_())
        case int():
            return _Number(False, value, value)
        case float():
            return _Number(True, 0, 0)
        case _Literal():
            return _Mixed()
        case str():
            return _Scalar(pa.string()) if is_unicode(value) else _Mixed()
        case list():
            return _List(_join_all(map(_infer, value)))
        case _:
            if not value or not all(map(is_unicode, value)):
                return _Mixed()
            return _Struct(tuple((name, _infer(value[name])) for name in sorted(value)))


def _join_all(kinds: Iterable[_Kind]) -> _Kind:
    joined: _Kind = _Null()
    for kind in kinds:
        joined = _join(joined, kind)
    return joined


def _join(a: _Kind, b: _Kind) -> _Kind:
    match a, b:
        case (_Null(), other) | (other, _Null()):
            return other
        case _Number(), _Number():
            return _Number(a.real or b.real, min(a.low, b.low), max(a.high, b.high))
        case _List(), _List():
            return _List(_join(a.item, b.item))
        case _Struct(), _Struct():
            parts = dict(a.parts)
            for name, kind in b.parts:
                parts[name] = _join(parts.get(name, _Null()), kind)
            return _Struct(tuple(sorted(parts.items(), key=lambda part: part[0])))
    return a if a == b else _Mixed()


def _arrow(kind: _Kind) -> pa.DataType | None:
    match kind:
        case _Null():
            return pa.null()
        case _Scalar():
            return kind.type
        case _Number():
            return _arrow_number(kind)
        case _List():
            item = _arrow(kind.item)
            return None if item is None else pa.list_(item)
        case _Struct():
            parts = [(name, _arrow(part)) for name, part in kind.parts]
            return None if any(part is None for _, part in parts) else pa.struct(parts)
    return None


def _levels(kind: pa.DataType) -> int:
    parts = [kind.field(i).type for i in range(kind.num_fields)]
    return 1 + max(map(_levels, parts)) if parts else 0


def _arrow_number(kind: _Number) -> pa.DataType | None:
    if kind.real:
        return pa.float64() if kind.low >= -_EXACT and kind.high <= _EXACT else None
    if kind.low >= -(1 << 63) and kind.high < 1 << 63:
        return pa.int64()
    return pa.uint64() if kind.low >= 0 and kind.high < 1 << 64 else None


def _number(text: str) -> float | _Literal:
    value = float(text)
    return _Literal(text) if isinf(value) else value


def _integer(text: str) -> int | _Literal:
    return int(text) if len(text) <= _DIGITS_MAX else _Literal(text)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return value


def _deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH_MAX):
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
