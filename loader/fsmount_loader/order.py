"""Order 1: which selected row stands at which position of an epoch (docs/order.md specifies it).

A pure function of the selected rows, the seed, the epoch and the options that shape it. Selected
rows are numbered 0 … N-1 in the manifests' order. No rank, no worker, no library's generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

ORDER_VERSION = 1
DEFAULT_STREAMS = 960
DEFAULT_CHUNK_SIZE = 16
DEFAULT_WINDOW = 16
DEFAULT_BUCKET_SIZE = 256
DEFAULT_BUCKETS = 16  # in a bucket window
EPOCH_BITS = 62  # that an epoch's number may have

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

CHUNK_WORD = 1  # the third word of a key: what is keyed
ROW_WORD = 2
TRANSFORM_WORD = 3
BUCKET_WORD = 4

_LAST_KEY = np.uint64(0xFFFFFFFFFFFFFFFF)
_KEYS_AT_ONCE = 1 << 20  # bounds the memory of one call


def splitmix64(state: UInt64s) -> UInt64s:
    """SplitMix64's output for each `state` (Steele, Lea and Flood 2014): a bijection of 64 bits."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def keys(seed: int, epoch: int, word: int, index: Int64s) -> UInt64s:
    """The 64-bit sort key of each `index`; different indices of one call have different keys."""
    state = np.zeros(1, np.uint64)
    for part in (seed, epoch, word):
        state = splitmix64(state ^ np.uint64(part))
    return splitmix64(state ^ index.astype(np.uint64))


def cut(rows_per_shard: Int64s, chunk_size: int) -> Int64s:
    """Bounds of the chunks, int64[chunks + 1]: chunk k is the rows from bounds[k] to bounds[k + 1].

    `rows_per_shard` counts the selected rows of each shard, in the manifests' order. A shard of n
    rows has ceil(n / chunk_size) chunks of equal length, but for the first ones, one row longer.
    """
    chunks = -(-rows_per_shard // chunk_size)
    shard = np.repeat(np.arange(len(chunks)), chunks)
    place = np.arange(len(shard)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    lengths = rows_per_shard[shard] // chunks[shard]
    lengths += place < rows_per_shard[shard] % chunks[shard]
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def default_streams(chunks: int) -> int:
    """960, or for small data its largest divisor that leaves two chunks a stream, at least 1."""
    most = min(DEFAULT_STREAMS, chunks // 2)
    return next((n for n in range(most, 0, -1) if DEFAULT_STREAMS % n == 0), 1)


class EpochOrder(Protocol):
    """The order of one epoch. Implementations are immutable and safe to share between threads."""

    def rows(self, positions: Int64s) -> Int64s:
        """The selected row at each of `positions`, which lie in 0 … N-1."""
        ...


@dataclass(frozen=True, slots=True)
class Buckets:
    """How a shuffled order is sorted by length: in windows, which are cut into buckets."""

    lengths: Int32s  # of each selected row; only their order matters
    window: int  # positions; a multiple of `size`
    size: int  # positions that stay together


@dataclass(frozen=True, slots=True)
class Order:
    """The order of every epoch. Immutable, can be pickled."""

    bounds: Int64s  # of the chunks, as `cut` made them
    seed: int
    shuffle: bool
    streams: int
    window: int
    buckets: Buckets | None = None  # of a shuffled order

    def chunks(self, rows: Int64s) -> Int64s:
        """The chunk that each of `rows` lies in, counted in the manifests' order."""
        return np.searchsorted(self.bounds, rows, side="right") - 1

    def of_epoch(self, epoch: int) -> EpochOrder:
        """The order of one epoch; costs a sort of the chunks if it is shuffled."""
        if not self.shuffle:
            return SequentialOrder()
        shuffled = ShuffledOrder.make(
            self.bounds, seed=self.seed, epoch=epoch, streams=self.streams, window=self.window
        )
        return BucketedOrder(shuffled, self.buckets) if self.buckets else shuffled


@dataclass(frozen=True, slots=True)
class SequentialOrder:
    """The manifests' order, the same in every epoch."""

    def rows(self, positions: Int64s) -> Int64s:
        """A position is its row."""
        return positions


@dataclass(frozen=True, slots=True)
class ShuffledOrder:
    """Order 1 of one epoch: chunks permuted, cut into streams, each stream shuffled in blocks."""

    seed: int
    epoch: int
    streams: int
    window: int
    first_rows: Int64s  # of each chunk, in permuted order
    first_places: Int64s  # where each of them starts in the permuted sequence; N at the end

    @classmethod
    def make(
        cls, bounds: Int64s, *, seed: int, epoch: int, streams: int, window: int
    ) -> ShuffledOrder:
        """Permute the chunks that `cut` made; costs a sort of the chunks, not of the rows."""
        chunk_keys = keys(seed, epoch, CHUNK_WORD, np.arange(len(bounds) - 1))
        permuted = np.argsort(chunk_keys, kind="stable")
        places = np.concatenate(([0], np.cumsum(np.diff(bounds)[permuted])))
        return cls(seed, epoch, streams, window, bounds[:-1][permuted], places.astype(np.int64))

    def rows(self, positions: Int64s) -> Int64s:
        """The selected row at each position; costs `window` keys a position."""
        step = max(1, _KEYS_AT_ONCE // self.window)
        if len(positions) <= step:
            return self._rows_at(self._places(positions))
        parts = [positions[at : at + step] for at in range(0, len(positions), step)]
        return np.concatenate([self._rows_at(self._places(part)) for part in parts])

    def _places(self, positions: Int64s) -> Int64s:
        """The place in the permuted sequence that each position has after its block is shuffled."""
        total = int(self.first_places[-1])
        stream, at = positions % self.streams, positions // self.streams
        base, longer = divmod(total, self.streams)
        start = stream * base + np.minimum(stream, longer)
        length = base + (stream < longer)
        # Streams change blocks at different times, so that reading ahead is spread evenly.
        phase = stream * self.window // self.streams
        block = (at + phase) // self.window * self.window - phase
        low, high = np.maximum(block, 0), np.minimum(block + self.window, length)
        places: Int64s = start + low + self._drawn(start + low, high - low, at - low)
        return places

    def _drawn(self, first: Int64s, size: Int64s, wanted: Int64s) -> Int64s:
        """Of each block of `size` places from `first`: which one is sorted to place `wanted`."""
        inside = np.arange(min(self.window, int(size.max(initial=1))), dtype=np.int64)
        block_keys = keys(self.seed, self.epoch, ROW_WORD, first[:, None] + inside)
        block_keys[inside >= size[:, None]] = _LAST_KEY  # what is outside a block goes last
        ranked = np.argsort(block_keys, axis=-1, kind="stable")
        drawn: Int64s = np.take_along_axis(ranked, wanted[:, None], axis=1)[:, 0]
        return drawn

    def _rows_at(self, places: Int64s) -> Int64s:
        chunk = np.searchsorted(self.first_places, places, side="right") - 1
        return self.first_rows[chunk] + (places - self.first_places[chunk])


class BucketedOrder:
    """A shuffled order sorted by length in windows, whose buckets are then permuted."""

    def __init__(self, shuffled: ShuffledOrder, buckets: Buckets) -> None:
        self._shuffled = shuffled
        self._buckets = buckets
        self._latest: tuple[int, Int64s] = (-1, np.zeros(0, np.int64))  # a window and its rows

    def rows(self, positions: Int64s) -> Int64s:
        """The selected row at each position; computes each window that a position lies in."""
        window, place = np.divmod(positions, self._buckets.window)
        rows = np.empty_like(positions)
        for number in np.unique(window).tolist():
            here = window == number
            rows[here] = self._rows_of(number)[place[here]]
        return rows

    def _rows_of(self, window: int) -> Int64s:
        """The rows of a window. The latest one is kept: most batches begin where one ended."""
        number, rows = self._latest
        if number != window:
            rows = self._sorted(window)
            self._latest = window, rows
        return rows

    def _sorted(self, window: int) -> Int64s:
        start, size = window * self._buckets.window, self._buckets.size
        end = min(start + self._buckets.window, len(self._buckets.lengths))
        rows = self._shuffled.rows(np.arange(start, end))
        rows = rows[np.argsort(self._buckets.lengths[rows], kind="stable")]
        whole = len(rows) // size
        bucket = start // size + np.arange(whole)
        drawn = np.argsort(keys(self._shuffled.seed, self._shuffled.epoch, BUCKET_WORD, bucket))
        permuted = rows[: whole * size].reshape(whole, size)[drawn].reshape(-1)
        return np.concatenate((permuted, rows[whole * size :]))
