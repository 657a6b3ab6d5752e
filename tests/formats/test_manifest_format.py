"""The manifest: rows come back as they were, and nothing hostile gets past `decode`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples import MEMBER, META, ROWS, digest, partition
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import JSON_OBJECTS, damaged, keys

from fsmount.errors import FormatError, IntegrityError, SidecarError
from fsmount.formats import manifest, parquet, sample
from fsmount.formats.checked import dump_compact
from fsmount.formats.manifest import OWN_COLUMNS, SCHEMA, Manifest, Text
from fsmount.testing.one_schema import encode_alone

DATA = encode_alone(ROWS, META)


def changed(**columns: Any) -> bytes:
    """The manifest with some columns of other values (typed as they should be) or dropped."""
    table, metadata = parquet.read(DATA, "test")
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        table = table.remove_column(place)
        if values is not None:
            array = (
                values
                if isinstance(values, pa.Array)
                else pa.array(values, SCHEMA.field(name).type)
            )
            table = table.add_column(place, name, array)
    return parquet.write(table, metadata)


def with_metadata(**fields: Any) -> bytes:
    table, metadata = parquet.read(DATA, "test")
    return parquet.write(table, metadata | fields)


def read_all(data: bytes) -> Manifest:
    found = manifest.decode(data)
    found.rows()
    for header in found.meta.schemas:
        sample.read_schema(header)
    return found


def test_round_trip() -> None:
    found = manifest.decode(DATA)
    assert found.rows() == ROWS
    assert found.meta == replace(META, json_columns=("m",))
    assert found.table.column_names == [*OWN_COLUMNS, "m", "n", "s", "t"]
    assert found.table.column("n").to_pylist() == [None, (1 << 64) - 1, 1]
    assert found.table.column("t").to_pylist() == ["b", None, ""]
    assert sample.read_schema(found.meta.schemas[0]) == sample.read_schema(MEMBER)
    found.meta.check_belongs(partition("a/b"))


def test_a_text_array_beside_a_field_of_another_type_survives() -> None:
    """The column is JSON text then; the row must have the text, not its JSON."""
    found = manifest.decode(DATA)
    assert found.table.column("m").to_pylist() == ['"hi"', None, "5"]
    assert found.rows()[0].texts[0] == Text("m", "<U3", "hi")


def test_only_the_columns_asked_for_are_read() -> None:
    found = manifest.decode(DATA, ["__key__", "n", "no such"])
    assert found.table.column_names == ["__key__", "n"]


@given(JSON_OBJECTS)
@settings(max_examples=50)
def test_any_sidecar_comes_back_verbatim(value: dict[str, Any]) -> None:
    data = dump_compact(value).encode()
    rows = [replace(ROWS[0], sidecar=data, texts=()), *ROWS[1:]]
    assert manifest.decode(encode_alone(rows, META)).rows() == rows


def test_equal_rows_give_equal_bytes() -> None:
    assert encode_alone(ROWS, META) == DATA


@pytest.mark.parametrize("name", OWN_COLUMNS)
def test_a_field_may_not_have_the_name_of_our_columns(name: str) -> None:
    sidecar = dump_compact({name: 1}).encode()
    with pytest.raises(SidecarError, match=f"'a/b/1'.*'{name}'"):
        encode_alone([replace(ROWS[1], sidecar=sidecar)], META)
    with pytest.raises(SidecarError, match=name):
        encode_alone([replace(ROWS[1], texts=(Text(name, "<U1", "x"),))], META)


def test_a_field_and_a_text_array_of_one_name_are_refused() -> None:
    with pytest.raises(SidecarError, match="'n' is in the sidecar and a text array"):
        encode_alone([replace(ROWS[1], texts=(Text("n", "<U1", "x"),))], META)


BIG = (1 << 63) - 1


@pytest.mark.parametrize(
    "columns",
    [
        *({name: None} for name in OWN_COLUMNS),
        *({name: pa.array(["x"] * 3)} for name in OWN_COLUMNS[1:9]),
        *({name: pa.nulls(3, SCHEMA.field(name).type)} for name in OWN_COLUMNS[:9]),
        *({"__shard__": [0, 0, n]} for n in (-1, 2, (1 << 31) - 1)),
        *({"__schema__": [0, 0, n]} for n in (-1, 1)),
        *({"__offset__": [512, 1536, n]} for n in (-1, 0, 511, 1749, BIG, -BIG - 1)),
        *({"__size__": [300, 300, n]} for n in (-1, 0, 1537, BIG, -BIG - 1)),
        *({"__index__": [0, 1, n]} for n in (-1, -BIG)),
        *({"__raw_size__": [64, 64, n]} for n in (-1, -BIG)),
        *({"__text__": [t, None, None]} for t in ("", "[]", "1", '{"t":1}')),
        *({"__text__": [t, None, None]} for t in ('{"gone":"<U1"}', '{"n":"<U1"}')),
        {"t": pa.array([1, 2, 3])},
        {"m": pa.array(["{", None, None])},
        {"t": None},
        {"__key__": pa.Array.from_buffers(
            pa.string(), 3,
            [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")])},
    ],
)  # fmt: skip
def test_hostile_columns_are_format_errors(columns: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        read_all(changed(**columns))


SHARD = {"digest": digest("s0"), "size": 4096, "samples": 2}


@pytest.mark.parametrize(
    "fields",
    [
        *({"format": value} for value in (None, 2, "1", True)),
        *({"partition": value} for value in (None, "../x", "", "a//b", "\ud800")),
        *({"data_revision": value} for value in (None, "0", "A" * 64)),
        *({"metadata_revision": value} for value in (None, [])),
        *({"shards": value} for value in (None, {}, [], [1], [None], [{}], [SHARD], ["x", "y"])),
        *({"shards": [SHARD, SHARD | {"size": n}]} for n in (-1, 1 << 63, 1 << 80, 1.5, None)),
        *({"shards": [SHARD, SHARD | {"samples": value}]} for value in (0, -1, True)),
        *({"schemas": value} for value in (None, {}, [], [1], ["\ud800"], ["{"], ["{\"a\":1}"])),
        *({"json_columns": value} for value in (None, "n", [1], [None])),
        {"compressor": 1},
    ],
)  # fmt: skip
def test_hostile_metadata_is_a_format_error(fields: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        read_all(with_metadata(**fields))


def test_other_parquet_files_are_format_errors() -> None:
    table, _ = parquet.read(DATA, "test")
    for data in (b"", b"PAR1", DATA[:-1], DATA[4:]):
        with pytest.raises(FormatError, match="manifest"):
            manifest.decode(data)
    with pytest.raises(FormatError):
        manifest.decode(parquet.write(table, {}))


@pytest.mark.parametrize(
    "other",
    [
        replace(META, partition="a/c"),
        replace(META, data_revision=digest("x")),
        replace(META, metadata_revision=digest("x")),
        replace(META, shards=META.shards[::-1]),
    ],
)
def test_a_manifest_that_does_not_belong_is_noticed(other: manifest.ManifestMeta) -> None:
    with pytest.raises(IntegrityError, match="'a/b'"):
        other.check_belongs(partition("a/b"))


@given(damaged(DATA))
@settings(max_examples=300)
def test_damage_is_a_format_error_or_another_valid_manifest(data: bytes) -> None:
    try:
        found = read_all(data)
    except FormatError:
        return
    assert len(found.rows()) == found.table.num_rows


NO_KEYS = [
    "", "/", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".", "a/.", "a\0b", "x" * 256,
    "é" * 128, "a/" * 100 + "b", "/".join(["x" * 200] * 16),
]  # fmt: skip


@pytest.mark.parametrize("key", NO_KEYS)
def test_keys_that_are_no_keys_are_format_errors(key: str) -> None:
    data = changed(__key__=["a/b/0", "a/b/1", key])
    with pytest.raises(FormatError, match="manifest: ") as caught:
        manifest.decode(data, ["__key__"])
    assert len(str(caught.value)) < 400


@given(st.lists(keys(), min_size=3, max_size=3, unique=True))
def test_every_key_passes(names: list[str]) -> None:
    assert manifest.decode(changed(__key__=names)).table.column("__key__").to_pylist() == names


def test_keys_of_many_components_and_long_names_pass() -> None:
    names = ["/".join("a" * 100), "x" * 255, "...a/..b/.c"]
    assert manifest.decode(changed(__key__=names)).table.column("__key__").to_pylist() == names


def test_a_key_that_stands_twice_is_named() -> None:
    with pytest.raises(FormatError, match="manifest: key 'a/b/1' stands twice"):
        manifest.decode(changed(__key__=["a/b/1", "a/b/0", "a/b/1"]))


def test_keys_that_are_not_utf8_are_a_format_error() -> None:
    good = pa.array([b"\xff\xfe", b"ok", b"ok2"], pa.binary())
    bad = pa.Array.from_buffers(pa.string(), 3, good.buffers())
    with pytest.raises(FormatError, match="not UTF-8"):
        manifest.decode(changed(__key__=bad))


@pytest.mark.parametrize(
    ("descr", "value"),
    [
        ("|O", "x"), ("V64", "x"), ("<f8", "x"), ("nonsense", "x"), ("<U0", ""), ("", ""),
        ("<U400000000", "x"), ("|S9999999999", "x"), ("<U1", "xy"), ("|S1", "é"), ("<U" * 99, "x"),
    ],
)  # fmt: skip
def test_a_dtype_that_is_not_of_its_text_is_refused_by_name(descr: str, value: str) -> None:
    with pytest.raises(FormatError, match="array 'caption': ") as caught:
        Text("caption", descr, value)
    assert len(str(caught.value)) < 300
    table, metadata = parquet.read(DATA, "test")
    text = pa.array([dump_compact({"s": descr}), None, None])
    place = table.schema.get_field_index("__text__")
    table = table.set_column(place, "__text__", text)
    table = table.set_column(table.schema.get_field_index("s"), "s", pa.array([value, None, None]))
    with pytest.raises(FormatError, match="array 's': "):
        manifest.decode(parquet.write(table, metadata)).rows()


@pytest.mark.parametrize("descr", ["<U3", ">U3", "|S3", "<U1000000"])
def test_text_may_be_shorter_than_its_dtype(descr: str) -> None:
    assert Text("t", descr, "ab").descr == descr


def test_what_compresses_too_well_to_be_believed_is_written_so_that_it_is_read() -> None:
    size = 1 << 20
    sidecars = [b'{"id":%d,"mask":"%s"}' % (n, b"0" * size) for n in range(80)]
    table = pa.table({"__sidecar__": pa.array(sidecars, pa.binary())})
    found, _ = parquet.read(parquet.write(table, {}), "test")
    assert found.equals(table)


def test_a_small_file_whose_pages_would_take_much_is_refused() -> None:
    table = pa.table({"__sidecar__": pa.array([b"0" * (1 << 20)] * 80, pa.binary())})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", use_dictionary=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({b"fsmount": b"{}"})
    with pytest.raises(FormatError, match=r"test: [0-9]+ bytes that would take 8[0-9]{7}$"):
        parquet.read(sink.getvalue(), "test")


def repeated(text: bytes, rows: int) -> pa.Table:
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    return pa.table({"__sidecar__": texts})


def test_a_text_that_a_dictionary_repeats_beyond_memory_is_refused_unread() -> None:
    sink = pa.BufferOutputStream()
    table = repeated(b"0" * (1 << 19), 60_000)  # 30 GB
    with pq.ParquetWriter(sink, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({b"fsmount": b"{}"})
    with pytest.raises(
        FormatError, match=r"test: [0-9]+ bytes whose '__sidecar__' would take over"
    ):
        parquet.read(sink.getvalue(), "test")


@pytest.mark.parametrize("most", [1 << 10, 1 << 30])
def test_texts_that_are_all_the_same_are_read(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(parquet, "_TEXTS", most)
    table = pa.table({"__sidecar__": pa.array([b"0" * 10_000] * 5_000), "a.b": range(5_000)})
    table = table.append_column("a", pa.array([{"b": "x" * 1000}] * 5_000))
    found, _ = parquet.read(parquet.write(table, {}), "test", ["a", "a.b", "__sidecar__"])
    assert found.select(table.column_names).equals(table)


def test_lists_that_repeat_a_number_beyond_memory_are_refused_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parquet, "_TEXTS", 1 << 10)
    table = pa.table({"v": pa.array([[0] * 500_000] * 4, pa.list_(pa.int64())), "w": range(4)})
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({b"fsmount": b"{}"})
    with pytest.raises(FormatError, match="bytes whose numbers would take 16000032"):
        parquet.read(sink.getvalue(), "test")
    assert parquet.read(sink.getvalue(), "test", ["w"])[0].num_rows == 4
    assert parquet.read(parquet.write(table, {}), "test")[0].equals(table)
