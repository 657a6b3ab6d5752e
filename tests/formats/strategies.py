"""What the formats' properties are tested with: arrays, keys, JSON values, damaged bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

DTYPES = [
    *("|b1", "|i1", "|u1", "<i2", ">i2", "<u2", ">u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8"),
    *("<u8", ">u8", "<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "<c8", ">c8", "<c16", ">c16"),
    *("<M8[ns]", ">M8[D]", "<M8[25us]", "<M8", "<m8[s]", ">m8[7h]", "<m8"),
]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    """An array of any dtype, shape, memory order and bytes; NaN payloads and odd booleans too."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    order = draw(st.sampled_from("CF"))
    return np.ndarray(shape, dtype, bytearray(data), order=order)


def samples() -> st.SearchStrategy[dict[str, NDArray[Any]]]:
    return st.dictionaries(NAMES, arrays(), max_size=4)


@st.composite
def keys(draw: st.DrawFn) -> str:
    """A valid key: any Unicode but NUL, some of it such as tar and WebDataset trip over."""
    odd = st.sampled_from(["%", ".", " ", "\n", "-", "__", "é", "日", "\x7f", "\\", "%41", ".npz"])
    any_char = st.characters(exclude_categories=["Cs"], exclude_characters="/\0")
    part = st.lists(st.one_of(odd, any_char), min_size=1, max_size=12).map("".join)
    meta = st.sampled_from(["__a__", "____", "__a__b", "a" * 120, "日" * 60])
    parts = st.lists(st.one_of(part, part, meta), min_size=1, max_size=4)
    return "/".join(draw(parts.filter(lambda names: not {".", ".."} & set(names))))


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """`data` with a few bytes changed, or cut out, or doubled."""
    place = st.integers(0, len(data))
    edit = st.one_of(
        st.tuples(place, st.just(1), st.binary(min_size=1, max_size=1)),
        st.tuples(place, st.integers(0, 20), st.binary(max_size=3)),
        st.tuples(place, st.just(len(data)), st.just(b"")),
    )
    return st.lists(edit, min_size=1, max_size=3).map(lambda edits: _apply(data, edits))


def _apply(data: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    for at, drop, put in edits:
        data = data[:at] + put + data[at + drop :]
    return data


def same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether two arrays are equal bit for bit: dtype with byte order, shape, memory order."""
    return (one.dtype.str, one.shape, one.flags.fnc, one.tobytes()) == (
        other.dtype.str,
        other.shape,
        other.flags.fnc,
        other.tobytes(),
    )


JSON_NUMBERS = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([0, -1, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1]),
    st.floats(allow_nan=False, allow_infinity=False),
)
JSON_SCALARS = st.one_of(st.none(), st.booleans(), JSON_NUMBERS, st.text(max_size=5))
JSON_VALUES = st.recursive(
    JSON_SCALARS,
    lambda part: st.one_of(
        st.lists(part, max_size=3), st.dictionaries(st.sampled_from(["a", "b", ""]), part)
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(["a", "b", "a.b", "", "x y", "日", "\0", "A"])
JSON_OBJECTS = st.dictionaries(FIELDS, JSON_VALUES, max_size=4)
