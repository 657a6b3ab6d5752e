"""Selections over manifests: what they mean, and what they refuse."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import duckdb
import numpy as np
import pytest

from fsmount.errors import FormatError, PlanError
from fsmount.formats import manifest, sample
from fsmount.model import Digest, ShardRef
from fsmount.select import read_columns, rows_of_keys, rows_where
from fsmount.select.expression import Params
from fsmount.testing import one_schema

HEADER = sample.read_schema(sample.encode({})).header


def manifest_bytes(partition: str, sidecars: Sequence[object], **texts: str) -> bytes:
    """A manifest whose row i has the key `<partition>/i` and the sidecar `sidecars[i]`."""
    rows = [
        manifest.Row(
            key=f"{partition}/{place}",
            shard=0,
            index=place,
            offset=512 + 1024 * place,
            size=100,
            raw_size=64,
            checksum=place,
            sha256=bytes(32),
            schema=0,
            texts=tuple(manifest.Text(name, "<U9", value) for name, value in texts.items()),
            sidecar=None if value is None else json.dumps(value).encode(),
        )
        for place, value in enumerate(sidecars)
    ]
    revision = Digest("0" * 64)
    shard = ShardRef(revision, 512 + 1024 * len(rows), len(rows))
    meta = manifest.ManifestMeta(partition, revision, revision, (shard,), (HEADER,), (), "zstd")
    return one_schema.encode_alone(rows, meta)


def select(where: str, *manifests: bytes, params: Params = None) -> list[list[int]]:
    datas = [each.data for each in one_schema.conform(manifests)]
    found = rows_where([lambda m=m: m for m in datas], where, params)
    return [rows.tolist() for rows, _ in found]


A = manifest_bytes(
    "a",
    [
        {"label": 1, "name": "x;y", "gps": {"lat": 1.5}, "tags": [1, 2]},
        {"label": 2, "name": "y", "gps": {"lat": -1.5}, "tags": []},
        {"label": None, "name": "z"},
        None,
    ],
)
B = manifest_bytes("b", [{"label": 3, "only_b": True}, {"label": 1, "mixed": "text"}])


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("label <> 1", [[1], [0]]),
        ("label IS NULL", [[2, 3], []]),
        ("only_b", [[], [0]]),
        ("only_b IS NULL", [[0, 1, 2, 3], [1]]),
        ("LABEL = 2", [[1], []]),
        ("name = 'x;y' -- a comment", [[0], []]),
        ("gps.lat < 0 OR list_contains(tags, 2)", [[0, 1], []]),
        ("len(list_filter(tags, lambda t: t > 1)) = 1", [[0], []]),
        ("__index__ = 0 AND __key__ LIKE 'b/%'", [[], [0]]),
        ("label BETWEEN 2 AND 3 AND NOT (name = 'y') IS TRUE", [[], [0]]),
        ("label::VARCHAR IN ('1', '2')", [[0, 1], [1]]),
        ("list_sum(tags) = 3", [[0], []]),
        ("list_aggr(tags, 'sum') = 3", [[0], []]),
        ("name.upper() = 'Y'", [[1], []]),
        ("label < pi()", [[0, 1], [0, 1]]),
        ("tags = []", [[1], []]),
        ("NULL", [[], []]),
        ("true", [[0, 1, 2, 3], [0, 1]]),
    ],
)
def test_an_expression_is_evaluated_row_by_row(where: str, expected: list[list[int]]) -> None:
    assert select(where, A, B) == expected


def test_a_part_of_the_samples_by_a_digest_of_the_key() -> None:
    digests = [hashlib.md5(f"p/{n}".encode(), usedforsecurity=False) for n in range(40)]
    expected = [n for n, digest in enumerate(digests) if digest.hexdigest() < "4"]
    assert 0 < len(expected) < 20
    assert select("md5(__key__) < '4'", manifest_bytes("p", [None] * 40)) == [expected]


def test_parameters_by_place_and_by_name() -> None:
    assert select("label = ? OR name = ?", A, B, params=[3, "y"]) == [[1], [0]]
    assert select("label = $l", A, B, params={"l": 1}) == [[0], [1]]
    with pytest.raises(PlanError, match="Values were not provided"):
        select("label = $l", A, B)
    with pytest.raises(PlanError, match="excess"):
        select("label = $l", A, B, params={"l": 1, "m": 2})


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("label = 1;", "one expression|syntax error"),
        ("label = 1; DROP TABLE x", "Only SELECT"),
        ("label = 1 ORDER BY label", "syntax error"),
        ("label = 1 LIMIT 1", "syntax error"),
        ("label = 1 GROUP BY label", "syntax error"),
        ("label = 1 UNION SELECT 2", "syntax error"),
        ("label = 1) OR (true", "syntax error"),
        ("true) UNION (SELECT 1", "syntax error"),
        ("label = 1 /*", "unterminated"),
        ("", "syntax error"),
        ("label, name", "syntax error"),
        ("label = (SELECT 1)", "subquery"),
        ("EXISTS (SELECT 1)", "subquery"),
        ("label IN (FROM read_csv('/etc/passwd'))", "subquery"),
        ("count(*) > 1", "more than one row"),
        ("max(label) = 1", "more than one row"),
        ("row_number() OVER () = 1", "window|more than one row"),
        ("random() < 0.5", "not a function of the row"),
        ("uuid() IS NULL", "not a function of the row"),
        ("now() > TIMESTAMP '2000-01-01'", "not a function of the row"),
        ("age(TIMESTAMP '2000-01-01') IS NULL", "not a function of the row"),
        ("ago(INTERVAL 1 DAY) IS NULL", "not a function of the row|does not exist"),
        ("nextval('s') = 1", "not a function of the row"),
        ("getvariable('x') = 1", "not a function of the row"),
        ("current_schema() = 'main'", "not a function of the row"),
        ("pg_catalog.current_schema() = 'main'", "not a function of the row"),
        ("current_database() IS NULL", "not a function of the row"),
        ("current_catalog() IS NULL", "not a function of the row"),
        ("current_schemas(true) IS NULL", "not a function of the row"),
        ("in_search_path('memory', 'main')", "not a function of the row|does not exist"),
        ("has_schema_privilege('main', 'usage')", "not a function of the row"),
        ("has_table_privilege('a', 'b', 'select')", "not a function of the row"),
        ("pg_typeof(label) = 'bigint'", "not a function of the row"),
        ("inet_server_addr() IS NULL", "not a function of the row"),
        ("current_query() IS NOT NULL", "not a function of the row"),
        ("txid_current() > 0", "not a function of the row"),
        ("version() = 'v1'", "not a function of the row"),
        ("system.main.VERSION() = 'v1'", "not a function of the row"),
        ("list_filter(tags, lambda t: version() = 'v1') = []", "not a function of the row"),
        ("current_user() = 'duckdb'", "not a function of the row"),
        ("session_user() = 'duckdb'", "not a function of the row"),
        ("current_user = 'duckdb'", "'current_user' is no column"),
        ("current_setting('threads') = 2", "not a function of the row"),
        ("get_block_size('memory') = 1", "not a function of the row|does not exist"),
        ("hash(__key__) % 2 = 0", "not a function of the row"),
        ("md5_number(__key__) % 2 = 0", "not a function of the row"),
        ("md5_number_lower(__key__) % 2 = 0", "not a function of the row"),
        ("json_serialize_sql('SELECT 1') IS NULL", "not a function of the row"),
        ("list_approx_count_distinct(tags) = 2", "not a function of the row"),
        ("list_aggr(tags, 'APPROX_count_distinct') = 2", "exact aggregate"),
        ("list_aggr(tags, 'approx_' || 'count_distinct') = 2", "exact aggregate"),
        ("list_aggr(tags, 'reservoir_quantile', 0.5) = 2", "exact aggregate"),
        ("current_date > DATE '2000-01-01'", "'current_date' is no column"),
        ("list_filter([1], lambda user: true) = [] OR user IS NULL", "no column"),
        ("COLUMNS(*) = 1", r"\* can't"),
        ("#1 = 1", "positional"),
        ("__fsmount_rows__ IS NULL", "no column"),
        ("read_text('/etc/passwd') = ''", "not a function of the row|does not exist"),
        ("lable = 1", 'Referenced column "lable" not found.*"label"'),
        ("nosuch(label)", "nosuch does not exist"),
        ("name", "Could not convert string"),
        ("label = 'one'", "Could not convert string"),
        ("name + 1 = 2", "Binder Error"),
    ],
)
def test_anything_but_such_an_expression_is_refused_on_one_line(where: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        select(where, A, B)
    assert "\n" not in str(caught.value)


def test_no_function_without_arguments_but_constants() -> None:
    with duckdb.connect() as connection:
        names = connection.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions() WHERE varargs IS NULL "
            "AND coalesce(len(parameters), 0) = 0 AND function_type IN ('scalar', 'macro')"
        ).fetchall()
    accepted = set()
    for (name,) in names:
        with suppress(PlanError):
            select(f"{name}() IS NULL", A)
            accepted.add(name)
    assert "pi" in accepted
    assert accepted <= {"list_pack", "list_value", "map", "pi"}


def test_a_field_of_mixed_types_is_compared_as_json_text() -> None:
    numbers = manifest_bytes("n", [{"v": 1}, {"v": None}, {}])
    words = manifest_bytes("w", [{"v": "one"}, {"v": "1"}])
    mixed = manifest_bytes("m", [{"v": 1.5}, {"v": {}}])
    assert select("v = '1'", numbers, words, mixed) == [[0], [], []]
    assert select("v = '\"one\"'", numbers, words, mixed) == [[], [0], []]
    assert select("v IN ('{}', '1.5')", numbers, words, mixed) == [[], [], [0, 1]]
    assert select("v IS NULL", numbers, words, mixed) == [[1, 2], [], []]


def test_integers_stay_exact() -> None:
    small = manifest_bytes("s", [{"v": 1}])
    large = manifest_bytes("l", [{"v": 2**64 - 1}])
    assert select(f"v = {2**64 - 1} OR v = 1", small, large) == [[0], [0]]
    large = manifest_bytes("l", [{"v": 2**53 + 1}])
    assert select(f"v = '{2**53 + 1}'", manifest_bytes("r", [{"v": 0.5}]), large) == [[], [0]]


@pytest.mark.parametrize("other", [{"v": 0.5}, {"w": 1}])
def test_manifests_of_two_schemas_are_no_version(other: dict[str, Any]) -> None:
    first, second = manifest_bytes("one", [{"v": 1}]), manifest_bytes("two", [other])
    for read in (
        lambda: list(rows_where([lambda: first, lambda: second], "v = 1")),
        lambda: read_columns([lambda: first, lambda: second], ["v"], [np.array([0])] * 2),
    ):
        with pytest.raises(FormatError, match=r"partition 'two' .* column 'v' is .*, and int64 in"):
            read()


def test_structs_join_over_partitions() -> None:
    left, right = manifest_bytes("l", [{"s": {"a": 1}}]), manifest_bytes("r", [{"s": {"b": "x"}}])
    assert select("s.a = 1 OR s.b = 'x'", left, right) == [[0], [0]]


def test_text_arrays_are_columns() -> None:
    assert select("town = 'Ulm'", manifest_bytes("t", [None, None], town="Ulm")) == [[0, 1]]
    mixed = manifest_bytes("n", [{"town": 5}])
    ulm = manifest_bytes("t", [None], town="Ulm")
    assert select("town = '\"Ulm\"'", ulm, mixed) == [[0], []]


def test_columns_that_differ_only_in_case() -> None:
    both = manifest_bytes("c", [{"Label": 1, "label": 2}])
    assert select("Label = 1", both) == [[0]]
    assert select("label = 2", both) == [[0]]
    for where in ("LABEL = 1", "Label = 1 AND label = 2", "Label = 1 AND label.abs() = 1"):
        with pytest.raises(PlanError, match="differ only in case"):
            select(where, both)


def test_columns_of_different_partitions_that_differ_only_in_case() -> None:
    left = manifest_bytes("l", [{"a": 1, "s": {"x": 1}}, {"a": 2}])
    right = manifest_bytes("r", [{"A": 2, "S": {"x": 2}}, {"A": 1}])
    assert select("a = 1", left, right) == [[0], []]
    assert select("A = 1", left, right) == [[], [1]]
    assert select("a IS NULL", left, right) == [[], [0, 1]]
    assert select("s.x = 1 OR s.X = 2", left, right) == [[0], []]
    assert select("S.x = 2", left, right) == [[], [0]]
    with pytest.raises(PlanError, match="differ only in case"):
        select("a = 1 OR A = 1", left, right)


@pytest.mark.parametrize(
    "sidecars",
    [
        [[{"gps": {"lat": 1, "Lat": 101}}]],
        [[{"gps": {"lat": 1}}, {"gps": {"Lat": 101}}]],
        [[{"gps": {"lat": 1}}], [{"gps": {"Lat": 101}}]],
        [[{"gps": {"at": {"lat": 1, "Lat": 101}}}]],
        [[{"gps": [{"lat": 1}, {"Lat": 101}]}]],
        [[{"gps": [[{"at": {"lat": 1}}]]}], [{"gps": [[{"at": {"Lat": 101}}]]}]],
    ],
)
def test_fields_of_a_struct_that_differ_only_in_case_are_refused(sidecars: Any) -> None:
    manifests = [manifest_bytes(f"p{n}", rows) for n, rows in enumerate(sidecars)]
    names = ("gps.lat = 1", "GPS.at.lat = 1", "gps[1].lat = 1", "gps IS NULL", "gps.keys() = []")
    for where in names:
        with pytest.raises(PlanError, match=r"'gps' is ambiguous.*\['Lat', 'lat'\]"):
            select(where, *manifests)
    assert select("__index__ >= 0", *manifests) == [list(range(len(rows))) for rows in sidecars]


def test_the_verbatim_sidecar_tells_upper_from_lower_case() -> None:
    both = manifest_bytes("c", [{"gps": {"lat": 1, "Lat": 2}}, {"gps": {"lat": 2, "Lat": 1}}, None])
    for name, expected in (("lat", [0]), ("Lat", [1])):
        assert select(f"json_extract(decode(__sidecar__), '$.gps.{name}') = 1", both) == [expected]


@pytest.mark.parametrize(
    "name", ["__fsmount_place__", "__FSMOUNT_PLACE__", "__fsmount_count__", "__FSMOUNT_COUNT__"]
)
def test_columns_named_as_our_own_while_we_select(name: str) -> None:
    odd = manifest_bytes("o", [{name: 2}, {name: 0}, {name: 0}])
    assert select(f"{name} = 0", odd, odd) == [[1, 2], [1, 2]]


def test_many_manifests_pass_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsmount.select.rows._ROWS_AT_ONCE", 3)
    monkeypatch.setattr("fsmount.select.keys._ROWS_AT_ONCE", 3)
    many = [manifest_bytes(f"p{n}", [{"v": n + i} for i in range(n % 4 + 1)]) for n in range(11)]
    expected = [[i for i in range(n % 4 + 1) if (n + i) % 3 == 0] for n in range(11)]
    assert select("v % 3 = 0", *many) == expected
    keys = [f"p{n}/{i}" for n in range(11) for i in expected[n]]
    found = rows_of_keys([lambda m=m: m for m in many], keys[::-1])
    assert [rows.tolist() for rows in found] == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [(["a/0", "a/9"], "not in this version: 'a/9'"), (["a/0", "a/0"], "'a/0' is listed twice")],
)
def test_keys_that_can_t_be_selected(keys: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        list(rows_of_keys([lambda: A, lambda: B], keys))


def test_only_named_columns_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    decode = manifest.decode

    def spy(data: bytes, columns: Sequence[str] | None = None) -> manifest.Manifest:
        asked.append(columns)
        return decode(data, columns)

    datas = [each.data for each in one_schema.conform([A, B])]
    readers = [lambda data=data: data for data in datas]
    monkeypatch.setattr(manifest, "decode", spy)
    list(rows_where(readers, "label = 1"))
    assert asked == [["label"]] * 2
    list(rows_where(readers[:1], "true"))
    assert asked[2:] == [["__index__"]]


def test_each_manifest_is_read_once_but_the_first() -> None:
    read: list[str] = []

    def reader(name: str, data: bytes) -> bytes:
        read.append(name)
        return data

    a, b = (each.data for each in one_schema.conform([A, B]))
    readers = [lambda: reader("a", a), lambda: reader("b", b)]
    found = list(rows_where(readers, "label = 1", also=["__size__", "__offset__"]))
    assert sorted(read) == ["a", "a", "b"]
    assert [rows.tolist() for rows, _ in found] == [[0], [1]]
    assert [each.meta.partition for _, each in found] == ["a", "b"]
    assert [each.table.column("__size__").to_pylist() for _, each in found] == [
        [100] * 4,
        [100] * 2,
    ]
    read.clear()
    list(rows_where(readers, "__index__ = 1"))  # a manifest's own columns have one type
    assert sorted(read) == ["a", "b"]
