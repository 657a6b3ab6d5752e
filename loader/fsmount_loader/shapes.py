"""Samples of one selection that differ in shape: what they share, and where their tensors lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from fsmount.formats import sample
from fsmount_loader.decode import FieldView, Layout, decoded_end, fields_of
from fsmount_loader.order import Int64s
from fsmount_loader.schemas import Kind, Schemas

_RAW = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


@dataclass(frozen=True, slots=True)
class VariedField:
    """One tensor of the samples. A row of each array belongs to a schema."""

    name: str
    dtype: torch.dtype
    varies: bool  # whether two schemas differ in its shape
    shapes: Int64s  # [schemas, dimensions]
    starts: Int64s  # [schemas], bytes from the start of the member's data

    @property
    def raw(self) -> str:
        """A NumPy dtype of the same width, whose copies are the same bit for bit."""
        return _RAW[self.dtype.itemsize]

    def shapes_of(self, schemas: npt.NDArray[np.integer]) -> list[tuple[int, ...]]:
        """The shape in each of `schemas`."""
        return [tuple(shape) for shape in self.shapes[schemas].tolist()]

    def common_shape(self, schemas: npt.NDArray[np.integer]) -> tuple[int, ...]:
        """The least shape that holds the tensor in each of `schemas`."""
        return tuple(self.shapes[schemas].max(axis=0).tolist())


@dataclass(frozen=True, slots=True)
class Varied:
    """The fields to deliver of samples whose data differ in size."""

    mode: Literal["pad", "list"]  # what a field that varies becomes
    fields: tuple[VariedField, ...]

    @classmethod
    def of(
        cls,
        schemas: Schemas,
        wanted: Sequence[str] | None,
        mode: Literal["pad", "list"],
    ) -> tuple[Layout, Varied]:
        """How to decode members of `schemas`, and the fields `wanted` (None: all) of them.

        Those differ in nothing but sizes; whatever else is in a member does not matter. The
        layout's fields are the first schema's.
        """
        first, headers = schemas.schema(0), schemas.headers.sizes
        views = fields_of(first, wanted, len(first.header))
        fields = [_Collected.empty(view, len(schemas)) for view in views]
        decoded = np.zeros(len(schemas), np.int64)
        for kind in schemas.kinds():
            decoded[kind.places] = _collect(kind, {field.name: field for field in fields})
        start = int(headers.max())
        joined = Layout(
            pitch=start + int((decoded + -decoded % sample.ALIGNMENT - headers).max()),
            start=start,
            headers=schemas.headers,
            raw_size=tuple(schemas.raw_size.tolist()),
            decoded=tuple(decoded.tolist()),
            fields=views,
        )
        return joined, cls(mode, tuple(field.whole() for field in fields))

    @property
    def sized(self) -> dict[str, VariedField]:
        """The fields that are padded, by the name of the entry that tells each sample's shape."""
        padded = (field for field in self.fields if field.varies and self.mode == "pad")
        return {f"__shape__.{field.name}": field for field in padded}

    @property
    def row_bytes(self) -> int:
        """The most bytes that the fields of one sample take in any batch."""
        return sum(map(self._most, self.fields))

    def _most(self, field: VariedField) -> int:
        every = np.arange(len(field.shapes))
        if self.mode == "pad":
            return nbytes(field.dtype, field.common_shape(every))
        return max(nbytes(field.dtype, shape) for shape in field.shapes_of(every))


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The bytes of a packed tensor."""
    return dtype.itemsize * prod(shape)


@dataclass(frozen=True, slots=True)
class _Collected:
    """A field of all schemas, filled in kind by kind."""

    view: FieldView
    shapes: Int64s
    starts: Int64s

    @classmethod
    def empty(cls, view: FieldView, schemas: int) -> _Collected:
        shapes = np.zeros((schemas, len(view.shape)), np.int64)
        return cls(view, shapes, np.zeros(schemas, np.int64))

    @property
    def name(self) -> str:
        return self.view.name

    def whole(self) -> VariedField:
        return VariedField(
            name=self.name,
            dtype=self.view.dtype,
            varies=bool((self.shapes != self.shapes[0]).any()),
            shapes=self.shapes,
            starts=self.starts,
        )


def _collect(kind: Kind, fields: Mapping[str, _Collected]) -> Int64s:
    """Fill in the fields of the schemas of a kind; returns how much of a member is decompressed."""
    ends = kind.ends()
    data = ends[:, -1] if kind.fields else np.zeros(len(kind.places), np.int64)
    needed = np.zeros(len(kind.places), np.int64)
    for place, (field, shapes) in enumerate(kind.shapes()):
        if field.name in fields:
            wanted = fields[field.name]
            wanted.shapes[kind.places] = shapes
            wanted.starts[kind.places] = ends[:, place - 1] if place else 0
            needed = np.maximum(needed, ends[:, place])
    return decoded_end(kind.header_size + data, kind.header_size + needed)
