"""Version documents, partition tables and key-sets: written one way, read with suspicion."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from examples import DOCUMENT, KEYSET, TABLE, digest, partition
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import damaged, keys

from fsmount.errors import FormatError, InvalidNameError
from fsmount.formats import document, keyset, parquet, table
from fsmount.model import FORMAT, DepthRule, DirectoryRule, ObjectRef, RegexRule

TEXTS = st.text(max_size=10)
RULES = [DirectoryRule(), DepthRule(3), RegexRule("(?P<partition>.*)/é[\\d]")]
TABLE_BYTES = table.encode(TABLE)
KEYS = ("a", "a/b", "é")


def paths(value: Any) -> list[tuple[str, ...]]:
    """The way to every field of a JSON object."""
    if not isinstance(value, dict):
        return []
    return [(name, *rest) for name in value for rest in ((), *paths(value[name]))]


def edited(value: Any, path: tuple[str, ...], new: Any) -> bytes:
    """The JSON of `value` with `new` at `path`, or without it if `new` is `...`."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    if new is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return json.dumps(copy).encode()


WRONG = [..., None, 1, -1, 1.5, True, "", "\ud800", [], {}, [None], "../x", 1 << 80]
DOCUMENT_JSON = json.loads(document.encode(DOCUMENT))
KEYSET_JSON = json.loads(keyset.encode_pointer(KEYSET))


@pytest.mark.parametrize("rule", RULES)
def test_documents_come_back(rule: Any) -> None:
    for value in (DOCUMENT, replace(DOCUMENT, tag=None, parent=None, replaces=None)):
        one = replace(value, rule=rule)
        assert document.decode(document.encode(one)) == one
        assert document.encode(document.decode(document.encode(one))) == document.encode(one)


@given(TEXTS, TEXTS, st.dictionaries(TEXTS, TEXTS, max_size=3))
def test_any_text_comes_back(message: str, namespace: str, provenance: dict[str, str]) -> None:
    value = replace(DOCUMENT, message=message, source_namespace=namespace, provenance=provenance)
    assert document.decode(document.encode(value)) == value


def test_a_document_is_readable_json() -> None:
    data = document.encode(DOCUMENT)
    assert data.endswith(b"}\n")
    assert list(DOCUMENT_JSON) == sorted(DOCUMENT_JSON)
    assert "é".encode() in data
    assert DOCUMENT_JSON["rule"] == {"kind": "depth", "depth": 2}


@pytest.mark.parametrize("path", paths(DOCUMENT_JSON), ids=".".join)
def test_a_wrong_field_is_a_format_error_or_read_as_it_stands(path: tuple[str, ...]) -> None:
    refused = 0
    for new in WRONG:
        data = edited(DOCUMENT_JSON, path, new)
        try:
            found = document.decode(data)
        except FormatError as error:
            refused += 1
            assert "version document" in str(error)  # noqa: PT017
            continue
        again = json.loads(document.encode(found))
        assert again == json.loads(data) or new in (..., None)
    assert refused >= 7


@pytest.mark.parametrize(
    "rule",
    [
        {"kind": "regex", "pattern": "[ab]" * 251},
        {"kind": "regex", "pattern": "(" * 5000 + ")" * 5000},
        {"kind": "depth", "depth": 0},
        {"kind": "other"},
    ],
)
def test_hostile_rules_are_format_errors(rule: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        document.decode(edited(DOCUMENT_JSON, ("rule",), rule))


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "(a+)+$", "(?=a)"])
def test_a_pattern_is_read_as_it_stands_and_not_compiled(pattern: str) -> None:
    data = edited(DOCUMENT_JSON, ("rule",), {"kind": "regex", "pattern": pattern})
    assert document.decode(data).rule == RegexRule(pattern)


@pytest.mark.parametrize("components", [101, 1500, 20_000])
def test_an_id_of_very_many_components_is_a_format_error(components: int) -> None:
    deep = partition_with_id("/".join("a" * components))
    with pytest.raises(FormatError, match=r"over (100 components|3000 bytes)") as caught:
        table.decode(deep)
    assert len(str(caught.value)) < 400


def partition_with_id(ident: str) -> bytes:
    """The bytes of a table whose one partition has a name that no value of ours could have."""
    rows, metadata = parquet.read(TABLE_BYTES, "table")
    named = rows.slice(0, 1).set_column(0, "id", pa.array([ident], pa.string()))
    return parquet.write(named, metadata)


def test_a_small_table_of_very_many_rows_is_a_format_error() -> None:
    rows, metadata = parquet.read(TABLE_BYTES, "table")
    many = rows.slice(0, 1).take(pa.array([0] * 600_000))
    data = parquet.write(many, metadata)
    with pytest.raises(FormatError, match="600000 rows in"):
        table.decode(data)


@given(st.one_of(st.binary(), damaged(document.encode(DOCUMENT))))
@settings(max_examples=300)
def test_damaged_documents_are_format_errors_or_valid(data: bytes) -> None:
    try:
        found = document.decode(data)
    except FormatError:
        return
    assert document.decode(document.encode(found)) == found


def test_a_document_without_a_tag_is_made_of_its_table() -> None:
    ref = ObjectRef(digest("t"), len(TABLE_BYTES))
    made = table.document_of_table(ref, TABLE)
    assert (made.tag, made.created_at) == (None, "1970-01-01T00:00:00Z")
    assert (made.totals.samples, made.totals.shards, made.totals.partitions) == (6, 4, 2)
    assert made.totals.stored_bytes == 2 * (500 + 4096 + 2048)
    assert document.decode(document.encode(made)) == made


@pytest.mark.parametrize("rule", RULES)
def test_tables_come_back(rule: Any) -> None:
    one = replace(TABLE, rule=rule)
    assert table.decode(table.encode(one)) == one
    assert table.decode(table.encode(replace(TABLE, partitions=()))).partitions == ()
    assert table.encode(TABLE) == TABLE_BYTES


@given(st.lists(keys().filter(lambda key: len(key) < 80), max_size=4, unique=True))
@settings(max_examples=50)
def test_any_partition_ids_come_back_sorted(ids: list[str]) -> None:
    parts = tuple(partition(name) for name in sorted(ids, key=str.encode))
    one = replace(TABLE, partitions=parts)
    assert table.decode(table.encode(one)) == one


def with_row(**fields: Any) -> bytes:
    """The table with its first row changed; a content revision that fits where one can be had."""
    rows, metadata = parquet.read(TABLE_BYTES, "test")
    first, *rest = rows.to_pylist()
    changed = pa.Table.from_pylist([first | fields, *rest], schema=table.SCHEMA)
    return parquet.write(changed, metadata)


@pytest.mark.parametrize("name", table.SCHEMA.names)
def test_hostile_cells_are_format_errors(name: str) -> None:
    kind = table.SCHEMA.field(name).type
    values: list[Any] = [None]
    if kind == pa.int64():
        values += [-1, 0] if name == "samples" else [-1, -(1 << 63)]
    elif kind == pa.string() and name != "source_fingerprint":
        values += ["", "../x", "g" * 64]
    elif name == "shards":
        values += [[], [None], [{"digest": None, "size": 1, "samples": 3}]]
    for value in values:
        with pytest.raises(FormatError, match="partition table"):
            table.decode(with_row(**{name: value}))


def test_a_table_that_contradicts_itself_is_a_format_error() -> None:
    one, two = TABLE.partitions
    for parts in ((two, one), (one, one), (one, partition("a/b/000000.tar"))):
        with pytest.raises(FormatError, match="partition table"):
            table.decode(table.encode(replace(TABLE, partitions=parts)))
    rows, metadata = parquet.read(TABLE_BYTES, "test")
    with pytest.raises(FormatError, match="content revision"):
        table.decode(parquet.write(rows.slice(1), metadata))
    for wrong in (value for value in WRONG if value != FORMAT):
        for name in ("format", "rule", "recipe", "content_revision"):
            with pytest.raises(FormatError, match="partition table"):
                table.decode(parquet.write(rows, json.loads(edited(metadata, (name,), wrong))))


def test_other_columns_are_format_errors() -> None:
    rows, metadata = parquet.read(TABLE_BYTES, "test")
    texts = rows.set_column(3, "samples", pa.array(["3", "3"]))
    for other in (rows.drop_columns(["id"]), rows.append_column("x", rows["id"]), texts):
        with pytest.raises(FormatError, match="partition table"):
            table.decode(parquet.write(other, metadata))


@given(damaged(TABLE_BYTES))
@settings(max_examples=300)
def test_damaged_tables_are_format_errors_or_valid(data: bytes) -> None:
    try:
        found = table.decode(data)
    except FormatError:
        return
    assert table.decode(table.encode(found)) == found


def test_key_set_documents_come_back() -> None:
    for value in (KEYSET, replace(KEYSET, where=None)):
        assert keyset.decode_pointer(keyset.encode_pointer(value)) == value


@pytest.mark.parametrize("path", paths(KEYSET_JSON), ids=".".join)
def test_hostile_key_set_documents_are_format_errors(path: tuple[str, ...]) -> None:
    for new in WRONG:
        try:
            found = keyset.decode_pointer(edited(KEYSET_JSON, path, new))
        except FormatError:
            continue
        assert keyset.decode_pointer(keyset.encode_pointer(found)) == found


@pytest.mark.parametrize("name", ["", ".x", "-x", "a/b", "a b", "é", "x" * 129, "a\n"])
def test_key_set_names_are_checked(name: str) -> None:
    with pytest.raises(InvalidNameError):
        replace(KEYSET, name=name)


@given(st.lists(keys(), min_size=1, max_size=6, unique=True))
@settings(max_examples=50)
def test_keys_come_back_sorted(names: list[str]) -> None:
    data = keyset.encode_keys(names)
    assert keyset.decode_keys(data) == tuple(sorted(names))
    assert keyset.encode_keys(names[::-1]) == data


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_key_sets_that_are_empty_or_name_a_key_twice_are_refused(names: list[str]) -> None:
    with pytest.raises(FormatError):
        keyset.encode_keys(names)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([], pa.string()),
        pa.array(["b", "a"]),
        pa.array(["a", "a"]),
        pa.array(["a", None]),
        pa.array(["../a"]),
        pa.array([""]),
        pa.array([1]),
    ],
)
def test_hostile_keys_are_format_errors(column: pa.Array) -> None:
    data = parquet.write(pa.table({"__key__": column}), {"format": 1})
    with pytest.raises(FormatError):
        keyset.decode_keys(data)


@given(st.one_of(st.binary(), damaged(keyset.encode_keys(KEYS))))
@settings(max_examples=200)
def test_damaged_keys_are_format_errors_or_valid(data: bytes) -> None:
    try:
        found = keyset.decode_keys(data)
    except FormatError:
        return
    assert keyset.decode_keys(keyset.encode_keys(found)) == found
