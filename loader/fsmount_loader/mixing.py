"""How well an order mixes: its batches beside batches of independent draws.

Every measure is a mean over batches, of each rank or of all ranks together. Which samples are in
them follows from the order alone, so that nothing is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsmount.errors import PlanError
from fsmount_loader.order import (
    DEFAULT_CHUNK_SIZE,
    DEFAULT_WINDOW,
    Int32s,
    Int64s,
    Order,
    cut,
    default_streams,
)

MEASURED_POSITIONS = 1 << 19  # as many batches are measured as have so many positions
TOLERANCE = 1.1  # the most that a ratio may be for options to be suggested

_TRIED_POSITIONS = 1 << 16  # of each set of options that is tried
_BATCH_COSTS = 128  # positions, at least, when batches are counted
_KEYS = 1 << 26  # that a measurement of several batches computes; a position costs `window`
_LEAST_BATCHES = 4
_LEAST_MIXES = 1000  # batches x partitions, at least: with few partitions the variance is noisy
_CHUNK_SIZES = (64, 32, 16)
_WINDOWS = (16, 32, 64, 128)
_TIMES_STREAMS = (1, 2, 4, 8)  # the default

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over batches of one size."""

    partitions: float  # that a batch draws on
    js_distance: float  # between a batch's mix of partitions and the version's; base 2, 0 to 1
    variance: float  # of batch means; a sample's value is its partition's, see `Population`
    column_variance: float | None  # of batch means of a column, scaled to variance 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """An order's batches beside batches of independent draws of the same size."""

    ours: Quality
    independent: Quality

    def ratio(self, name: str) -> float:
        """The measure `name` of `Quality`, divided by that of independent draws.

        1.0 if both are 0, as where there is only one partition.
        """
        ours, independent = getattr(self.ours, name), getattr(self.independent, name)
        return float(ours / independent) if independent else 1.0

    @property
    def worst(self) -> float:
        """The larger one of the ratios of the Jensen-Shannon distance and of the variance."""
        return max(self.ratio("js_distance"), self.ratio("variance"))


@dataclass(frozen=True, slots=True)
class Population:
    """The selected rows that batches are drawn from.

    The variance of batch means is that of a value which all samples of a partition share, the worst
    that a value can do to a shuffled order. It is the expected one, over all ways to give the
    partitions independent values of variance 1: the mean squared distance of a batch's mix from
    the version's. So no single draw of values adds its noise.
    """

    partition: Int32s  # of each selected row, in the manifests' order
    shares: Float64s  # the part of the rows that each partition has, 0 or more
    column: Float64s | None  # of each row; mean 0, variance 1

    @classmethod
    def of(cls, partition: Int32s, column: npt.NDArray[np.generic] | None = None) -> Population:
        """Of the partition of each row, and of numbers or booleans that each has.

        PlanError if those are not finite, or all the same.
        """
        shares = np.bincount(partition) / len(partition)
        return cls(partition, shares, None if column is None else _scaled(column))

    def quality(self, batches: Int64s) -> Quality:
        """The measures of `batches`, the rows of each: int64[batches, batch size]."""
        count, size = batches.shape
        drawn = np.sort(self.partition[batches], axis=1)
        new = np.ones(drawn.shape, np.bool_)
        new[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
        first = np.flatnonzero(new)  # one entry for each partition of each batch, from here on
        batch = first // size
        part = np.diff(first, append=drawn.size) / size
        share = self.shares[drawn.ravel()[first]]
        middle = (part + share) / 2
        # A partition that a batch lacks adds its share to twice the divergence, and its share's
        # square to the squared distance: all of them are added, and those that it has are taken off
        divergence = part * np.log2(part / middle) + share * np.log2(share / middle) - share
        divergences = (np.bincount(batch, divergence, count) + 1) / 2
        distance = np.sum((part - share) ** 2 - share**2) / count + np.sum(self.shares**2)
        return Quality(
            partitions=len(first) / count,
            js_distance=float(np.sqrt(np.maximum(divergences, 0)).mean()),
            variance=max(0.0, float(distance)),
            column_variance=self._column_variance(batches),
        )

    def independent(self, size: int, batches: int) -> Quality:
        """The measures of batches of `size` rows drawn independently, with replacement.

        The Jensen-Shannon distance is that of so many `batches` drawn with a fixed seed; the others
        are their exact expectation.
        """
        rows = np.random.default_rng(0).integers(len(self.partition), size=(batches, size))
        return Quality(
            partitions=float(np.sum(1 - (1 - self.shares) ** size)),
            js_distance=self.quality(rows).js_distance,
            variance=float(1 - np.sum(self.shares**2)) / size,
            column_variance=None if self.column is None else 1 / size,
        )

    def _column_variance(self, batches: Int64s) -> float | None:
        if self.column is None:
            return None
        return float(np.mean(self.column[batches].mean(axis=1) ** 2))


@dataclass(frozen=True, slots=True)
class Shape:
    """The options of ShardDataset that decide how well a shuffled order mixes."""

    streams: int
    window: int
    chunk_size: int

    @property
    def open_rows(self) -> int:
        """Samples in the chunks that are being read at one time, at most but for a few.

        A chunk is in use until the last block that it reaches into is done.
        """
        return self.streams * (self.window + self.chunk_size)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The shape of one chunk_size with the fewest open rows that mixes well, or else the best."""

    shape: Shape
    worst: float  # of its ratios, of each rank and of all together
    suffices: bool


@dataclass(frozen=True, slots=True)
class Mixing:
    """What is to be measured: the batches that `world_size` ranks make of a selection."""

    population: Population
    rows_per_shard: Int64s
    global_batch: int
    world_size: int  # divides `global_batch`
    seed: int
    epoch: int

    def shape(
        self,
        streams: int | None = None,
        window: int = DEFAULT_WINDOW,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
    ) -> Shape:
        """What ShardDataset makes of these options."""
        return Shape(streams or default_streams(self._chunks(chunk_size)), window, chunk_size)

    def order(self, shape: Shape) -> Order:
        """The shuffled order that these options give."""
        bounds = cut(self.rows_per_shard, shape.chunk_size)
        return Order(bounds, self.seed, True, shape.streams, shape.window)

    def batches(self, order: Order, positions: int = MEASURED_POSITIONS) -> Int64s:
        """The rows of whole global batches, in the order of their positions.

        Of an epoch that has many, batches with about as many `positions` are chosen by chance with
        a fixed seed. If it has fewer, the next epochs are taken too.
        """
        whole = len(self.population.partition) // self.global_batch
        if not whole:
            raise PlanError(
                f"{len(self.population.partition)} samples are no whole global batch of "
                f"{self.global_batch}"
            )
        wanted = self._wanted(min(order.window, len(self.population.partition)), positions)
        chosen = np.arange(whole)
        if whole > wanted:
            chosen = np.sort(np.random.default_rng(0).choice(whole, wanted, replace=False))
        at = chosen[:, None] * self.global_batch + np.arange(self.global_batch)
        epochs = range(self.epoch, self.epoch + -(-wanted // len(chosen)))
        rows = [order.of_epoch(epoch).rows(at.ravel()) for epoch in epochs]
        return np.concatenate(rows).reshape(-1, self.global_batch)

    def _wanted(self, window: int, positions: int) -> int:
        wanted = max(
            _LEAST_BATCHES,
            _LEAST_MIXES // int(np.count_nonzero(self.population.shares)),
            positions // max(self.global_batch, _BATCH_COSTS),
        )
        return max(1, min(wanted, _KEYS // window // self.global_batch))

    def of_ranks(self, batches: Int64s, *, interleaved: bool) -> Int64s:
        """The ranks' batches that make up global batches; see `Division`."""
        count, size = len(batches), self.global_batch // self.world_size
        if interleaved:
            batches = batches.reshape(count, size, self.world_size).swapaxes(1, 2)
        return batches.reshape(count * self.world_size, size)

    def compare(
        self, order: Order, positions: int = MEASURED_POSITIONS
    ) -> tuple[Comparison, Comparison]:
        """Each rank's batches, and the global ones; PlanError if there is no whole one."""
        together = self.batches(order, positions)
        ranks = self.of_ranks(together, interleaved=order.shuffle)
        return self._compared(ranks), self._compared(together)

    def _compared(self, batches: Int64s) -> Comparison:
        count, size = batches.shape
        return Comparison(
            self.population.quality(batches), self.population.independent(size, count)
        )

    def suggest(self, tolerance: float = TOLERANCE) -> list[Suggestion]:
        """For each of some chunk sizes, the largest first, the cheapest options of a small grid
        with which no ratio is above `tolerance`.

        It has no fewer streams than the default: batches that follow one another draw on the same
        chunks, which no measure of single batches sees.
        """
        return [self._cheapest(chunk_size, tolerance) for chunk_size in _CHUNK_SIZES]

    def _cheapest(self, chunk_size: int, tolerance: float) -> Suggestion:
        chunks = self._chunks(chunk_size)
        least = default_streams(chunks)
        streams = [least * n for n in _TIMES_STREAMS if n == 1 or 2 * least * n <= chunks]
        shapes = [Shape(n, window, chunk_size) for n in streams for window in _WINDOWS]
        best: Suggestion | None = None
        for shape in sorted(shapes, key=lambda one: one.open_rows):
            worst = max(c.worst for c in self.compare(self.order(shape), _TRIED_POSITIONS))
            if worst <= tolerance:
                return Suggestion(shape, worst, True)
            if best is None or worst < best.worst:
                best = Suggestion(shape, worst, False)
        assert best is not None  # noqa: S101 - there is at least one shape
        return best

    def _chunks(self, chunk_size: int) -> int:
        return len(cut(self.rows_per_shard, chunk_size)) - 1


def _scaled(column: npt.NDArray[np.generic]) -> Float64s:
    """`column` with mean 0 and variance 1."""
    values = column.astype(np.float64)
    largest = np.abs(values).max()
    if not np.isfinite(largest):
        raise PlanError("it has values that are not finite")
    if values.min() == values.max():
        raise PlanError("it is the same in all selected samples")
    values = values / largest  # so that no square overflows
    values -= values.mean()
    scaled: Float64s = values / values.std()
    return scaled
