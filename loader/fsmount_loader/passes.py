"""One pass over an epoch, or over the rest of it: the batches of one rank, in any worker."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fsmount.errors import FsmountError, IntegrityError
from fsmount_loader.batch import Batch
from fsmount_loader.decode import Decoder
from fsmount_loader.division import Division
from fsmount_loader.epochs import Skipped
from fsmount_loader.options import Options
from fsmount_loader.order import EpochOrder, Int64s, Order
from fsmount_loader.plan import Plan
from fsmount_loader.read import Reader, ShardFiles
from fsmount_loader.transform import Generators

_log = logging.getLogger("fsmount_loader")


@dataclass(frozen=True, slots=True)
class _Planned:
    """A batch before it is read."""

    positions: Int64s
    rows: Int64s
    valid: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pass:
    """One rank's batches of one epoch from a position on. Can be pickled."""

    plan: Plan
    options: Options
    order: Order
    division: Division
    skipped: Skipped
    epoch: int
    start: int

    def __len__(self) -> int:
        return self.division.batches(self.start)

    def batches(self, worker: int = 0, workers: int = 1) -> Iterator[Batch]:
        """Batches `worker`, `worker + workers`, … of this pass; the same whoever builds them."""
        files = ShardFiles(self.plan.shards)
        threshold, retries = self.options.seek_threshold, self.options.retries
        reader = Reader(self.plan, files, seek_threshold=threshold, retries=retries)
        assembler = _Assembler(self, reader, worker)
        try:
            for planned in self._planned(reader, worker, workers):
                yield assembler.batch(planned)
        finally:
            files.close()

    def _planned(self, reader: Reader, worker: int, workers: int) -> Iterator[_Planned]:
        """This worker's batches, each announced `prefetch` batches before it is read."""
        order = self.order.of_epoch(self.epoch)
        ahead = _ReadAhead(reader, self.order)
        waiting: deque[_Planned] = deque()
        for number in range(worker, len(self), workers):
            waiting.append(self._plan_batch(order, number))
            if self.options.prefetch:
                ahead.announce(waiting[-1].rows)
            if len(waiting) > self.options.prefetch:
                yield waiting.popleft()
        yield from waiting

    def _plan_batch(self, order: EpochOrder, number: int) -> _Planned:
        positions, valid = self.division.positions(self.start, number)
        return _Planned(positions, order.rows(positions), valid)


class _ReadAhead:
    """Announces whole chunks, each once while it is in use."""

    def __init__(self, reader: Reader, order: Order) -> None:
        self._reader = reader
        self._bounds = order.bounds
        self._most = 4 * max(order.streams, 256)
        self._announced: OrderedDict[int, None] = OrderedDict()

    def announce(self, rows: Int64s) -> None:
        """Announce the chunks that `rows` lie in, but for those announced already."""
        chunks = np.unique(np.searchsorted(self._bounds, rows, side="right") - 1).tolist()
        for chunk in chunks:
            if chunk not in self._announced:
                self._announced[chunk] = None
                self._reader.announce(np.arange(self._bounds[chunk], self._bounds[chunk + 1]))
            self._announced.move_to_end(chunk)
        while len(self._announced) > self._most:
            self._announced.popitem(last=False)


class _Assembler:
    """Builds batches from planned ones."""

    def __init__(self, of: Pass, reader: Reader, worker: int) -> None:
        self._pass = of
        self._reader = reader
        self._worker = worker
        self._decoder = Decoder(of.plan.layout)

    def batch(self, planned: _Planned) -> Batch:
        """Read, check and decode one batch. Raises IntegrityError and LoadError as Reader does."""
        plan, options = self._pass.plan, self._pass.options
        valid = planned.valid.copy()
        block = self._block(planned.rows, valid)
        tensors = {field.name: field.of(block) for field in plan.layout.fields}
        if options.contiguous:
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        batch = Batch(tensors)
        batch["__valid__"] = torch.from_numpy(valid)
        for name, values in plan.columns.items():
            batch[name] = _taken(values, planned.rows)
        return self._transformed(batch, planned)

    def _block(self, rows: Int64s, valid: npt.NDArray[np.bool_]) -> torch.Tensor:
        """The decoded members; a row that is skipped is zeros and is marked in `valid`."""
        pitch = self._pass.plan.layout.pitch
        block = torch.empty((len(rows), pitch), dtype=torch.uint8)
        memory = memoryview(block.numpy().reshape(-1))  # type: ignore[arg-type]
        for place, payload in self._reader.payloads(rows):
            try:
                row = memory[place * pitch : (place + 1) * pitch]
                self._decode(row, payload, int(rows[place]))
            except FsmountError as error:
                if self._pass.options.on_error == "raise":
                    raise
                _log.warning("skipped: %s", error)
                self._pass.skipped.add(self._worker, error)
                block[place] = 0
                valid[place] = False
        return block

    def _decode(self, row: memoryview, payload: memoryview | FsmountError, number: int) -> None:
        if isinstance(payload, FsmountError):
            raise payload
        try:
            self._decoder.into(row, payload, int(self._pass.plan.rows.schema[number]))
        except IntegrityError as error:
            raise IntegrityError(f"{self._reader.where(number)}: {error}") from error

    def _transformed(self, batch: Batch, planned: _Planned) -> Batch:
        transform = self._pass.options.transform
        if transform is None:
            return batch
        seed, epoch = self._pass.options.seed, self._pass.epoch
        changed = Batch(transform(batch, Generators(seed, epoch, planned.positions)))
        changed.setdefault("__valid__", batch["__valid__"])
        return changed


def _taken(values: Any, rows: Int64s) -> Any:
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values[rows])
    return [values[row].as_py() for row in rows.tolist()]
