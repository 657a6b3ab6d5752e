"""Sidecars and their columns: what is typed is equal, what can't be is JSON text."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import JSON_OBJECTS, damaged

from fsmount.errors import FormatError, SidecarError
from fsmount.formats import fields, parquet

ROWS = st.lists(JSON_OBJECTS, max_size=4)
TYPES = st.recursive(
    st.sampled_from([pa.null(), pa.bool_(), pa.string(), pa.int64(), pa.uint64(), pa.float64()]),
    lambda part: st.one_of(
        part.map(pa.list_),
        st.dictionaries(st.sampled_from("abc"), part, min_size=1).map(
            lambda parts: pa.struct(sorted(parts.items()))
        ),
    ),
    max_leaves=5,
)
MAYBE_TYPES = st.one_of(TYPES, TYPES, TYPES, st.none())


def parsed(value: object) -> dict[str, Any]:
    return fields.parse_sidecar(json.dumps(value).encode())


def completed(value: Any, kind: pa.DataType) -> Any:
    """`value` as a column of `kind` gives it: a missing field of a struct is null."""
    if isinstance(value, dict):
        return {part.name: completed(value.get(part.name), part.type) for part in kind}
    if isinstance(value, list):
        return [completed(item, kind.value_type) for item in value]
    return value


def equal(one: Any, other: Any) -> bool:
    """Equality that tells True from 1 and -0.0 from 0.0, but takes 1 for 1.0."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[n], other[n]) for n in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if one == other == 0:
        return math.copysign(1, one) == math.copysign(1, other)
    return bool(one == other)


def through_parquet(arrays: dict[str, pa.Array]) -> pa.Table:
    return parquet.read(parquet.write(pa.table(arrays), {}), "test")[0]


@given(ROWS)
@settings(max_examples=200)
def test_columns_hold_what_the_sidecars_hold(rows: list[dict[str, Any]]) -> None:
    rows = [parsed(row) for row in rows]
    arrays, texts = fields.columns(rows)
    assert list(arrays) == sorted({name for row in rows for name in row})
    table = through_parquet(arrays) if rows and arrays else pa.table(arrays)
    for name in arrays:
        kind, found = table.schema.field(name).type, table.column(name).to_pylist()
        assert kind == arrays[name].type
        for row, value in zip(rows, found, strict=True):
            if name not in texts:
                assert equal(value, completed(row.get(name), kind))
            elif row.get(name) is None:
                assert value is None
            else:
                assert equal(json.loads(value), row[name])


@given(ROWS, st.randoms())
def test_a_columns_type_does_not_depend_on_the_order_of_samples(
    rows: list[dict[str, Any]], random: Any
) -> None:
    arrays, texts = fields.columns(rows)
    random.shuffle(rows)
    again, texts_again = fields.columns(rows)
    assert {n: a.type for n, a in again.items()} == {n: a.type for n, a in arrays.items()}
    assert texts == texts_again


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([None], pa.null()),
        ([True, None], pa.bool_()),
        (["a"], pa.string()),
        ([-(1 << 63), (1 << 63) - 1], pa.int64()),
        ([0, (1 << 64) - 1], pa.uint64()),
        ([-1, (1 << 64) - 1], None),
        ([1 << 64], None),
        ([0.5, 1 << 53], pa.float64()),
        ([0.5, (1 << 53) + 1], None),
        ([True, 1], None),
        (["1", 1], None),
        ([[], None], pa.list_(pa.null())),
        ([[1], [0.5, None]], pa.list_(pa.float64())),
        ([[1], 1], None),
        ([[1, "a"]], None),
        ([{}], None),
        ([{"a": {}}], None),
        ([{"b": 1}, {"a": "x"}], pa.struct([("a", pa.string()), ("b", pa.int64())])),
        ([{"a": 1}, [1]], None),
        ([{"a": 1}, {"a": "1"}], None),
    ],
)
def test_types_are_as_specified(values: list[Any], kind: pa.DataType | None) -> None:
    arrays, texts = fields.columns([parsed({"x": value}) for value in values])
    assert arrays["x"].type == (pa.string() if kind is None else kind)
    assert texts == (("x",) if kind is None else ())


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("1e400", "1e400"),
        ("-1E+999", "-1E+999"),
        ("18446744073709551616", "18446744073709551616"),
        ("9" * 5000, "9" * 5000),
        ('["\\ud800", 1]', '["\\ud800",1]'),
        ('{"b": 1, "a": [{}]}', '{"b":1,"a":[{}]}'),
        ('["é", 1]', '["\\u00e9",1]'),
        ("{}", "{}"),
    ],
)
def test_json_texts_are_as_written(text: str, column: str) -> None:
    arrays, texts = fields.columns([fields.parse_sidecar(b'{"x": %s}' % text.encode())])
    assert (arrays["x"].to_pylist(), texts) == ([column], ("x",))


def test_missing_and_null_are_null() -> None:
    arrays, _ = fields.columns([{}, {"x": None}, {"x": 1}])
    assert arrays["x"].to_pylist() == [None, None, 1]


def test_the_deepest_sidecar_becomes_columns() -> None:
    for begin, end in (('{"x":', "}"), ("[", "]")):
        for depth, texts in ((32, ()), (33, ("x",)), (63, ("x",))):
            text = begin * depth + "1" + end * depth
            found = fields.columns([fields.parse_sidecar(f'{{"x":{text}}}'.encode())])
            value = text if texts else json.loads(text)
            assert found[1] == texts
            assert through_parquet(found[0]).column("x").to_pylist() == [value]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"[]",
        b"null",
        b"1",
        b'"a"',
        b"true",
        b"{",
        b"{}{}",
        b'{"a":1,}',
        b'{"a":NaN}',
        b'{"a":[Infinity]}',
        b'{"a":-Infinity}',
        b'{"a":1,"a":1}',
        b'{"b":{"a":1,"a":2}}',
        b'{"a":01}',
        b"{'a':1}",
        b'{"a":"\n"}',
        b'{"a":"\xff"}',
        b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"),
        b'{"\\ud800":1}',
        b'{"a":%s1%s}' % (b"[" * 64, b"]" * 64),
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_what_is_not_one_json_object_is_a_sidecar_error(data: bytes) -> None:
    with pytest.raises(SidecarError) as caught:
        fields.parse_sidecar(data)
    assert "\n" not in str(caught.value)


SIDECAR = b'{"a": [1, 2.5e3, null], "b": {"c": "\\u00e9 \\n", "d": true}, "e": "\xc3\xa9"}'


@given(st.one_of(st.binary(), damaged(SIDECAR)))
@settings(max_examples=300)
def test_hostile_sidecars_are_sidecar_errors(data: bytes) -> None:
    try:
        value = fields.parse_sidecar(data)
    except SidecarError:
        return
    assert isinstance(value, dict)
    fields.columns([value])


@given(MAYBE_TYPES, MAYBE_TYPES, MAYBE_TYPES)
@settings(max_examples=200)
def test_unify_is_a_join(a: Any, b: Any, c: Any) -> None:
    join = fields.unify
    assert join([a]) == a
    assert join([a, a]) == a
    assert join([a, b]) == join([b, a])
    assert join([join([a, b]), c]) == join([a, join([b, c])]) == join([a, b, c])
    assert join([a, pa.null()]) == a
    assert join([]) == pa.null()


@pytest.mark.parametrize(
    ("types", "joined"),
    [
        ([pa.int64(), pa.uint64()], pa.decimal128(20, 0)),
        ([pa.int64(), pa.float64()], pa.float64()),
        ([pa.int64(), pa.uint64(), pa.float64()], pa.float64()),
        ([pa.list_(pa.null()), pa.list_(pa.int64())], pa.list_(pa.int64())),
        ([pa.bool_(), pa.int64()], None),
        ([pa.string(), pa.int64()], None),
        ([None, pa.int64()], None),
        (
            [pa.struct([("b", pa.int64())]), pa.struct([("a", pa.null())])],
            pa.struct([("a", pa.null()), ("b", pa.int64())]),
        ),
        ([pa.struct([("a", pa.int64())]), pa.struct([("a", pa.string())])], None),
    ],
)
def test_unify_is_as_specified(types: list[Any], joined: pa.DataType | None) -> None:
    assert fields.unify(types) == joined


@given(ROWS, ROWS)
def test_the_union_of_partitions_holds_their_values(one: list[Any], two: list[Any]) -> None:
    """A value of either partition survives the cast to the type they join to."""
    parts = [fields.columns([parsed(row) for row in rows]) for rows in (one, two)]
    for name in parts[0][0].keys() & parts[1][0].keys():
        types = [None if name in texts else arrays[name].type for arrays, texts in parts]
        joined = fields.unify(types)
        if joined is None or pa.types.is_nested(joined):
            continue
        for arrays, _ in parts:
            try:
                cast = arrays[name].cast(joined)
            except pa.ArrowInvalid:
                assert (
                    joined == pa.float64()
                )  # an integer that a double can't hold: a reader's error
                continue
            assert all(map(equal, arrays[name].to_pylist(), map(number, cast.to_pylist())))


def number(value: Any) -> Any:
    return int(value) if type(value).__name__ == "Decimal" else value


def test_a_column_asked_for_is_the_column_given() -> None:
    """pyarrow takes a dot in a name for a nested field as well."""
    table = pa.table({"a": pa.array([{"b": 1}]), "a.b": pa.array([2]), "c": pa.array([3])})
    data = parquet.write(table, {})
    for names in (["a"], ["a.b"], ["a.b", "a"], ["c", "missing"], []):
        found, _ = parquet.read(data, "test", names)
        assert found.to_pydict() == {n: table.column(n).to_pylist() for n in names if n in "a.bc"}


def test_two_columns_of_one_name_are_refused() -> None:
    twice = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(FormatError, match="two columns"):
        parquet.read(parquet.write(twice, {}), "test")
