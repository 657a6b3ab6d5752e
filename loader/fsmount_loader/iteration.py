"""What `iter()` of a dataset gives: one process's share of a pass, which can be resumed by itself.

torchdata's StatefulDataLoader asks the iterator of each worker for its state, and gives each the
same back in a new process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from fsmount_loader.epochs import Epochs
from fsmount_loader.passes import Pass
from fsmount_loader.state import Identity, Share

T = TypeVar("T")

# Of a pass, a worker and how many there are (0: none), and what is done already, in batches and in
# samples of the next one: what follows, each with what is done then.
Items = Callable[[Pass, int, int, int, int], Iterator[tuple[T, int, int]]]


class Iteration(Iterator[T]):
    """A share of the pass `begun`: all of it, or that of one of a DataLoader's `workers`."""

    def __init__(
        self,
        items: Items[T],
        begun: Pass,
        worker: int,
        workers: int,
        *,
        identity: Identity,
        epochs: Epochs,
    ) -> None:
        self._items = items
        self._pass = begun
        self._worker = worker
        self._workers = workers
        self._identity = identity
        self._epochs = epochs
        self._batches = self._samples = 0
        self._rest = self._begin()

    def __next__(self) -> T:
        item, self._batches, self._samples = next(self._rest)
        return item

    def state_dict(self) -> dict[str, Any]:
        """How far this share is, as a JSON object; it is no state of the dataset."""
        return self._share().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, in the same worker of as many.

        Raises StateMismatchError naming what differs, the size of global batches and the number of
        workers too. The dataset's next iteration is the epoch after.
        """
        share = Share.load(state, self._share())
        self._epochs.correct(share.epoch, share.started, self._worker, self._workers)
        self._pass = replace(self._pass, epoch=share.epoch, start=share.started)
        self._batches, self._samples = share.done_batches, share.done_samples
        self._rest = self._begin()

    def _begin(self) -> Iterator[tuple[T, int, int]]:
        done = self._batches, self._samples
        return self._items(self._pass, self._worker, self._workers, *done)

    def _share(self) -> Share:
        return Share(
            identity=self._identity,
            epoch=self._pass.epoch,
            started=self._pass.start,
            global_batch_size=self._pass.division.global_batch,
            worker=self._worker,
            workers=self._workers,
            done_batches=self._batches,
            done_samples=self._samples,
        )
