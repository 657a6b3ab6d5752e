"""Which epoch a pass over a dataset is, agreed by all copies of the dataset in worker processes.

A DataLoader never tells the main process's dataset that a pass begins; it only asks the copies in
its workers for an iterator, each once a pass. So each worker counts its own passes in memory that
all share; it alone writes its counter, and no lock is needed. Passes of a loader with another
number of workers lie in the past and are counted by that loader's first worker.
"""

from __future__ import annotations

import torch

from fsmount.errors import LoadError, PlanError
from fsmount_loader.order import EPOCH_BITS

WORKERS_MAX = 128
_COUNTERS = 1 + WORKERS_MAX * (WORKERS_MAX + 1) // 2
_EPOCH, _START, _FINISHED, _SETTINGS = range(4)


class Epochs:
    """The epoch and the start of each pass. Shared with forked and spawned processes.

    The first pass begins at what was last set; each one after it is the next epoch from its start.
    """

    def __init__(self) -> None:
        self._set = _shared_zeros(4)
        self._begun = _shared_zeros(_COUNTERS)

    @property
    def settings(self) -> int:
        """How often an epoch or a position was set."""
        return int(self._set[_SETTINGS])

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be `epoch`, from its start or from the position just loaded in it."""
        if epoch == self._set[_EPOCH] and not self._passes():
            self._write(epoch, int(self._set[_START]), finished=False)
        else:
            self._write(epoch, 0, finished=False)

    def set_position(self, epoch: int, position: int, *, finished: bool) -> None:
        """Let the next pass go on at `position`, or be the next epoch if this one is `finished`."""
        self._write(epoch, position, finished=finished)

    def begin(self, worker: int = 0, workers: int = 0) -> tuple[int, int]:
        """Begin a pass in one of `workers` processes (0: in process); its epoch and start."""
        if workers > WORKERS_MAX:
            raise PlanError(f"{workers} workers, but at most {WORKERS_MAX} can agree on an epoch")
        mine = _counter(worker, workers)
        # Never a look at the counters of this pass's other workers: they may be changing just now.
        earlier = self._passes(besides=workers) + int(self._begun[mine])
        self._begun[mine] += 1
        return self._pass(earlier)

    def next(self) -> tuple[int, int]:
        """The epoch and the start of the pass that begins next."""
        return self._pass(self._passes())

    def latest(self) -> tuple[int, int]:
        """The epoch and the start of the pass that began last, or of the first."""
        return self._pass(max(0, self._passes() - 1))

    def _passes(self, besides: int | None = None) -> int:
        """Passes begun, without those of loaders with `besides` workers."""
        firsts = [_counter(0, n) for n in range(WORKERS_MAX + 1) if n != besides]
        return int(self._begun[firsts].sum())

    def _pass(self, number: int) -> tuple[int, int]:
        epoch, start, finished = self._set[:3].tolist()
        if number == 0 and not finished:
            return epoch, start
        later = epoch + number + finished
        if later >> EPOCH_BITS:
            raise PlanError(f"there is no epoch {later}: the last is 2**{EPOCH_BITS} - 1")
        return later, 0

    def _write(self, epoch: int, start: int, *, finished: bool) -> None:
        self._begun.zero_()
        settings = self.settings + 1
        self._set.copy_(torch.tensor([epoch, start, int(finished), settings]))


class Skipped:
    """How many samples were skipped, over all processes. Shared as Epochs is."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts = _shared_zeros(WORKERS_MAX)

    def total(self) -> int:
        """Samples skipped so far."""
        return int(self._counts.sum())

    def add(self, worker: int, reason: Exception) -> None:
        """Count one more; LoadError if that is one too many."""
        self._counts[worker] += 1
        if self.total() > self._most:
            raise LoadError(f"more than max_skipped={self._most} samples; the last: {reason}")


def _shared_zeros(count: int) -> torch.Tensor:
    # share_memory_ would copy in OpenMP's threads, which a fork of a process that has some lacks.
    shared = torch.UntypedStorage._new_shared(8 * count)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.int64).set_(shared).zero_()


def _counter(worker: int, workers: int) -> int:
    """The place of a worker's counter; number 0 belongs to passes in process."""
    return 1 + workers * (workers - 1) // 2 + worker if workers else 0
