"""ShardLoader: batches of a ShardDataset, built in this process or in workers, and their state."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from fsmount.errors import PlanError
from fsmount_loader.batch import Batch
from fsmount_loader.dataset import ShardDataset
from fsmount_loader.epochs import WORKERS_MAX
from fsmount_loader.options import whole
from fsmount_loader.passes import Pass
from fsmount_loader.waiting import Clock, Meter, Waiting
from fsmount_loader.workers import batches_of_workers

_log = logging.getLogger("fsmount_loader")


@dataclass(slots=True)
class _Consumed:
    """A pass, and how many of its batches the training loop has."""

    of: Pass
    settings: int  # the dataset's, when the pass began
    meter: Meter


class ShardLoader:
    """Iterates over `data` and knows at every batch where the training loop stands.

    The batches are the same with any number of `workers`; 0 builds them in this process.
    `start_method` is multiprocessing's ("fork", "spawn", "forkserver"; None: the platform's).
    Workers build `prefetch` batches each ahead of use, and no more than `prefetch_bytes` in all.
    `clock` tells the seconds for `waiting`. `set_epoch` is the dataset's. One iteration at a time.
    """

    def __init__(
        self,
        data: ShardDataset,
        workers: int = 0,
        *,
        start_method: str | None = None,
        prefetch_bytes: int = 1 << 30,
        clock: Clock = time.perf_counter,
    ) -> None:
        workers = whole("workers", workers)
        if workers > WORKERS_MAX:
            raise PlanError(f"{workers} workers, but there can be at most {WORKERS_MAX}")
        methods = multiprocessing.get_all_start_methods()
        if start_method not in (None, *methods):
            raise PlanError(f"start_method must be one of {methods}, not {start_method!r}")
        self._data = data
        self._workers = workers
        self._start_method = start_method
        self._prefetch_bytes = whole("prefetch_bytes", prefetch_bytes, 1)
        self._clock = clock
        self._warned = False
        self._consumed: _Consumed | None = None

    def __len__(self) -> int:
        """The number of batches of the next iteration: of the one after that begun last."""
        return len(self._data)

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch; errors are the dataset's, and a LoadError if a worker dies.

        If no batch was taken from the last iteration, it begins again: some frameworks begin one
        only to see whether they can.
        """
        of, settings = self._data.begin_pass(self._unused()), self._data.settings
        consumed = self._consumed = _Consumed(of, settings, Meter(self._clock))
        batches = self._from_workers(of) if self._workers else of.batches()
        return consumed.meter.timed(batches, self._is_bottleneck)

    @property
    def waiting(self) -> Waiting:
        """How long the latest iteration's batches were waited for, and computed with, so far."""
        return Waiting() if self._consumed is None else self._consumed.meter.now()

    @property
    def dataset(self) -> NoReturn:
        """There is none to get at: AttributeError, so that nobody divides or skips it again."""
        raise AttributeError(
            "a ShardLoader is not divided among ranks and not skipped through from outside: "
            "load_state_dict resumes; transformers' Trainer then needs ignore_data_skip=True "
            "(docs/frameworks.md)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop stands: after the last batch it was given, not the last read."""
        consumed = self._consumed
        if consumed is None or consumed.settings != self._data.settings:
            return self._data.next_state()
        now = consumed.of
        position = now.division.after(now.start, consumed.meter.batches)
        return self._data.state_at(now.epoch, position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; as ShardDataset.load_state_dict."""
        self._data.load_state_dict(state)

    def _unused(self) -> Pass | None:
        """The last pass, if it could have been used and was not."""
        last = self._consumed
        if last is None or last.meter.batches or last.settings != self._data.settings:
            return None
        return last.of if len(last.of) else None

    def _from_workers(self, of: Pass) -> Iterator[Batch]:
        return batches_of_workers(
            of,
            self._workers,
            start_method=self._start_method,
            most_bytes=self._prefetch_bytes,
            keeps_many=self._warn,
        )

    def _is_bottleneck(self, stretch: Waiting) -> None:
        assert self._consumed is not None  # noqa: S101 - an iteration calls this
        division = self._consumed.of.division
        _log.warning(
            "rank %d of %d waited for data %.0f%% of the time (%.1f of %.1f s, %d batches): the "
            "loader is the bottleneck; try more than workers=%d while CPU cores are idle, then see "
            '"Is the loader the bottleneck?" in docs/loading.md',
            division.rank,
            division.world_size,
            100 * stretch.fraction,
            stretch.waited,
            stretch.seconds,
            stretch.batches,
            self._workers,
        )

    def _warn(self, kept: int) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%d batches are kept; each has memory that can't be used again yet", kept)
