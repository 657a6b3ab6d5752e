"""Planned batches into blocks: read, checked and decoded, with everything small behind the rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fsmount.errors import FsmountError, IntegrityError
from fsmount_loader.batch import Batch, Key, Parts, View
from fsmount_loader.blocks import Recycler, Take
from fsmount_loader.decode import Decoder, Layout
from fsmount_loader.epochs import Skipped
from fsmount_loader.options import Options
from fsmount_loader.order import Int64s
from fsmount_loader.plan import Plan
from fsmount_loader.read import Reader
from fsmount_loader.transform import Generators, returned

_log = logging.getLogger("fsmount_loader")

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch before it is read."""

    positions: Int64s
    rows: Int64s
    valid: npt.NDArray[np.bool_]


class Assembler:
    """Builds batches from planned ones. One process's own; not thread-safe."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        reader: Reader,
        *,
        take: Take,
        epoch: int,
        skipped: Skipped,
        worker: int,
    ) -> None:
        self._plan = plan
        self._options = options
        self._reader = reader
        self._take = take
        self._epoch = epoch
        self._skipped = skipped
        self._worker = worker
        self._decoder = Decoder(plan.layout)
        self._scratch = Recycler()  # for rows that are then packed
        self._shape: _Shape | None = None

    def parts(self, planned: Planned) -> Parts:
        """Read, check, decode and transform one batch; errors are the reader's or a transform's."""
        parts = self._parts(planned)
        transform = self._options.transform
        if transform is None:
            return parts
        batch = parts.together()
        valid = batch["__valid__"]
        seed, epoch = self._options.seed, self._epoch
        name_of = partial(self._name_of, planned.rows)
        generators = Generators(seed, epoch, planned.positions, name_of)
        try:
            changed = Batch(returned(transform(batch, generators)))
        except Exception as error:
            if not hasattr(error, "__notes__"):  # none of a sample
                last = name_of(len(planned.rows) - 1)
                error.add_note(f"in the transform of the batch from {name_of(0)} to {last}")
            raise
        changed.setdefault("__valid__", valid)
        return Parts.of(changed)

    def _name_of(self, rows: Int64s, place: int) -> str:
        """The sample at `place` of the selected `rows`, for a message."""
        key, partition = self._plan.key(int(rows[place])), self._plan.partition(int(rows[place]))
        return f"sample {key!r} of partition {partition!r}"

    def _parts(self, planned: Planned) -> Parts:
        shape = self._shape
        if shape is None or shape.samples != len(planned.rows):
            contiguous = self._options.contiguous
            shape = _Shape.of(self._plan, len(planned.rows), contiguous=contiguous)
            self._shape = shape
        valid = planned.valid.copy()
        block = self._take(shape.size)
        if shape.packed:
            rows = self._scratch.take(shape.rows_size)
            self._decode_all(rows, planned.rows, valid)
            for field in self._plan.layout.fields:
                source = field.strided(shape.samples, self._plan.layout.pitch)
                shape.views[field.name].of(block).copy_(source.of(rows))
        else:
            self._decode_all(block, planned.rows, valid)
        shape.views["__valid__"].of(block).numpy()[:] = valid
        items: dict[str, Any] = dict.fromkeys(shape.names)
        self._fill_columns(items, shape.views, block, planned.rows)
        return Parts(items, (block,), shape.views)

    def _fill_columns(
        self, items: dict[str, Any], views: Mapping[Key, View], block: torch.Tensor, rows: Int64s
    ) -> None:
        """Write the columns of numbers into the block, and put the others into `items`."""
        for name, values in self._plan.columns.items():
            if name in views:
                np.take(values, rows, out=views[name].of(block).numpy())
            else:
                items[name] = [values[row].as_py() for row in rows.tolist()]

    def _decode_all(self, block: torch.Tensor, rows: Int64s, valid: npt.NDArray[np.bool_]) -> None:
        """Decode members into their rows; one that is skipped is zeros and marked in `valid`."""
        pitch = self._plan.layout.pitch
        schemas = self._plan.rows.schema[rows].tolist()
        memory = memoryview(block.numpy())  # type: ignore[arg-type]
        for group in self._reader.payloads(rows):
            if self._decoder.group(memory, group, schemas):
                continue
            for place, payload in group:
                row = memory[place * pitch : (place + 1) * pitch]
                if not self._decoded(row, payload, schemas[place], int(rows[place])):
                    row[:] = bytes(pitch)
                    valid[place] = False

    def _decoded(
        self, into: memoryview, payload: memoryview | FsmountError, schema: int, row: int
    ) -> bool:
        """Whether a selected row could be decoded; False if it is skipped."""
        try:
            if isinstance(payload, FsmountError):
                raise payload
            self._decoder.into(into, payload, schema)
        except FsmountError as error:
            self._failed(error, payload, row)
            return False
        return True

    def _failed(self, error: FsmountError, payload: object, row: int) -> None:
        """Raise an error with its place, or count a sample as skipped."""
        if error is not payload:
            error = IntegrityError(f"{self._reader.where(row)}: {error}")
        if self._options.on_error == "raise":
            raise error
        _log.warning("skipped: %s", error)
        self._skipped.add(self._worker, error)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What batches of one size have in common: the block's size, and where everything lies in it.

    The rows, or the packed fields, come first, then `__valid__` and the columns of numbers.
    """

    samples: int
    packed: bool
    size: int  # of the block
    rows_size: int  # of the rows alone
    names: tuple[str, ...]  # of the batch, in order
    views: Mapping[Key, View]

    @classmethod
    def of(cls, plan: Plan, samples: int, *, contiguous: bool) -> _Shape:
        layout = plan.layout
        views: dict[Key, View] = {}
        end = rows_size = samples * layout.pitch
        if contiguous:
            end = _place_packed(layout, samples, views)
        else:
            views |= {field.name: field.strided(samples, layout.pitch) for field in layout.fields}
        end = place_beside(plan, samples, end, views)
        names = (*(field.name for field in layout.fields), "__valid__", *plan.columns)
        return cls(samples, contiguous, end, rows_size, names, views)


def place_beside(plan: Plan, samples: int, end: int, views: dict[Key, View]) -> int:
    """Place `__valid__` and the columns of numbers from byte `end` on; returns where they end."""
    small = {"__valid__": np.dtype(np.bool_)}
    small |= {n: v.dtype for n, v in plan.columns.items() if isinstance(v, np.ndarray)}
    for name, dtype in small.items():
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        views[name] = View(0, kind, end // dtype.itemsize, (samples,), (1,))
        end += aligned(samples * dtype.itemsize)
    return end


def _place_packed(layout: Layout, samples: int, views: dict[Key, View]) -> int:
    end = 0
    for field in layout.fields:
        views[field.name] = field.packed(samples, end)
        end += aligned(samples * field.nbytes)
    return end


def aligned(size: int) -> int:
    """`size` bytes, made longer so that another tensor can follow."""
    return size + -size % _ALIGNMENT
