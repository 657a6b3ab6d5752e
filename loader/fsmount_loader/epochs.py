"""Which epoch a pass over a dataset is, agreed by all copies of the dataset in worker processes.

A DataLoader never tells the main process's dataset that a pass begins; it only asks the copies in
its workers for an iterator, each once a pass. So each worker counts its own passes in memory that
all share; it alone writes its counter, and no lock is needed. Passes of a loader with another
number of workers lie in the past and are counted by that loader's first worker.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from fsmount.errors import LoadError, PlanError
from fsmount_loader.order import EPOCH_BITS

WORKERS_MAX = 128
_COUNTERS = 1 + WORKERS_MAX * (WORKERS_MAX + 1) // 2
_EPOCH, _START, _FINISHED, _SETTINGS, _FIRST = range(5)


class SharedNumbers:
    """Whole numbers, 0 at first, in memory that a process shares with those that it starts.

    What multiprocessing itself sends (arguments of a spawned process, what goes through its queues)
    shares them too. `pickle` and `copy.deepcopy` make others, with the same values, that are shared
    in their turn.
    """

    def __init__(self, count: int) -> None:
        # share_memory_ would copy in OpenMP's threads, which a fork of a process with some lacks.
        memory = torch.UntypedStorage._new_shared(8 * count)  # type: ignore[no-untyped-call]
        self.values = torch.empty(0, dtype=torch.int64, device="cpu").set_(memory).zero_()

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (self.values.numpy().tobytes(),)


def _copied(values: bytes) -> SharedNumbers:
    copied = SharedNumbers(len(values) // 8)
    copied.values.copy_(torch.frombuffer(bytearray(values), dtype=torch.int64))
    return copied


def _attached(values: torch.Tensor) -> SharedNumbers:
    numbers = SharedNumbers.__new__(SharedNumbers)
    numbers.values = values
    return numbers


# This pickler is multiprocessing's own, and sends a tensor's memory, not its values.
ForkingPickler.register(SharedNumbers, lambda numbers: (_attached, (numbers.values,)))


class Epochs:
    """The epoch and the start of each pass, in SharedNumbers.

    The first pass begins at what was last set; each one after it is the next epoch from its start.
    """

    def __init__(self) -> None:
        self._said = SharedNumbers(5)
        self._counts = SharedNumbers(_COUNTERS)

    @property
    def _set(self) -> torch.Tensor:
        return self._said.values

    @property
    def _begun(self) -> torch.Tensor:
        return self._counts.values

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

    def correct(self, epoch: int, start: int, worker: int = 0, workers: int = 0) -> None:
        """Let the pass that was begun last be `epoch` from `start`.

        Each of its workers says so, before any of them begins another one.
        """
        begun = self._passes(besides=workers) + int(self._begun[_counter(worker, workers)])
        self._set.copy_(_numbers(epoch, start, 0, self.settings + 1, begun - 1))

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
        epoch, start, finished, _, first = self._set.tolist()
        number = max(0, number - first)
        if number == 0 and not finished:
            return epoch, start
        later = epoch + number + finished
        if later >> EPOCH_BITS:
            raise PlanError(f"there is no epoch {later}: the last is 2**{EPOCH_BITS} - 1")
        return later, 0

    def _write(self, epoch: int, start: int, *, finished: bool) -> None:
        self._begun.zero_()
        self._set.copy_(_numbers(epoch, start, int(finished), self.settings + 1, 0))


class Skipped:
    """How many samples were skipped, over all processes, in SharedNumbers."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts = SharedNumbers(WORKERS_MAX)

    def total(self) -> int:
        """Samples skipped so far."""
        return int(self._counts.values.sum())

    def add(self, worker: int, reason: Exception) -> None:
        """Count one more; LoadError if that is one too many."""
        self._counts.values[worker] += 1
        if self.total() > self._most:
            raise LoadError(f"more than max_skipped={self._most} samples; the last: {reason}")


def _numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _counter(worker: int, workers: int) -> int:
    """The place of a worker's counter; number 0 belongs to passes in process."""
    return 1 + workers * (workers - 1) // 2 + worker if workers else 0
