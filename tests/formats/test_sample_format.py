"""The tensor member: every array comes back bit for bit, equal samples give equal bytes."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, damaged, same, samples

from fsmount.errors import FormatError, IntegrityError
from fsmount.formats import sample

ODD = {
    "nan": np.frombuffer(bytes.fromhex("010000000000f07f 0100c0ff00000000"), "<f8"),
    "minus zero": np.array(-0.0, ">f4"),
    "bool": np.frombuffer(b"\0\1\2\xff", "|b1"),
    "fortran": np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
    "complex": np.array([[1 + 2j], [3 - 4j]], ">c16"),
    "half": np.frombuffer(b"\1\x7c\0\xfc", "<f2"),
    "empty": np.zeros((0, 3), "<u8"),
    "day": np.array(["2024-02-29", "NaT"], ">M8[D]"),
    "": np.array(7, "<u4"),
}


def header(text: str, data: bytes = b"") -> bytes:
    """A member with the JSON `text` as its header."""
    body = text.encode() + b" " * (-(8 + len(text.encode())) % 64)
    return struct.pack("<Q", len(body)) + body + data


@given(samples())
def test_round_trip(arrays: dict[str, np.ndarray]) -> None:
    member = sample.encode(arrays)
    decoded = sample.decode(member)
    assert sorted(decoded) == sorted(arrays)
    assert all(same(decoded[name], array) for name, array in arrays.items())
    assert sample.encode(decoded) == member
    schema = sample.read_schema(member)
    assert schema.raw_size == len(member)
    assert member.startswith(schema.header)
    assert len(schema.header) % sample.ALIGNMENT == 0
    widths = [
        (f.offset, f.dtype.itemsize // (2 if f.dtype.kind == "c" else 1)) for f in schema.fields
    ]
    assert all(offset % width == 0 for offset, width in widths)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    data = bytes(range(256)) + bytes(range(255, -1, -1))
    for order in "CF":
        array = np.ndarray((2, 4), dtype, bytearray(data), order=order)
        assert same(sample.decode(sample.encode({"x": array}))["x"], array)
    scalar = np.ndarray((), dtype, bytearray(data))
    assert same(sample.decode(sample.encode({"x": scalar}))["x"], scalar)


def test_views_are_stored_by_their_values() -> None:
    whole = np.arange(24, dtype=">i4").reshape(4, 6)
    for view in (whole[::2, ::-1], whole.T[1:], np.broadcast_to(whole[0], (3, 6))):
        decoded = sample.decode(sample.encode({"x": view}))["x"]
        assert decoded.tobytes() == view.tobytes()
        assert (decoded.dtype.str, decoded.shape) == (view.dtype.str, view.shape)


@given(samples(), st.randoms())
def test_equal_samples_give_equal_bytes_and_equal_schemas_equal_headers(
    arrays: dict[str, np.ndarray], random: object
) -> None:
    names = list(arrays)
    random.shuffle(names)  # type: ignore[attr-defined]
    assert sample.encode({n: arrays[n] for n in names}) == sample.encode(arrays)
    blank = {n: np.zeros_like(a, order="A") for n, a in arrays.items()}
    schemas = [sample.read_schema(sample.encode(each)) for each in (arrays, blank)]
    assert schemas[0] == schemas[1]


@given(samples())
@settings(max_examples=50)
def test_the_safetensors_library_reads_it(arrays: dict[str, np.ndarray]) -> None:
    loaded = safetensors.numpy.load(sample.encode(arrays))
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        plain = np.ascontiguousarray(array).reshape(array.shape)
        little = plain.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        assert loaded[name].tobytes() == little


def test_bytes_are_as_specified() -> None:
    """Written out by hand from docs/format.md; a change of the format fails here."""
    arrays = {
        "b": np.array([[1, 2], [3, 4]], ">i2", order="F"),
        "a": np.array([1 + 2j], "<c8"),
        "c": np.array(True),
    }
    expected = header(
        '{"__metadata__":{"numpy.a":"{\\"descr\\":\\"<c8\\"}",'
        '"numpy.b":"{\\"descr\\":\\">i2\\",\\"fortran_order\\":true}"},'
        '"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
        '"b":{"dtype":"I16","shape":[2,2],"data_offsets":[8,16]},'
        '"c":{"dtype":"BOOL","shape":[],"data_offsets":[16,17]}}',
        struct.pack("<2f4hB", 1, 2, 1, 2, 3, 4, 1),
    )
    assert sample.encode(arrays) == expected


@pytest.mark.parametrize(
    "array",
    [
        np.array([None]),
        np.array("text"),
        np.zeros(1, [("a", "<f4")]),
        np.zeros(1, "V8"),
        np.zeros(1, np.longdouble),
    ],
)
def test_what_has_no_portable_form_is_refused(array: np.ndarray) -> None:
    with pytest.raises(FormatError, match="array 'x'"):
        sample.encode({"x": array})


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_no_header_can_hold_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="array"):
        sample.encode({name: np.zeros(1)})


def entry(
    dtype: str = "F32", shape: str = "[1]", begin: int = 0, end: int = 4, name: str = "a"
) -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def of(*entries: str) -> str:
    return "{" + ",".join(entries) + "}"


def noted(note: object) -> str:
    """A header of one tensor for which `note` says what numpy needs."""
    return of(f'"__metadata__":{json.dumps({"numpy.a": note}, separators=(",", ":"))}', entry())


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", "[" * 100_000, '{"a":1}', '{"a":[]}', '{"a":{"dtype":"F32"}}'),
        *(of(entry("BF16", end=2)), of(entry(begin=4, end=8)), of(entry(name="\\ud800"))),
        *(of(entry(shape=f"[{n}]")) for n in ("1e999", "true", "1.0", '"1"', "null", "-1")),
        of(entry(shape=f"[0,{1 << 70}]", end=0)),
        of(entry(shape=f"[{','.join('0' * 65)}]", end=0)),
        of(entry(shape=f"[{1 << 62}]", end=1 << 64)),
        *(of(entry(), entry()), of(entry()) + " x", of(entry()).replace(":", ": ")),
        *(of('"__metadata__":{}', entry()), of('"__metadata__":[]', entry())),
        of('"__metadata__":{"other":"1"}', entry()),
        *map(noted, (1, "1", "[]", "{}", '{"descr":null}', '{"descr":"O"}', '{"descr":"<f4"}')),
        *map(noted, ('{"descr":">i4"}', '{"descr":">f4,>f4"}', '{"descr":"<U1"}')),
        *map(noted, ('{"descr":"<M8[999999999999999999999s]"}', '{"fortran_order":true}')),
        of(entry(name="b"), entry(begin=4, end=8)),
        of(entry(), entry("F64", begin=4, end=12, name="b")),
    ],
)
def test_a_header_that_encode_would_not_write_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="header"):
        sample.decode(header(text, bytes(12)))


def test_a_length_beyond_the_member_is_refused() -> None:
    member = sample.encode(ODD)
    for length in (0, 7, 8, 63, 64, len(member) - 1):
        with pytest.raises(FormatError):
            sample.decode(member[:length])
    with pytest.raises(FormatError, match="bytes, not"):
        sample.decode(member + b"\0")
    with pytest.raises(FormatError, match="truncated"):
        sample.decode(b"\xff" * 8 + member[8:])


@given(damaged(sample.encode(ODD)))
@settings(max_examples=300)
def test_damage_is_a_format_error_or_another_valid_member(data: bytes) -> None:
    try:
        decoded = sample.decode(data)
    except FormatError:
        return
    assert sample.encode(decoded) == data


@given(damaged(sample.read_schema(sample.encode(ODD)).header[8:].rstrip()))
@settings(max_examples=300)
def test_a_damaged_header_of_the_right_length_is_a_format_error(text: bytes) -> None:
    body = text + b" " * (-(8 + len(text)) % 64)
    data = struct.pack("<Q", len(body)) + body
    try:
        schema = sample.read_schema(data)
    except FormatError:
        return
    blank = {f.name: np.zeros(f.shape, f.dtype, "F" if f.fortran_order else "C")
             for f in schema.fields if f.nbytes < 1 << 20}  # fmt: skip
    if len(blank) == len(schema.fields):
        assert sample.read_schema(sample.encode(blank)) == schema


def test_every_byte_of_a_payload_is_guarded() -> None:
    member = sample.encode(ODD)
    payload = sample.compress(member, 3)
    assert zstandard.get_frame_parameters(payload).has_checksum
    assert zstandard.frame_content_size(payload) == len(member)
    assert sample.decompress(payload, len(member)) == member
    damage = [bytes([*payload[:i], payload[i] ^ 1, *payload[i + 1 :]]) for i in range(len(payload))]
    damage += [payload[:i] for i in range(len(payload))] + [payload + b"\0", payload + payload]
    for data in damage:
        assert sample.checksum(data) != sample.checksum(payload)
        try:
            assert sample.decompress(data, len(member)) == member
        except IntegrityError:
            continue
    with pytest.raises(IntegrityError):
        sample.decompress(payload, len(member) + 1)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor(19).compress(bytes(1 << 28))
    with pytest.raises(IntegrityError, match="does not hold 100 bytes"):
        sample.decompress(bomb, 100)


def test_checksum_is_xxh3() -> None:
    assert sample.checksum(b"fsmount") == 0xEEC762DFF49703A2


def test_headers_are_plain_json() -> None:
    parsed = json.loads(sample.read_schema(sample.encode(ODD)).header[8:])
    assert parsed["complex"] == {"dtype": "F64", "shape": [2, 1, 2], "data_offsets": [0, 32]}
