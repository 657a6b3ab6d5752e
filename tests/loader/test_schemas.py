"""Schemas that are read together are what each of them is alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading_schemas import read_schemas
from small_versions import Sample, build
from test_dataset import all_numbers

from fsmount.errors import FormatError, PlanError
from fsmount.formats import sample
from fsmount_loader import ShardDataset
from fsmount_loader.schemas import Headers

NAMES = ("x", "label0", '"shape":[1],"data_offsets":[0,4]', "y\\", "é")
DTYPES = ("<f4", ">f4", "<i8", "|b1", "<c8", ">c16", "<M8[10us]", "<u2")


@st.composite
def arrays(draw: st.DrawFn) -> bytes:
    """The header of a sample with few or no arrays, of few dimensions."""
    made = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4)):
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 11]), max_size=3))
        array = np.zeros(shape, draw(st.sampled_from(DTYPES)))
        made[name] = np.asfortranarray(array) if draw(st.booleans()) else array
    return sample.read_schema(sample.encode(made)).header


@given(st.lists(arrays(), unique=True, min_size=1, max_size=12))
def test_together_as_alone(headers: list[bytes]) -> None:
    found = read_schemas(headers)
    assert found.headers == headers
    assert [found.headers[place] for place in range(len(headers))] == headers
    alone = list(map(sample.read_schema, headers))
    assert found.raw_size.tolist() == [schema.raw_size for schema in alone]
    for kind in found.kinds():
        fields = [alone[place].fields for place in kind.places.tolist()]
        columns = list(zip(*fields, strict=True))
        for (field, shapes), column in zip(kind.shapes(), columns, strict=True):
            assert {(one.name, one.dtype, one.fortran_order) for one in column} == {
                (field.name, field.dtype, field.fortran_order)
            }
            assert list(map(tuple, shapes.tolist())) == [one.shape for one in column]
        ends = [
            [f.offset + f.nbytes - len(alone[p].header) for f in alone[p].fields]
            for p in kind.places
        ]
        assert kind.ends().tolist() == ends
    assert sorted(place for kind in found.kinds() for place in kind.places) == [
        *range(len(headers))
    ]


def header(text: str) -> bytes:
    data = text.encode()
    data += b" " * (-(8 + len(data)) % 64)
    return len(data).to_bytes(8, "little") + data


def entry(shape: str, start: object, end: object, dtype: str = "F4") -> str:
    return f'{{"x":{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{end}]}}}}'


@pytest.mark.parametrize(
    "wrong",
    [
        header(entry("[3]", 0, 16)),
        header(entry("[3]", 4, 16)),
        header(entry("[03]", 0, 12)),
        header(entry("[3]", "00", 12)),
        header(entry("[3]", 0, "012")),
        header(entry("[-3]", 0, -12)),
        header(entry("[3.0]", 0, 12)),
        header(entry("[4611686018427387904]", 0, 0)),
        header(entry("[99999999999999999999999]", 0, 12)),
        header(entry("[999999999999999999,999999999999999999]", 0, 0)),
        header(entry("[ 3]", 0, 12)),
        header(entry("[3]", 0, 12))[:-1],
        header(entry("[3]", 0, 12) + 64 * " "),
        header(entry("[3]", 0, 12) + "\t"),
        b"\x00" * 8 + header(entry("[3]", 0, 12))[8:],
    ],
)
def test_what_is_not_canonical_is_refused_among_right_ones(wrong: bytes) -> None:
    right = [header(entry(f"[{n}]", 0, 4 * n)) for n in range(20)]
    assert len(read_schemas(right)) == 20
    with pytest.raises(FormatError):
        sample.read_schema(wrong)
    for place in (0, 7, 20):
        with pytest.raises(FormatError):
            read_schemas([*right[:place], wrong, *right[place:]])


def test_headers_are_a_sequence() -> None:
    made = Headers.of([b"a", b"", b"bcd"])
    assert (made[0], made[1], made[-1], made[1:]) == (b"a", b"", b"bcd", (b"", b"bcd"))
    assert made == [b"a", b"", b"bcd"]
    assert json.dumps([len(one) for one in made]) == "[1, 0, 3]"


def uneven(tmp_path: Path) -> Path:
    """Samples that are alike in `x` and `label` alone."""

    def one(n: int, **others: np.ndarray) -> Sample:  # type: ignore[type-arg]
        x = np.arange(3, dtype=np.float32) + n
        return Sample(f"{n:04d}", {"x": x, "label": np.array(n % 3), **others}, {"n": n})

    samples = [
        one(0, points=np.zeros((4, 3))),
        one(1, points=np.zeros((40_000, 3))),
        one(2, points=np.zeros((2, 3), ">f4")),
        one(3, other=np.zeros(7, "u1")),
        one(4),
    ]
    return build(tmp_path / "uneven", {"a": [samples]})


def test_arrays_that_are_not_asked_for_may_differ(tmp_path: Path) -> None:
    root = uneven(tmp_path)
    with pytest.raises(
        PlanError, match=r"'a/0000' and 'a/0001' can't be in one batch: 'points' is"
    ):
        ShardDataset(root, batch_size=5)
    for shapes in ("error", "pad", "list"):
        for contiguous in (False, True):
            data = ShardDataset(
                root,
                batch_size=5,
                shuffle=False,
                fields=["x", "label"],
                shapes=shapes,
                contiguous=contiguous,  # type: ignore[arg-type]
            )
            (batch,) = data
            assert list(batch) == ["label", "x", "__valid__"]
            assert all_numbers([batch]) == [0, 1, 2, 3, 4]
    with pytest.raises(PlanError, match=r"'a/0000' and 'a/0003' .* only one of them has 'points'"):
        ShardDataset(root, batch_size=5, fields=["points"], shapes="pad", where="n <> 2")


def test_a_misspelt_field_is_told_with_its_neighbours(tmp_path: Path) -> None:
    root = uneven(tmp_path)
    for shapes in ("error", "list"):
        with pytest.raises(PlanError) as caught:
            ShardDataset(root, batch_size=5, fields=["x", "lable"], shapes=shapes)  # type: ignore[arg-type]
        told = "fields: no 'lable' (did you mean label?); there are label, other, points, x"
        assert str(caught.value) == told
