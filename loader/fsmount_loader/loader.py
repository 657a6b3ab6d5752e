"""ShardLoader: batches of a ShardDataset, built in this process or in workers, and their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fsmount.errors import FsmountError, LoadError, PlanError
from fsmount_loader.batch import Batch
from fsmount_loader.dataset import ShardDataset
from fsmount_loader.passes import Pass


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
    `set_epoch` is the dataset's. One iteration at a time.
    """

    def __init__(
        self, data: ShardDataset, workers: int = 0, *, start_method: str | None = None
    ) -> None:
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
            raise PlanError(f"workers must be a whole number of at least 0, not {workers!r}")
        self._data = data
        self._workers = workers
        self._start_method = start_method
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
        loader = DataLoader(
            _Share(of),
            batch_size=None,
            num_workers=self._workers,
            collate_fn=_unchanged,
            prefetch_factor=max(1, of.options.prefetch),
            multiprocessing_context=self._start_method,
        )
        died = ""
        try:
            for batch in loader:
                if isinstance(batch, _Failure):
                    raise batch.error
                yield batch
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise  # no worker died, a transform failed
            died = " ".join(str(error).split())
        if died:  # raised only here, so that the error doesn't keep the other workers alive
            raise LoadError(died)


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error on its way from a worker, so that it arrives as it was raised."""

    error: FsmountError


class _Share(IterableDataset[Batch | _Failure]):
    """A worker's share of a pass."""

    def __init__(self, of: Pass) -> None:
        self._of = of

    def __iter__(self) -> Iterator[Batch | _Failure]:
        worker = get_worker_info()
        assert worker is not None  # noqa: S101 - only workers iterate over it
        try:
            yield from self._of.batches(worker.id, worker.num_workers)
        except FsmountError as error:
            yield _Failure(error)


def _unchanged(batch: Any) -> Any:
    return batch
