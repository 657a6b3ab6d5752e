"""What values the fields of sidecars take, and the one type that each has over a whole version.

A *kind* is what JSON values have in common, small enough to be remembered for each partition: a
name, a list of one kind, or an object of kinds by name. Kinds join: the join of two holds the
values of both, whatever the order, and a version's schema follows from the kinds of its partitions
alone. docs/format.md, "Fields", has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from fsmount.errors import FormatError
from fsmount.formats.checked import dump_compact, get, is_unicode, load_object

Kind: TypeAlias = "str | list[Kind] | dict[str, Kind]"
Schema: TypeAlias = "dict[str, Kind]"  # of a version: fields by name, sorted; numbers are types

NULL, BOOLEAN, STRING, DOUBLE, JSON = "null", "bool", "string", "double", "json"
_NAMES_MAX = 1000  # columns of a version, but for text arrays
_LEAVES_MAX = 256  # of one field's objects: each is a column of the file
_LEVELS_MAX = 32  # of lists and structs in a column; pyarrow reads no Parquet of 50
# Integers, by whether there are negative ones and how many bits they take. 2**53 has 53 here, since
# every integer up to it is a double.
_INTEGERS = {
    (False, 53): "uint53", (True, 53): "int54", (False, 63): "uint63", (True, 63): "int64",
    (False, 64): "uint64",
}  # fmt: skip
_SIZES = {kind: size for size, kind in _INTEGERS.items()}
_TYPES = {
    NULL: pa.null(), BOOLEAN: pa.bool_(), STRING: pa.string(), DOUBLE: pa.float64(),
    "int64": pa.int64(), "uint64": pa.uint64(), JSON: pa.string(),
}  # fmt: skip
_NAMES = {*_TYPES, *_SIZES}


class Literal(str):
    """A number that Python has no exact value for, kept as it was written."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of some sidecars and text arrays: the kind of each by name.

    With `more` there are others, so many that they are no columns. `texts` are the names of text
    arrays, whose column is the one place where they are kept.
    """

    kinds: Mapping[str, Kind]
    more: bool = False
    texts: frozenset[str] = frozenset()

    def dump(self) -> str:
        """As compact JSON, which `load` reads."""
        texts = sorted(self.texts)
        return dump_compact({"kinds": self.kinds, "more": self.more, "texts": texts})

    @classmethod
    def load(cls, text: str) -> Fields:
        """The fields in `text`; FormatError."""
        value = load_object(text, "fields")
        kinds = get(value, "kinds", dict)
        texts = get(value, "texts", list)
        if not all(isinstance(name, str) and name in kinds for name in texts):
            raise FormatError("fields: a text array that is none of them")
        for name, kind in kinds.items():
            _check(kind)
            if not is_unicode(name):
                raise FormatError("fields: a name that is not Unicode")
        return cls(kinds, get(value, "more", bool), frozenset(texts))


NO_FIELDS = Fields({})


def fields_of(rows: Iterable[Mapping[str, Any]], texts: Collection[str] = frozenset()) -> Fields:
    """The fields of `rows`, which are parsed sidecars with the text arrays, named `texts`, in."""
    kinds: dict[str, Kind] = {}
    counts: Counter[str] = Counter()
    total = 0
    for row in rows:
        total += 1
        counts.update(row.keys())
        for name, value in row.items():
            before = kinds.get(name, NULL)
            if before != JSON:
                kinds[name] = _widen(before, infer(value))
    common = _common(counts, total, texts)
    columns = {name: kinds[name] for name in common}
    return Fields(columns, len(common) < len(counts), frozenset(texts))


def unify(parts: Iterable[Fields]) -> Fields:
    """The fields of several partitions together; a pure function that minds no order.

    A field that a partition may have among those that are no columns of it is JSON text.
    """
    return _unify([(part, 1) for part in parts])


def unify_dumped(texts: Iterable[str]) -> Fields:
    """As `unify`, of fields as they are dumped, of which many are equal; FormatError."""
    return _unify([(Fields.load(text), times) for text, times in Counter(texts).items()])


def _unify(found: Sequence[tuple[Fields, int]]) -> Fields:
    kinds: dict[str, Kind] = {}
    counts: Counter[str] = Counter()
    for part, times in found:
        counts.update(dict.fromkeys(part.kinds, times))
        for name, kind in part.kinds.items():
            kinds[name] = _widen(kinds.get(name, NULL), kind)
    texts = frozenset(name for part, _ in found for name in part.texts)
    for part in (part for part, _ in found if part.more):
        for name in counts.keys() - part.kinds.keys():
            kinds[name] = JSON
    common = _common(counts, sum(times for _, times in found), texts)
    more = any(part.more for part, _ in found) or len(common) < len(counts)
    return Fields({name: kinds[name] for name in common}, more, texts)


def settle(fields: Fields) -> Schema:
    """The schema that holds the values of `fields` and leaves nothing to be told of numbers."""
    return {name: _settle(fields.kinds[name]) for name in sorted(fields.kinds)}


def arrow_type(kind: Kind) -> pa.DataType:
    """The type of a schema's column; JSON text is a string."""
    if isinstance(kind, str):
        return _TYPES[kind]
    if isinstance(kind, list):
        return pa.list_(arrow_type(kind[0]))
    return pa.struct([(name, arrow_type(kind[name])) for name in sorted(kind)])


def infer(value: Any) -> Kind:  # noqa: PLR0911 - one case a line
    """The kind of one JSON value."""
    match value:
        case None:
            return NULL
        case bool():
            return BOOLEAN
        case int():
            return _integer(value)
        case float():
            return DOUBLE
        case Literal():
            return JSON
        case str():
            return STRING if is_unicode(value) else JSON
        case list():
            item: Kind = NULL
            for part in value:
                item = _widen(item, infer(part))
            return JSON if item == JSON else [item]
        case _:
            return _object(value)


def join(a: Kind, b: Kind) -> Kind:
    """The least kind that holds the values of both; `a` itself where that is one."""
    if b in (a, NULL):
        return a
    if a == NULL:
        return b
    if isinstance(a, str) and isinstance(b, str):
        return _join_numbers(a, b)
    if isinstance(a, list) and isinstance(b, list):
        item = join(a[0], b[0])
        return JSON if item == JSON else [item]
    if isinstance(a, dict) and isinstance(b, dict):
        parts = {**a, **{name: join(a.get(name, NULL), kind) for name, kind in b.items()}}
        return JSON if JSON in parts.values() else parts
    return JSON


def _widen(kind: Kind, more: Kind) -> Kind:
    """The join, or JSON text where a column of it could not be read, or would be very many."""
    joined = join(kind, more)
    return joined if joined is kind else _bounded(joined)


def _common(counts: Counter[str], total: int, texts: Collection[str]) -> list[str]:
    """The names that become columns, sorted: all, or of too many those that half of all have."""
    if len(counts) <= _NAMES_MAX:
        return sorted(counts)
    often = sorted(name for name, times in counts.items() if 2 * times >= total)
    return sorted({*sorted(often, key=lambda name: -counts[name])[:_NAMES_MAX], *texts})


def _bounded(kind: Kind) -> Kind:
    leaves, levels = _measure(kind)
    return JSON if leaves > _LEAVES_MAX or levels > _LEVELS_MAX else kind


def _measure(kind: Kind) -> tuple[int, int]:
    """How many columns of the file it takes, and how many levels of lists and structs."""
    if isinstance(kind, str):
        return 1, 0
    parts = [_measure(part) for part in (kind if isinstance(kind, list) else kind.values())]
    return sum(leaves for leaves, _ in parts), 1 + max(levels for _, levels in parts)


def _settle(kind: Kind) -> Kind:
    if isinstance(kind, str):
        return "int64" if kind in _SIZES and kind != "uint64" else kind
    if isinstance(kind, list):
        return [_settle(kind[0])]
    return {name: _settle(part) for name, part in kind.items()}


def _integer(value: int) -> str:
    size = next((bits for bits in (53, 63, 64) if -(1 << bits) <= value < 1 << bits), 65)
    size = 53 if value == 1 << 53 else size
    return _INTEGERS.get((value < 0, size), JSON)


def _join_numbers(a: str, b: str) -> str:
    """Of two names that differ, and neither is null."""
    if DOUBLE in (a, b):
        return DOUBLE if (b if a == DOUBLE else a) in ("uint53", "int54") else JSON
    if a in _SIZES and b in _SIZES:
        (negative, bits), (also, more) = _SIZES[a], _SIZES[b]
        return _INTEGERS.get((negative or also, max(bits, more)), JSON)
    return JSON


def _object(value: dict[str, Any]) -> Kind:
    if not value or len(value) > _LEAVES_MAX or not all(map(is_unicode, value)):
        return JSON
    parts = {name: infer(part) for name, part in value.items()}
    return JSON if JSON in parts.values() else parts


def _check(kind: object, levels: int = _LEVELS_MAX) -> None:
    """Raise FormatError unless `kind`, which was read from a file, is one."""
    match kind:
        case str() if kind in _NAMES and (kind != JSON or levels == _LEVELS_MAX):
            pass
        case [item] if levels > 0:
            _check(item, levels - 1)
        case dict() if kind and levels > 0 and all(map(is_unicode, kind)):
            for part in kind.values():
                _check(part, levels - 1)
        case _:
            raise FormatError("a field is of no kind that there is")
