"""One pass over an epoch, or over the rest of it: the batches of one rank, in any worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
from fsmount_loader.order import Int64s, Order
from fsmount_loader.plan import Plan
from fsmount_loader.read import Reader, ShardFiles, Span
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

    def batches(self, worker: int = 0, workers: int = 0, done: int = 0) -> Iterator[Batch]:
        """All batches, or those of one of a DataLoader's workers; the same whoever builds them.

        The first `done` of them are left out.
        """
        if not workers:
            for parts in self.parts(Recycler().take, 0, 1, done):
                yield parts.together()
        else:
            handing = Handing()
            for parts in self.parts(handing.take, worker, workers, done):
                yield handing.batch(parts)

    def parts(self, take: Take, worker: int, workers: int, done: int = 0) -> Iterator[Parts]:
        """Batches `worker`, `worker + workers`, … of this pass, in blocks that `take` gives.

        The first `done` of them are left out.
        """
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
            for planned in self.planned(reader, worker, workers, done):
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

    def planned(
        self, reader: Reader, worker: int, workers: int, done: int = 0
    ) -> Iterator[Planned]:
        """This worker's batches but the first `done`, each announced `prefetch` batches ahead."""
        waiting: deque[Planned] = deque()
        numbers = range(worker + done * workers, len(self), workers)
        for planned, spans in self._in_groups(reader, numbers):
            waiting.append(planned)
            for span in spans:
                reader.announce(span)
            if len(waiting) > self.options.prefetch:
                yield waiting.popleft()
        yield from waiting

    def _in_groups(
        self, reader: Reader, numbers: range
    ) -> Iterator[tuple[Planned, Sequence[Span]]]:
        """Batches by number, and what to announce for each; planned many at a time."""
        order = self.order.of_epoch(self.epoch)
        size = self.division.rank_batch
        sorted_ = self.order.buckets is not None  # then a batch costs the least in its turn
        step = 1 if sorted_ else max(1, _PLANNED_AT_ONCE // size)
        ahead = _ReadAhead(reader, self.order)
        for at in range(0, len(numbers), step):
            some = [self.division.positions(self.start, n) for n in numbers[at : at + step]]
            rows = order.rows(np.concatenate([positions for positions, _ in some]))
            spans = ahead.spans(rows, size) if self.options.prefetch else {}
            for place, (positions, valid) in enumerate(some):
                mine = rows[place * size : (place + 1) * size]
                yield Planned(positions, mine, valid), spans.get(place, ())


class _ReadAhead:
    """Has whole chunks announced, each once, since an epoch is done with a chunk before long."""

    def __init__(self, reader: Reader, order: Order) -> None:
        self._reader = reader
        self._order = order
        self._announced = np.zeros(len(order.bounds) - 1, np.bool_)

    def spans(self, rows: Int64s, size: int) -> Mapping[int, Sequence[Span]]:
        """What is to be announced for each batch of `size` of the `rows`, by the batch's place."""
        chunks = self._order.chunks(rows)
        fresh = np.flatnonzero(~self._announced[chunks])
        numbers, first_use = np.unique(chunks[fresh], return_index=True)
        self._announced[numbers] = True
        batches = dict(zip(numbers.tolist(), (fresh[first_use] // size).tolist(), strict=True))
        found: dict[int, list[Span]] = {}
        for number, span in self._spans_of(numbers):
            found.setdefault(batches[number], []).append(span)
        return found

    def _spans_of(self, chunks: Int64s) -> list[tuple[int, Span]]:
        """What a reader of each of `chunks` reads, with the chunk's number."""
        first, end = self._order.bounds[chunks], self._order.bounds[chunks + 1]
        length = end - first
        place = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        return self._reader.spans(np.repeat(first, length) + place, np.repeat(chunks, length))
