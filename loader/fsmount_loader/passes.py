"""One pass over an epoch, or over the rest of it: the batches of one rank, in any worker."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from fsmount_loader.assemble import Assembler, Planned
from fsmount_loader.batch import Batch, Parts
from fsmount_loader.blocks import Recycler, Take
from fsmount_loader.division import Division
from fsmount_loader.epochs import Skipped
from fsmount_loader.handed import Handing
from fsmount_loader.options import Options
from fsmount_loader.order import Order
from fsmount_loader.plan import Plan
from fsmount_loader.read import Reader, ShardFiles
from fsmount_loader.varied import VariedAssembler

_PLANNED_AT_ONCE = 1 << 12  # samples; a plan of one batch costs nearly as much as one of many


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

    @property
    def batch_bytes(self) -> int:
        """The memory that one batch takes at most, about."""
        varied = self.plan.varied
        row = self.plan.layout.pitch if varied is None else max(1, varied.row_bytes)
        return self.division.rank_batch * row

    def batches(self, worker: int = 0, workers: int = 0) -> Iterator[Batch]:
        """All batches, or those of one of a DataLoader's workers; the same whoever builds them."""
        if not workers:
            for parts in self.parts(Recycler().take, 0, 1):
                yield parts.together()
        else:
            handing = Handing()
            for parts in self.parts(handing.take, worker, workers):
                yield handing.batch(parts)

    def parts(self, take: Take, worker: int, workers: int) -> Iterator[Parts]:
        """Batches `worker`, `worker + workers`, … of this pass, in blocks that `take` gives."""
        with self.reader() as reader:
            assembler = (Assembler if self.plan.varied is None else VariedAssembler)(
                self.plan,
                self.options,
                reader,
                take=take,
                epoch=self.epoch,
                skipped=self.skipped,
                worker=worker,
            )
            for planned in self.planned(reader, worker, workers):
                yield assembler.parts(planned)

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """A reader of this pass's payloads; its files are closed at the end."""
        files = ShardFiles(self.plan.shards)
        threshold, retries = self.options.seek_threshold, self.options.retries
        try:
            yield Reader(self.plan, files, seek_threshold=threshold, retries=retries)
        finally:
            files.close()

    def planned(self, reader: Reader, worker: int, workers: int) -> Iterator[Planned]:
        """This worker's batches, each announced `prefetch` batches before it is read."""
        ahead = _ReadAhead(reader, self.order)
        waiting: deque[Planned] = deque()
        for planned, chunks in self._in_groups(range(worker, len(self), workers)):
            waiting.append(planned)
            if self.options.prefetch:
                ahead.announce(chunks)
            if len(waiting) > self.options.prefetch:
                yield waiting.popleft()
        yield from waiting

    def _in_groups(self, numbers: range) -> Iterator[tuple[Planned, list[int]]]:
        """Batches by number, and the chunks their rows lie in; planned many at a time."""
        order = self.order.of_epoch(self.epoch)
        size = self.division.rank_batch
        sorted_ = self.order.buckets is not None  # then a batch costs the least in its turn
        step = 1 if sorted_ else max(1, _PLANNED_AT_ONCE // size)
        for at in range(0, len(numbers), step):
            some = [self.division.positions(self.start, n) for n in numbers[at : at + step]]
            rows = order.rows(np.concatenate([positions for positions, _ in some]))
            chunks = self.order.chunks(rows).tolist()
            for place, (positions, valid) in enumerate(some):
                mine = slice(place * size, (place + 1) * size)
                yield Planned(positions, rows[mine], valid), chunks[mine]


class _ReadAhead:
    """Announces whole chunks, each once while it is in use."""

    def __init__(self, reader: Reader, order: Order) -> None:
        self._reader = reader
        self._bounds = order.bounds
        chunks, rows = len(order.bounds) - 1, int(order.bounds[-1])
        in_use = order.window * chunks // rows + 3  # chunks of a stream, about
        self._most = in_use * max(order.streams, 256)
        if order.buckets is not None:
            self._most += order.buckets.window
        self._announced: OrderedDict[int, None] = OrderedDict()

    def announce(self, chunks: Sequence[int]) -> None:
        """Announce chunks, but for those announced already."""
        announced = self._announced
        fresh = sorted({number for number in chunks if number not in announced})
        for number in chunks:
            announced[number] = None
            announced.move_to_end(number)
        if fresh:
            chunk = np.array(fresh)
            first, length = self._bounds[chunk], self._bounds[chunk + 1] - self._bounds[chunk]
            place = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
            self._reader.announce(np.repeat(first, length) + place, np.repeat(chunk, length))
        while len(announced) > self._most:
            announced.popitem(last=False)
