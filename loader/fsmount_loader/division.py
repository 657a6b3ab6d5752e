"""Who delivers which positions of an epoch: pure arithmetic on batches, ranks and padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsmount_loader.order import Int64s


@dataclass(frozen=True, slots=True)
class Division:
    """How an epoch of `samples` positions is divided into global batches and among ranks.

    Global batch t is the `global_batch` positions from `start + t * global_batch`, where `start` is
    the position at which a run began or resumed.
    """

    samples: int
    global_batch: int
    world_size: int
    rank: int
    interleaved: bool  # a rank takes every world_size-th position, not one run
    drop_last: bool

    @property
    def rank_batch(self) -> int:
        """Samples in each of this rank's batches."""
        return self.global_batch // self.world_size

    def batches(self, start: int) -> int:
        """The number of batches from `start` to the epoch's end, the same on every rank."""
        left = max(0, self.samples - start)
        return left // self.global_batch if self.drop_last else -(-left // self.global_batch)

    def after(self, start: int, batches: int) -> int:
        """The position after `batches` batches from `start`; an epoch's end is `samples`."""
        ended = batches >= self.batches(start)
        return self.samples if ended else start + batches * self.global_batch

    def positions(self, start: int, batch: int) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """This rank's positions in one global batch, and which of them are no padding.

        Padding wraps to the epoch's first positions.
        """
        size, rank = self.rank_batch, self.rank
        mine = np.arange(size, dtype=np.int64)
        mine = mine * self.world_size + rank if self.interleaved else mine + rank * size
        positions = start + batch * self.global_batch + mine
        return positions % self.samples, positions < self.samples

    def pad_fraction(self) -> float:
        """The part of a whole epoch's delivered positions that is padding."""
        padded = self.batches(0) * self.global_batch
        return max(0, padded - self.samples) / padded if padded else 0.0
