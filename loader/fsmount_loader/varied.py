"""Batches of samples that differ in shape: fields that vary are padded with zeros, or lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fsmount.errors import LoadError
from fsmount.formats import sample
from fsmount_loader.assemble import Assembler, Planned, aligned, place_beside
from fsmount_loader.batch import Key, Parts, View
from fsmount_loader.order import Int32s, Int64s
from fsmount_loader.plan import Plan
from fsmount_loader.shapes import Varied, VariedField, nbytes


class VariedAssembler(Assembler):
    """Builds batches of a plan whose samples differ in shape.

    A member is decoded beside the batch, then its fields are copied into the block.
    """

    _member = memoryview(bytearray())

    def _parts(self, planned: Planned) -> Parts:
        varied, rows, columns = self._plan.varied, planned.rows, self._plan.columns
        assert varied is not None  # noqa: S101 - else an Assembler is taken
        schemas = self._plan.rows.schema[rows]
        placed, block = self._allocated(varied, schemas, rows)
        valid = planned.valid.copy()
        self._decode_each(placed.slots, block.numpy(), rows, valid)
        placed.views["__valid__"].of(block).numpy()[:] = valid
        for name, field in varied.sized.items():
            placed.views[name].of(block).numpy()[:] = field.shapes[schemas]
        items = placed.items | dict.fromkeys(("__valid__", *varied.sized, *columns))
        self._fill_columns(items, placed.views, block, rows)
        return Parts(items, (block,), placed.views)

    def _allocated(
        self, varied: Varied, schemas: Int32s, rows: Int64s
    ) -> tuple[_Placed, torch.Tensor]:
        """A block for the batch, and memory for its largest member; LoadError without."""
        layout, chosen = self._plan.layout, schemas.tolist()
        try:
            placed = _Placed.of(self._plan, varied, schemas)
            member = layout.start + max(layout.decoded[schema] for schema in chosen)
            if len(self._member) < member:
                self._member = memoryview(np.empty(member, np.uint8))  # type: ignore[arg-type]
            return placed, self._take(placed.size)
        except (OSError, MemoryError, OverflowError, ValueError, RuntimeError) as error:
            largest = max(range(len(chosen)), key=lambda at: layout.raw_size[chosen[at]])
            where = self._reader.where(int(rows[largest]))
            raise LoadError(f"{where}: no memory for a batch with it: {error}") from error

    def _decode_each(
        self, slots: Sequence[_Slots], block: Any, rows: Int64s, valid: npt.NDArray[np.bool_]
    ) -> None:
        """Decode members into the block; one that is skipped is zeros and marked in `valid`."""
        schemas = self._plan.rows.schema[rows].tolist()
        data = self._member[self._plan.layout.start :]
        skipped = set()
        for place, payload in chain.from_iterable(self._reader.payloads(rows)):
            if self._decoded(self._member, payload, schemas[place], int(rows[place])):
                for field in slots:
                    field.copy(block, place, data)
            else:
                skipped.add(place)
        # Only now: a shape that a payload does not bear out takes no memory.
        for place in range(len(rows)):
            for field in slots:
                field.pad(block, place, whole=place in skipped)
        valid[list(skipped)] = False


@dataclass(frozen=True, slots=True)
class _Slots:
    """Where one field of each sample of a batch goes, and where it comes from."""

    raw: str  # a dtype of its width
    starts: Sequence[int]  # bytes from the block's start
    shapes: Sequence[tuple[int, ...]]  # each as large as the sample's own, or larger
    data: Sequence[int]  # bytes from the start of the member's data
    own: Sequence[tuple[int, ...]]  # the samples' shapes

    def copy(self, block: Any, place: int, data: memoryview) -> None:
        """Copy a sample's field from its member's data."""
        own = self.own[place]
        within = tuple(map(slice, own))
        self._slot(block, place)[within] = np.ndarray(own, self.raw, data, self.data[place])

    def pad(self, block: Any, place: int, *, whole: bool) -> None:
        """Write zeros behind a sample's field in each dimension, or all over it."""
        own, shape = self.own[place], self.shapes[place]
        if whole:
            self._slot(block, place).fill(0)
        elif own != shape:
            within = tuple(map(slice, own))
            for axis, length in enumerate(own):
                self._slot(block, place)[(*within[:axis], slice(length, None))] = 0

    def _slot(self, block: Any, place: int) -> npt.NDArray[Any]:
        return np.ndarray(self.shapes[place], self.raw, block, self.starts[place])


@dataclass(slots=True)
class _Placed:
    """Where everything lies in the block of one batch."""

    size: int  # bytes
    slots: list[_Slots]
    items: dict[str, Any]  # an entry of each field: None, or a list of it
    views: dict[Key, View]

    @classmethod
    def of(cls, plan: Plan, varied: Varied, schemas: Int32s) -> _Placed:
        """The places for samples of these schemas."""
        placed, samples = cls(0, [], {}, {}), len(schemas)
        for field in varied.fields:
            if field.varies and varied.mode == "list":
                placed._list(field, schemas)
            else:
                placed._pad(field, schemas)
        for name, field in varied.sized.items():
            placed._view(name, torch.int64, (samples, field.shapes.shape[1]))
        placed.size = place_beside(plan, samples, placed.size, placed.views)
        return placed

    def _list(self, field: VariedField, schemas: Int32s) -> None:
        own = field.shapes_of(schemas)
        keys = [(field.name, place) for place in range(len(own))]
        starts = [self._view(k, field.dtype, shape) for k, shape in zip(keys, own, strict=True)]
        self.items[field.name] = [None] * len(own)
        self.slots.append(_Slots(field.raw, starts, own, field.starts[schemas].tolist(), own))

    def _pad(self, field: VariedField, schemas: Int32s) -> None:
        own, shape = field.shapes_of(schemas), field.common_shape(schemas)
        if not sample.representable(np.dtype(field.raw), shape):
            raise ValueError(f"{field.name!r} can't be padded to {list(shape)}")
        start = self._view(field.name, field.dtype, (len(own), *shape))
        step = nbytes(field.dtype, shape)
        starts = [start + place * step for place in range(len(own))]
        self.items[field.name] = None
        shapes, data = [shape] * len(own), field.starts[schemas].tolist()
        self.slots.append(_Slots(field.raw, starts, shapes, data, own))

    def _view(self, key: Key, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """Place one packed tensor; returns the byte where it starts."""
        start = self.size
        self.views[key] = View.packed(dtype, shape, start)
        self.size += aligned(nbytes(dtype, shape))
        return start
