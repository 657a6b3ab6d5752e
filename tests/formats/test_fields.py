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
from fsmount.formats import fields, kinds, parquet
from fsmount.formats.kinds import Fields

ROWS = st.lists(JSON_OBJECTS, max_size=4)


def parsed(value: object) -> dict[str, Any]:
    return fields.parse_sidecar(json.dumps(value).encode())


def columns(rows: list[dict[str, Any]]) -> tuple[dict[str, pa.Array], tuple[str, ...]]:
    """The columns of rows that are all of a version."""
    return fields.columns(rows, kinds.settle(kinds.fields_of(rows)))


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
    arrays, texts = columns(rows)
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
    arrays, texts = columns(rows)
    random.shuffle(rows)
    again, texts_again = columns(rows)
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
    arrays, texts = columns([parsed({"x": value}) for value in values])
    assert arrays["x"].type == (pa.string() if kind is None else kind)
    assert texts == (("x",) if kind is None else ())


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("1e400", "1e400"),
        ("1e-400", "1e-400"),
        ("-0.00012E-999", "-0.00012E-999"),
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
    arrays, texts = columns([fields.parse_sidecar(b'{"x": %s}' % text.encode())])
    assert (arrays["x"].to_pylist(), texts) == ([column], ("x",))


@pytest.mark.parametrize("text", ["0.0", "-0e0", "0E-999", "5e-324", "3e-324", "1e-310", "0.10"])
def test_a_number_that_a_double_stands_for_is_a_double(text: str) -> None:
    arrays, texts = columns([fields.parse_sidecar(b'{"x": %s}' % text.encode())])
    assert (texts, arrays["x"].type) == ((), pa.float64())
    assert equal(arrays["x"][0].as_py(), float(text))


def test_missing_and_null_are_null() -> None:
    arrays, _ = columns([{}, {"x": None}, {"x": 1}])
    assert arrays["x"].to_pylist() == [None, None, 1]


def test_the_deepest_sidecar_becomes_columns() -> None:
    for begin, end in (('{"x":', "}"), ("[", "]")):
        for depth, texts in ((32, ()), (33, ("x",)), (63, ("x",))):
            text = begin * depth + "1" + end * depth
            found = columns([fields.parse_sidecar(f'{{"x":{text}}}'.encode())])
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


def test_a_field_that_stands_twice_among_very_many_is_found_at_once() -> None:
    names = [*(str(n) for n in range(200_000)), "199999"]
    data = "{" + ",".join(f'"{name}":1' for name in names) + "}"
    with pytest.raises(SidecarError, match="field '199999' stands twice"):
        fields.parse_sidecar(data.encode())


SIDECAR = b'{"a": [1, 2.5e3, null], "b": {"c": "\\u00e9 \\n", "d": true}, "e": "\xc3\xa9"}'


@given(st.one_of(st.binary(), damaged(SIDECAR)))
@settings(max_examples=300)
def test_hostile_sidecars_are_sidecar_errors(data: bytes) -> None:
    try:
        value = fields.parse_sidecar(data)
    except SidecarError:
        return
    assert isinstance(value, dict)
    columns([value])


@given(st.lists(ROWS, max_size=4), st.randoms())
@settings(max_examples=200)
def test_the_schema_of_a_version_is_that_of_all_its_samples(
    parts: list[list[dict[str, Any]]], random: Any
) -> None:
    """However they are divided, and in whatever order: the partitions' fields tell it alone."""
    parts = [[parsed(row) for row in rows] for rows in parts]
    found = [kinds.fields_of(rows) for rows in parts]
    whole = kinds.settle(kinds.fields_of(row for rows in parts for row in rows))
    assert kinds.settle(kinds.unify(found)) == whole
    dumped = [each.dump() for each in found]
    random.shuffle(dumped)
    assert kinds.settle(kinds.unify_dumped(dumped)) == whole
    assert [Fields.load(text).dump() for text in dumped] == dumped
    for rows in parts:
        assert list(fields.columns(rows, whole)[0]) == sorted(whole)


@given(st.lists(ROWS, min_size=3, max_size=3))
def test_unify_is_a_join(parts: list[list[dict[str, Any]]]) -> None:
    a, b, c = (kinds.fields_of([parsed(row) for row in rows]) for rows in parts)
    join = kinds.unify
    assert join([a]) == join([a, a]) == join([a, Fields({})]) == a
    assert join([a, b]) == join([b, a])
    assert join([join([a, b]), c]) == join([a, join([b, c])]) == join([a, b, c])
    assert join([]) == Fields({})


@pytest.mark.parametrize(
    ("values", "joined"),
    [
        ([1, 0.5], "double"),
        ([-1, 1 << 63], "json"),
        ([1, 1 << 63], "uint64"),
        ([-1, 1 << 62], "int64"),
        ([1 << 53, -(1 << 53), 0.5], "double"),
        ([(1 << 53) + 1, 0.5], "json"),
        ([[], [1]], ["int64"]),
        ([True, 1], "json"),
        (["1", 1], "json"),
        ([{}, 1], "json"),
        ([{"b": 1}, {"a": None}], {"a": "null", "b": "int64"}),
        ([{"a": 1}, {"a": "1"}], "json"),
        ([None, None], "null"),
    ],
)
def test_partitions_join_as_specified(values: list[Any], joined: Any) -> None:
    for order in (values, values[::-1]):
        found = kinds.unify(kinds.fields_of([parsed({"x": value})]) for value in order)
        assert kinds.settle(found) == {"x": joined}


def keyed(number: int, keys: int = 40) -> dict[str, Any]:
    """A sidecar with an object keyed by ids that no other sample has."""
    return {"label": number, "boxes": {f"{number}-{at}": [1.5, at] for at in range(keys)}}


def test_objects_keyed_by_ids_are_json_text() -> None:
    rows = [parsed(keyed(number)) for number in range(1000)]
    found = kinds.fields_of(rows)
    assert found.kinds == {"boxes": "json", "label": "uint53"}
    arrays, texts = fields.columns(rows, kinds.settle(found))
    assert texts == ("boxes",)
    assert json.loads(arrays["boxes"][7].as_py()) == rows[7]["boxes"]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({str(n): 1 for n in range(256)}, "struct"),
        ({str(n): 1 for n in range(257)}, "json"),
        ({"a": {str(n): 1 for n in range(200)}, "b": {str(n): 1 for n in range(57)}}, "json"),
        ([{str(n): 1} for n in range(257)], "json"),
    ],
)
def test_a_field_has_at_most_256_leaves(value: Any, kind: str) -> None:
    found = kinds.fields_of([parsed({"x": value})]).kinds["x"]
    assert found == kind if kind == "json" else isinstance(found, dict)
    parts = value if isinstance(value, list) else [{name: part} for name, part in value.items()]
    apart = kinds.unify(kinds.fields_of([parsed({"x": part})]) for part in parts)
    assert apart.kinds["x"] == found or isinstance(value, list)


def test_names_that_few_samples_have_are_no_columns_beyond_1000() -> None:
    rows = [parsed({"label": n, "few": 1, **{f"{n}-{k}": k for k in range(40)}}) for n in range(30)]
    del rows[0]["few"]
    found = kinds.fields_of(rows)
    assert (sorted(found.kinds), found.more) == (["few", "label"], True)
    other = kinds.fields_of([parsed({"label": "x", "0-1": 1, "rare": 1})])
    joined = kinds.unify([found, other])
    unnamed = {"0-1": "json", "rare": "json"}  # the first partition may have them too
    assert joined == Fields({**unnamed, "few": "uint53", "label": "json"}, True)
    assert kinds.unify([other, found]) == joined


def test_text_arrays_are_columns_always() -> None:
    rows = [parsed({f"{n}-{k}": k for k in range(40)} | {f"t{n}": "a"}) for n in range(30)]
    texts = {f"t{n}" for n in range(30)}
    found = kinds.fields_of(rows, texts)
    assert found.kinds == dict.fromkeys(sorted(texts), "string")
    other = kinds.fields_of([{"u": "b", "v": 1}], {"u"})
    assert kinds.unify([found, other]).kinds == {**found.kinds, "u": "json", "v": "json"}


def test_a_thousand_common_names_are_the_most_frequent() -> None:
    rows = [{f"{n:04d}": 1 for n in range(1100)}, {f"{n:04d}": 1 for n in range(100, 1100)}]
    assert list(kinds.fields_of(rows).kinds) == [f"{n:04d}" for n in range(100, 1100)]
    found = kinds.unify(kinds.fields_of([dict.fromkeys(row, 1)]) for row in rows[1:])
    assert list(found.kinds) == [f"{n:04d}" for n in range(100, 1100)]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}",
        '{"kinds":{},"more":1,"texts":[]}', '{"kinds":{},"more":false,"texts":["a"]}',
        *(
            f'{{"kinds":{{"a":{kind}}},"more":false,"texts":[]}}'
            for kind in (
                '"int32"', "1", "null", "[]", '["null","null"]', "{}", '["json"]', '{"a":"json"}',
                '{"\\ud800":"null"}', "[" * 33 + '"null"' + "]" * 33, "[" * 9999 + "]" * 9999,
            )
        ),
    ],
)  # fmt: skip
def test_hostile_kinds_are_format_errors(text: str) -> None:
    with pytest.raises(FormatError):
        Fields.load(text)


def test_values_of_another_type_are_refused() -> None:
    for value, kind in (("a", "int64"), (-1, "uint64"), ({"a": 1}, ["null"])):
        with pytest.raises(FormatError, match="field 'x' has other values than"):
            fields.columns([{"x": value}], {"x": kind})


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
