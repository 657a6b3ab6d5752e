"""Payloads to tensors: each member is decompressed into its row of one block, fields are views.

A block is uint8 [samples, pitch]. Members of one layout may have headers of different lengths (a
Fortran-ordered original is told so in its header); a row is placed so that all data is aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zstandard

from fsmount.errors import IntegrityError, PlanError
from fsmount.formats import sample

_TORCH = {
    "b1": torch.bool, "i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64,
    "u1": torch.uint8, "u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64,
    "f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "c8": torch.complex64,
    "c16": torch.complex128, "M8": torch.int64, "m8": torch.int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FieldView:
    """Where one tensor lies in each row of a block, and what it is there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the row's start
    nbytes: int

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor of all samples in `block`: [samples, *shape], sharing its memory."""
        if self.nbytes == 0:
            return torch.empty((len(block), *self.shape), dtype=self.dtype)
        flat = block[:, self.offset : self.offset + self.nbytes]
        return flat.view(self.dtype).view(len(block), *self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """How decoded members lie in a block."""

    pitch: int  # bytes of a row
    start: int  # of the data in a row
    headers: tuple[bytes, ...]  # of each schema; all have the same data
    raw_size: tuple[int, ...]  # of each schema's member
    fields: tuple[FieldView, ...]

    @classmethod
    def of(cls, schemas: Sequence[sample.Schema], wanted: Sequence[str] | None) -> Layout:
        """The layout of the first schema's data, with the fields `wanted` (None: all) by name.

        Raises PlanError listing the names for one that is not there.
        """
        start = max(len(schema.header) for schema in schemas)
        shift = start - len(schemas[0].header)
        views = {f.name: _view(f, shift) for f in sample.sorted_fields(schemas[0])}
        for name in wanted or ():
            if name not in views:
                raise PlanError(f"fields: no {name!r}; there are {', '.join(views) or 'none'}")
        size = start + schemas[0].raw_size - len(schemas[0].header)
        return cls(
            pitch=size + -size % sample.ALIGNMENT,
            start=start,
            headers=tuple(schema.header for schema in schemas),
            raw_size=tuple(schema.raw_size for schema in schemas),
            fields=tuple(v for n, v in views.items() if wanted is None or n in wanted),
        )


class Decoder:
    """Decompresses payloads into the rows of a block. Not thread-safe; can't be pickled."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._zstd = zstandard.ZstdDecompressor()

    def into(self, row: memoryview, payload: memoryview, schema: int) -> None:
        """Decode `payload` into `row`, the bytes of one row of a block.

        Raises IntegrityError unless it is one frame that holds a member with the schema's header.
        """
        header, size = self._layout.headers[schema], self._layout.raw_size[schema]
        start = self._layout.start - len(header)
        member = row[start : start + size]
        try:
            if zstandard.frame_content_size(payload) != size:
                raise IntegrityError(f"the payload does not hold {size} bytes")
            with self._zstd.stream_reader(payload, closefd=False) as reader:
                got = reader.readinto(member)
        except zstandard.ZstdError as error:
            raise IntegrityError(f"the payload can't be decompressed: {error}") from error
        if got != size or member[: len(header)] != header:
            raise IntegrityError("the payload does not hold the schema that the manifest says")


def describe_difference(first: sample.Schema, other: sample.Schema) -> str:
    """What keeps samples of two schemas out of one batch; empty if nothing does."""
    ours, theirs = ({f.name: f for f in schema.fields} for schema in (first, other))
    if ours.keys() != theirs.keys():
        odd = min(ours.keys() ^ theirs.keys())
        return f"only one of them has {odd!r}"
    for name, field in ours.items():
        its = theirs[name]
        if (_native(field), field.shape) != (_native(its), its.shape):
            one, two = (f"{_native(f)} {list(f.shape)}" for f in (field, its))
            return f"{name!r} is {one} in one and {two} in the other"
    return ""


def _view(field: sample.Field, shift: int) -> FieldView:
    dtype = _TORCH[f"{field.dtype.kind}{field.dtype.itemsize}"]
    return FieldView(field.name, dtype, field.shape, field.offset + shift, field.nbytes)


def _native(field: sample.Field) -> np.dtype[Any]:
    return field.dtype.newbyteorder("=")
