"""Samples of one selection that differ in shape: what they share, and where their tensors lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from fsmount.formats import sample
from fsmount_loader.decode import Layout
from fsmount_loader.order import Int64s

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
        schemas: Sequence[sample.Schema],
        wanted: Sequence[str] | None,
        mode: Literal["pad", "list"],
    ) -> tuple[Layout, Varied]:
        """How to decode members of `schemas`, which differ in nothing but sizes, and their fields.

        The layout's fields are the first schema's. Raises PlanError as `Layout.of`.
        """
        each = [Layout.of([schema], wanted) for schema in schemas]
        start = max(layout.start for layout in each)
        joined = replace(
            each[0],
            start=start,
            pitch=start + max(layout.pitch - layout.start for layout in each),
            headers=tuple(schema.header for schema in schemas),
            raw_size=tuple(schema.raw_size for schema in schemas),
            decoded=tuple(layout.decoded[0] for layout in each),
        )
        fields = tuple(_field(each, place) for place in range(len(each[0].fields)))
        return joined, cls(mode, fields)

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


def _field(each: Sequence[Layout], place: int) -> VariedField:
    views = [layout.fields[place] for layout in each]
    shapes = np.array([view.shape for view in views], np.int64)
    shapes = shapes.reshape(len(each), len(views[0].shape))
    starts = [view.offset - layout.start for view, layout in zip(views, each, strict=True)]
    return VariedField(
        name=views[0].name,
        dtype=views[0].dtype,
        varies=bool((shapes != shapes[0]).any()),
        shapes=shapes,
        starts=np.array(starts, np.int64),
    )
