"""ShardLoader: batches of a ShardDataset, built in this process or in workers, and their state."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsmount.errors import PlanError
from fsmount_loader.batch import Batch
from fsmount_loader.dataset import ShardDataset
from fsmount_loader.epochs import WORKERS_MAX
from fsmount_loader.options import whole
from fsmount_loader.passes import Pass
from fsmount_loader.workers import batches_of_workers

_log = logging.getLogger("fsmount_loader")


@dataclass(slots=True)
class _Consumed:
    """A pass, and how many of its batches the training loop has."""

    of: Pass
    settings: int  # the dataset's, when the pass began
    batches: int = 0


class ShardLoader:
    """Iterates over `data` and knows at every batch where the training loop stands.

    The batches are the same with any number of `workers`; 0 builds them in this process.
    `start_method` is multiprocessing's ("fork", "spawn", "forkserver"; None: the platform's).
    Workers build `prefetch` batches each ahead of use, and no more than `prefetch_bytes` in all.
    `set_epoch` is the dataset's. One iteration at a time.
    """

    def __init__(
        self,
        data: ShardDataset,
        workers: int = 0,
        *,
        start_method: str | None = None,
        prefetch_bytes: int = 1 << 30,
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
        self._warned = False
        self._consumed: _Consumed | None = None

    def __len__(self) -> int:
        """The number of batches that the next iteration yields."""
        return len(self._data)

    def __iter__(self) -> Iterator[Batch]:
        """Begin the next epoch; errors are the dataset's, and a LoadError if a worker dies."""
        consumed = _Consumed(self._data.begin_pass(), self._data.settings)
        self._consumed = consumed
        return self._counted(consumed)

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop stands: after the last batch it was given, not the last read."""
        consumed = self._consumed
        if consumed is None or consumed.settings != self._data.settings:
            return self._data.next_state()
        now = consumed.of
        return self._data.state_at(now.epoch, now.division.after(now.start, consumed.batches))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; as ShardDataset.load_state_dict."""
        self._data.load_state_dict(state)

    def _counted(self, consumed: _Consumed) -> Iterator[Batch]:
        batches = self._from_workers(consumed.of) if self._workers else consumed.of.batches()
        for batch in batches:
            consumed.batches += 1
            yield batch

    def _from_workers(self, of: Pass) -> Iterator[Batch]:
        return batches_of_workers(
            of,
            self._workers,
            start_method=self._start_method,
            most_bytes=self._prefetch_bytes,
            keeps_many=self._warn,
        )

    def _warn(self, kept: int) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%d batches are kept; each has memory that can't be used again yet", kept)
