"""Payloads to tensors: each member is decompressed into its row of one block, fields are views.

A block begins with uint8 [samples, pitch]. Members of one layout may have headers of different
lengths (a Fortran-ordered original is told so in its header); a row is placed so that all data is
aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import zstandard

from fsmount.errors import IntegrityError
from fsmount.formats import sample
from fsmount_loader.batch import View, packed_stride
from fsmount_loader.order import Int64s
from fsmount_loader.schemas import Schemas

_TORCH = {
    "b1": torch.bool, "i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64,
    "u1": torch.uint8, "u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64,
    "f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "c8": torch.complex64,
    "c16": torch.complex128, "M8": torch.int64, "m8": torch.int64,
}  # fmt: skip


_ZSTD_BLOCK = 128 << 10  # bytes that zstd decompresses at a time
_DESCRIPTOR = 4  # the byte of a frame's header with its flags (RFC 8878, 3.1.1.1.1)
_UNCHECKED = 0xFF - 4  # all flags but the one for a checksum


@dataclass(frozen=True, slots=True)
class FieldView:
    """Where one tensor lies in each row of a block, and what it is there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the row's start; a multiple of the dtype's size
    nbytes: int

    def strided(self, samples: int, pitch: int) -> View:
        """The view of all samples in a block of rows of `pitch` bytes: [samples, *shape]."""
        size = self.dtype.itemsize
        stride = (pitch // size, *packed_stride(self.shape))
        return View(0, self.dtype, self.offset // size, (samples, *self.shape), stride)

    def packed(self, samples: int, start: int) -> View:
        """The view of all samples, packed from byte `start` of a block: [samples, *shape]."""
        return View.packed(self.dtype, (samples, *self.shape), start)


@dataclass(frozen=True, slots=True)
class Layout:
    """How decoded members lie in a block."""

    pitch: int  # bytes of a row
    start: int  # of the data in a row
    headers: Sequence[bytes]  # of each schema; all have the same data
    raw_size: tuple[int, ...]  # of each schema's member
    decoded: tuple[int, ...]  # bytes of each schema's member that are decompressed
    fields: tuple[FieldView, ...]

    @classmethod
    def of(cls, schemas: Schemas, wanted: Sequence[str] | None) -> Layout:
        """The layout of the first schema's data, with the fields `wanted` (None: all) by name.

        Decompression ends behind the last field wanted, where that saves anything.
        """
        first, sizes = schemas.schema(0), schemas.headers.sizes
        start = int(sizes.max())
        fields = fields_of(first, wanted, start)
        size = start + first.raw_size - len(first.header)
        end = max((view.offset + view.nbytes for view in fields), default=start)
        end = int(decoded_end(np.array(size), np.array(end)))
        return cls(
            pitch=end + -end % sample.ALIGNMENT,
            start=start,
            headers=schemas.headers,
            raw_size=tuple(schemas.raw_size.tolist()),
            decoded=tuple((end - start + sizes).tolist()),
            fields=fields,
        )


def fields_of(
    schema: sample.Schema, wanted: Sequence[str] | None, start: int
) -> tuple[FieldView, ...]:
    """The fields `wanted` (None: all) by name, in a row where the data begins at `start`."""
    chosen = None if wanted is None else {*wanted}
    shift = start - len(schema.header)
    fields = (f for f in sample.sorted_fields(schema) if chosen is None or f.name in chosen)
    return tuple(_view(field, shift) for field in fields)


def decoded_end(size: Int64s, end: Int64s) -> Int64s:
    """Where decompression of `size` bytes ends if only those before `end` are wanted."""
    saved = -(-size // _ZSTD_BLOCK) > -(-end // _ZSTD_BLOCK)
    return np.where(saved, end, size)


class Decoder:
    """Decompresses payloads into the rows of a block. Not thread-safe; can't be pickled."""

    def __init__(self, layout: Layout) -> None:
        self._pitch, self._start = layout.pitch, layout.start
        self._schemas = tuple(zip(layout.headers, layout.raw_size, layout.decoded, strict=True))
        self._reader = zstandard.ZstdDecompressor().stream_reader

    def group(
        self, block: memoryview, payloads: Sequence[tuple[int, object]], schemas: Sequence[int]
    ) -> bool:
        """Decode payloads, each into the row of its place in `block`; whether all were right.

        `schemas` has the schema of each place. If not, `into` tells which is wrong. One step is
        made for all before the next: between two samples, which drive all else out of the
        processor's caches, as little as possible is done.
        """
        members = []
        try:
            for place, payload in payloads:
                header, size, wanted = self._schemas[schemas[place]]
                if type(payload) is not memoryview or payload.readonly:
                    return False
                if zstandard.frame_content_size(payload) != size:
                    return False
                payload[_DESCRIPTOR] &= _UNCHECKED
                start = place * self._pitch + self._start - len(header)
                members.append((payload, block[start : start + wanted], header))
            read = self._reader
            got = [read(payload).readinto(member) for payload, member, _ in members]
        except zstandard.ZstdError:
            return False
        return all(
            count == len(member) and member[: len(header)].tobytes() == header
            for count, (_, member, header) in zip(got, members, strict=True)
        )

    def into(self, row: memoryview, payload: memoryview, schema: int) -> None:
        """Decode `payload` into `row`, the bytes of one row of a block.

        A payload that can be written is taken to be checked: zstd's own checksum, which takes a
        seventh of the time, is struck from it. Raises IntegrityError unless it is one frame that
        holds a member with the schema's header.
        """
        header, size, wanted = self._schemas[schema]
        start = self._start - len(header)
        member = row[start : start + wanted]
        try:
            if zstandard.frame_content_size(payload) != size:
                raise IntegrityError(f"the payload does not hold {size} bytes")
            if not payload.readonly:
                payload[_DESCRIPTOR] &= _UNCHECKED  # its last four bytes are then behind the frame
            got = self._reader(payload).readinto(member)
        except zstandard.ZstdError as error:
            raise IntegrityError(f"the payload can't be decompressed: {error}") from error
        if got != wanted or member[: len(header)].tobytes() != header:
            raise IntegrityError("the payload does not hold the schema that the manifest says")


def _view(field: sample.Field, shift: int) -> FieldView:
    dtype = _TORCH[f"{field.dtype.kind}{field.dtype.itemsize}"]
    return FieldView(field.name, dtype, field.shape, field.offset + shift, field.nbytes)
