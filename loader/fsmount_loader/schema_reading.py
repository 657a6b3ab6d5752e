"""Reads the schemas of many samples at once: thousands of headers that differ in numbers only.

Samples whose arrays vary in length have a header each. Those of one kind, the same but for shapes
and places, are read together: one of them by `fsmount.formats.sample`, the numbers of the others as
arrays, which must be what canonical headers have. Whatever looks otherwise is read by that module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from fsmount.formats import sample
from fsmount_loader.order import Int64s
from fsmount_loader.schemas import Headers, Schemas

_NUMBER = rb"(?:0|[1-9]\d{0,17})"
_PLACES = re.compile(
    rb'"shape":\[((?:%b(?:,%b)*)?)\],"data_offsets":\[(%b),(%b)\]' % ((_NUMBER,) * 4)
)  # never inside a string, where a quotation mark has a backslash
_SURE = 1 << 62  # bytes; below this no sum of ours overflows

_Key = tuple[Any, ...]  # what the headers of one kind have in common
_Parts = list[bytes]  # of a header: text, and shape, start and end of a field, and so on


@dataclass(slots=True)
class SchemaReading:
    """Schemas that are met one manifest after the other; equal headers are one."""

    _place: dict[bytes, int] = field(default_factory=dict)
    _kinds: dict[_Key, tuple[int, tuple[sample.Field, ...]]] = field(default_factory=dict)
    _kind: list[int] = field(default_factory=list)
    _raw_size: list[int] = field(default_factory=list)
    _dims: list[Sequence[int]] = field(default_factory=list)

    def places(self, headers: Iterable[bytes]) -> list[int]:
        """The place of each among all that were met; FormatError for what is none."""
        found: list[int] = []
        alike: dict[_Key, list[tuple[int, _Parts]]] = {}
        for header in headers:
            place = self._place.setdefault(header, len(self._place))
            found.append(place)
            if place == len(self._kind):
                parts = _PLACES.split(header)
                alike.setdefault(_key(parts), []).append((place, parts))
                self._kind.append(-1)
                self._raw_size.append(0)
                self._dims.append(())
        for key, some in alike.items():
            self._read(key, some)
        return found

    def raw_sizes(self, places: Sequence[int]) -> Int64s:
        """The size of the member of each of these schemas."""
        return np.array([self._raw_size[place] for place in places], np.int64)

    def schemas(self) -> Schemas:
        """All that were met."""
        return Schemas(
            headers=Headers.of(list(self._place)),
            raw_size=np.array(self._raw_size, np.int64),
            kind=np.array(self._kind, np.int32),
            dims=np.array(list(chain.from_iterable(self._dims)), np.int64),
            dims_ends=np.cumsum([len(dims) for dims in self._dims], dtype=np.int64),
        )

    def _read(self, key: _Key, some: Sequence[tuple[int, _Parts]]) -> None:
        """Read headers of one kind, of which none was read before."""
        if key not in self._kinds:
            schema = sample.read_schema(_joined(some[0][1]))
            self._kinds[key] = len(self._kinds), schema.fields
        number, fields = self._kinds[key]
        if len(fields) != len(key[0]):  # a number was longer than _NUMBER, and all are in the key
            for place, parts in some:
                self._kind[place] = number
                self._read_alone(place, _joined(parts))
            return
        dims, raw_size, right = _numbers(fields, [parts for _, parts in some])
        rows = zip(some, dims.tolist(), raw_size.tolist(), right.tolist(), strict=True)
        for (place, parts), own_dims, size, canonical in rows:
            self._kind[place] = number
            if canonical:
                self._dims[place], self._raw_size[place] = own_dims, size
            else:
                self._read_alone(place, _joined(parts))

    def _read_alone(self, place: int, header: bytes) -> None:
        schema = sample.read_schema(header)
        self._dims[place] = [n for field in schema.fields for n in field.shape]
        self._raw_size[place] = -1 if schema.raw_size >> 63 else schema.raw_size


def _key(parts: _Parts) -> _Key:
    dimensions = tuple([shape.count(b",") + 1 if shape else 0 for shape in parts[1::4]])
    return dimensions, parts[0][8:], *parts[4:-1:4], parts[-1].rstrip(b" ")


def _joined(parts: _Parts) -> bytes:
    """The header that was taken apart."""
    whole = parts[0]
    for at in range(1, len(parts), 4):
        shape, start, end, text = parts[at : at + 4]
        whole += b'"shape":[%b],"data_offsets":[%b,%b]%b' % (shape, start, end, text)
    return whole


def _numbers(
    fields: Sequence[sample.Field], headers: Sequence[_Parts]
) -> tuple[Int64s, Int64s, npt.NDArray[np.bool_]]:
    """Dimensions [headers, all fields'] and raw sizes, and which of them are surely canonical."""
    count = len(headers)
    size = np.array([_canonical_size(parts) for parts in headers], np.int64)
    right = size > 0
    at = np.zeros(count, np.int64)
    most = np.zeros(count)  # bytes, if no dimension were 0
    dims = [np.zeros((count, 0), np.int64)]
    for place, one in enumerate(fields):
        shape, start, end = (_column(headers, 4 * place + n) for n in (1, 2, 3))
        shape = shape.reshape(count, -1)
        if one.dtype.kind == "c":
            right &= shape[:, -1] == 2
            shape = shape[:, :-1]
        if one.fortran_order:
            right &= (shape > 0).all(axis=1) & ((shape > 1).sum(axis=1) > 1)
        most += np.maximum(shape, 1).astype(np.float64).prod(axis=1) * one.dtype.itemsize
        right &= (most < _SURE) & (start == at)
        at = at + shape.prod(axis=1) * one.dtype.itemsize
        right &= end == at
        dims.append(shape)
    return np.concatenate(dims, axis=1), size + at, right


def _canonical_size(parts: _Parts) -> int:
    """The size of the header in `parts`; 0 if it isn't padded as `fsmount.formats.sample` pads."""
    size = sum(map(len, parts)) + len(parts) // 4 * len(b'"shape":[],"data_offsets":[,]')
    spaces = len(parts[-1]) - len(parts[-1].rstrip(b" "))
    padded = size % sample.ALIGNMENT == 0 and spaces < sample.ALIGNMENT
    return size if padded and int.from_bytes(parts[0][:8], "little") == size - 8 else 0


def _column(headers: Sequence[_Parts], place: int) -> Int64s:
    text = b",".join([parts[place] for parts in headers]).strip(b",")
    return np.fromstring(text, np.int64, sep=",") if text else np.zeros(0, np.int64)
