"""Every dtype, shape and memory order that a sample can have, as tensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reading_schemas import read_schemas
from small_versions import Sample, build

from fsmount.errors import IntegrityError, LoadError, PlanError
from fsmount.formats import sample
from fsmount_loader import Batch, ShardDataset
from fsmount_loader.decode import Decoder, Layout
from fsmount_loader.schemas import Schemas, describe_difference

DTYPES = "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 c8 c16 >i2 >i4 >u8 >f4 >f8 >c16 M8[s] m8[ms] >M8[D]"
SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (2, 3), (0,), (2, 0, 3), (3, 1, 2)]


def arrays(seed: int, *, fortran: bool = False) -> dict[str, NDArray[Any]]:
    """One array of each dtype and shape, with random bytes (NaN payloads and all)."""
    random = np.random.Generator(np.random.PCG64(seed))
    made = {}
    for text in DTYPES.split():
        dtype = np.dtype(text)
        for shape in SHAPES:
            count = int(np.prod(shape, dtype=int))
            data = random.bytes(count * dtype.itemsize)
            array = np.frombuffer(data, np.uint8) % 2 if text == "?" else np.frombuffer(data, dtype)
            array = array.astype(dtype).reshape(shape)
            made[f"{text} {shape}"] = np.array(array, order="F" if fortran else "C")
    return made


def load(tmp_path: Path, samples: list[dict[str, NDArray[Any]]], **options: Any) -> Batch:
    named = [Sample(f"{place:04d}", value) for place, value in enumerate(samples)]
    root = build(tmp_path / "v", {"a": [named]})
    (batch,) = ShardDataset(root, batch_size=len(samples), shuffle=False, **options)
    return batch


def expected(parts: list[NDArray[Any]]) -> NDArray[Any]:
    native = [part.astype(part.dtype.newbyteorder("="), "C") for part in parts]
    together = np.stack(native)
    return together.view(np.int64) if together.dtype.kind in "mM" else together


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("fortran", [False, True])
def test_tensors_have_the_originals_bytes(tmp_path: Path, contiguous: bool, fortran: bool) -> None:
    samples = [arrays(seed, fortran=fortran) for seed in range(3)]
    batch = load(tmp_path, samples, contiguous=contiguous)
    assert set(batch) == {*samples[0], "__valid__"}
    for name in samples[0]:
        wanted = expected([one[name] for one in samples])
        assert tuple(batch[name].shape) == wanted.shape, name
        assert batch[name].numpy().dtype == wanted.dtype, name
        assert batch[name].numpy().tobytes() == wanted.tobytes(), name
        if contiguous:
            assert batch[name].is_contiguous()


def test_fields_of_a_batch_share_one_block(tmp_path: Path) -> None:
    batch = load(tmp_path, [arrays(1), arrays(2)])
    real = [v for n, v in batch.items() if v.numel() and n != "__valid__" and not v.is_complex()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in real}) == 1


def test_memory_orders_mix_in_one_batch(tmp_path: Path) -> None:
    samples = [arrays(seed, fortran=seed % 2 == 1) for seed in range(4)]
    assert sample.encode(samples[0])[:8] != sample.encode(samples[1])[:8]
    batch = load(tmp_path, samples)
    for name in samples[0]:
        wanted = expected([one[name] for one in samples])
        assert batch[name].numpy().tobytes() == wanted.tobytes(), name


def test_a_sample_without_tensors(tmp_path: Path) -> None:
    assert list(load(tmp_path, [{}, {}])) == ["__valid__"]


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ({"x": np.zeros(3)}, {"x": np.zeros((3, 1))}, r"'x' is float64 \[3\].*float64 \[3, 1\]"),
        ({"x": np.zeros(3)}, {"x": np.zeros(3, "f4")}, r"float64 \[3\].*float32 \[3\]"),
        ({"x": np.zeros(3)}, {"y": np.zeros(3)}, "only one of them has 'x'"),
        ({"x": np.zeros(1, "M8[s]")}, {"x": np.zeros(1, "M8[D]")}, r"datetime64\[s\].*\[D\]"),
        ({"x": np.zeros(1, "M8[s]")}, {"x": np.zeros(1, "i8")}, "int64"),
    ],
)
def test_schemas_that_can_t_be_one_batch(
    tmp_path: Path, one: Any, other: Any, difference: str
) -> None:
    with pytest.raises(PlanError, match=difference):
        load(tmp_path, [one, other])


def schemas_of(*members: bytes) -> Schemas:
    return read_schemas(sample.read_schema(member).header for member in members)


def test_byte_order_is_no_difference() -> None:
    one, other = ({"x": np.zeros(3, dtype)} for dtype in (">f4", "<f4"))
    schemas = [sample.read_schema(sample.encode(value)) for value in (one, other)]
    assert describe_difference(*schemas) == ""


def test_a_payload_that_is_not_the_member_it_should_be() -> None:
    member = sample.encode({"x": np.zeros(3)})
    layout = Layout.of(schemas_of(member), None)
    decoder = Decoder(layout)
    row = memoryview(bytearray(layout.pitch))
    decoder.into(row, memoryview(sample.compress(member, 3)), 0)
    assert bytes(row[: len(member)]) == member
    renamed = sample.encode({"y": np.zeros(3)})
    right = sample.compress(member, 3)
    for wrong in (
        sample.compress(renamed, 3),
        sample.compress(member[:-1], 3),
        sample.compress(member + b"\0", 3),
        right[:20],
        b"",
        b"no frame",
        right[:12] + bytes([right[12] ^ 1]) + right[13:],
    ):
        with pytest.raises(IntegrityError):
            decoder.into(row, memoryview(wrong), 0)
        group = [(1, memoryview(bytearray(right))), (0, memoryview(bytearray(wrong)))]
        assert not decoder.group(memoryview(bytearray(2 * layout.pitch)), group, [0, 0])


def test_a_group_is_decoded_into_the_rows_of_its_places() -> None:
    """Of several schemas, with a sample that is there twice, and with one that can't be read."""
    members = [sample.encode({"x": np.asfortranarray(x)}) for x in np.eye(9).reshape(3, 3, 9)]
    members[1] = sample.encode({"x": np.eye(9)[3:6]})
    layout = Layout.of(schemas_of(*members[:2]), None)
    payloads = [memoryview(bytearray(sample.compress(member, 3))) for member in members]
    group: list[tuple[int, object]] = [
        (3, payloads[2]), (0, payloads[0]), (1, payloads[1]), (2, payloads[0])
    ]  # fmt: skip
    block, schemas = memoryview(bytearray(4 * layout.pitch)), [0, 1, 0, 0]
    for _ in range(2):
        assert Decoder(layout).group(block, group, schemas)
        for place, payload in group:
            row = memoryview(bytearray(layout.pitch))
            Decoder(layout).into(row, payload, schemas[place])  # type: ignore[arg-type]
            assert block[place * layout.pitch :][: layout.pitch] == row
    assert not Decoder(layout).group(block, [(0, payloads[0]), (1, LoadError("gone"))], schemas)


@pytest.mark.parametrize("contiguous", [False, True])
def test_decompression_stops_behind_the_last_field_wanted(contiguous: bool, tmp_path: Path) -> None:
    """zstd has blocks of up to 128 KiB; what lies beyond the last one needed is 250 KB."""
    random = np.random.default_rng(0)
    samples = [
        {"a": random.random(20_000), "b": random.random(120_000).astype("f4"), "c": np.array([n])}
        for n in range(3)
    ]
    schema = schemas_of(sample.encode(samples[0]))
    whole, first = Layout.of(schema, None), Layout.of(schema, ["a"])
    assert whole.decoded == whole.raw_size
    assert first.decoded[0] == 160_000 + len(schema.headers[0]) < first.raw_size[0]
    assert Layout.of(schema, ["b"]) == dataclasses.replace(whole, fields=whole.fields[1:2])
    payload = sample.compress(sample.encode(samples[0]), 3)
    row = memoryview(bytearray(first.pitch))
    Decoder(first).into(row, memoryview(payload[:-200_000]), 0)  # what is behind is not looked at
    assert bytes(row[first.start :][:160_000]) == samples[0]["a"].tobytes()
    batch = load(tmp_path, samples, fields=["a"], contiguous=contiguous)
    assert set(batch) == {"a", "__valid__"}
    assert batch["a"].numpy().tobytes() == np.stack([one["a"] for one in samples]).tobytes()


def test_a_payloads_own_checksum_is_passed_over_whenever_it_is_decoded() -> None:
    member = sample.encode({"x": np.arange(100.0)})
    layout = Layout.of(schemas_of(member), None)
    payload = bytearray(sample.compress(member, 3))
    payload[-1] ^= 1  # of zstd's checksum; the loader has checked the payload's already
    before, row = bytes(payload), memoryview(bytearray(layout.pitch))
    for _ in range(2):  # a batch may have a sample twice
        Decoder(layout).into(row, memoryview(payload), 0)
        assert bytes(row[: len(member)]) == member
        row[:] = bytes(layout.pitch)
    with pytest.raises(IntegrityError):
        Decoder(layout).into(row, memoryview(before), 0)  # it can't be passed over here


def test_alignment_lets_every_field_be_a_view() -> None:
    """The widest fields come first in a member, and its header ends at a multiple of 64."""
    layout = Layout.of(schemas_of(sample.encode(arrays(0))), None)
    assert layout.pitch % 64 == 0
    for field in layout.fields:
        assert field.dtype.is_complex or field.offset % field.dtype.itemsize == 0
