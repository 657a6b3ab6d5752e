"""Payloads from shards by offset: coalesced, checked, retried, and announced ahead."""

from __future__ import annotations

import logging
import mmap
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from fsmount.errors import FsmountError, IntegrityError, LoadError
from fsmount_loader.order import Int64s
from fsmount_loader.plan import Plan

_log = logging.getLogger("fsmount_loader")

_RUN_MAX = 16 << 20  # bytes read at once, about
_ANNOUNCED_AT_ONCE = 128 << 10  # bytes; Linux ignores what is beyond a device's read-ahead
_FIRST_WAIT = 0.1  # seconds before the first retry; doubled each time
_LONGEST_WAIT = 5.0


class Run(NamedTuple):
    """Neighbouring payloads of one shard that are read at once."""

    shard: int
    start: int
    stop: int
    places: Sequence[int]  # in the rows that were asked for


def coalesce(
    shard: npt.NDArray[np.integer], offset: Int64s, size: Int64s, threshold: int
) -> list[Run]:
    """Group payloads into runs, in shard and offset order.

    Payloads up to `threshold` bytes apart are read through, others sought. A run ends with the
    payload that crosses a multiple of 16 MiB.
    """
    if not len(shard):
        return []
    order = np.lexsort((offset, shard))
    shard, start = shard[order], offset[order]
    stop, piece = start + size[order], start // _RUN_MAX
    near = (shard[1:] == shard[:-1]) & (start[1:] - stop[:-1] <= threshold)
    near &= (piece[1:] == piece[:-1]) & (stop[1:] >= stop[:-1])
    bounds = [0, *(np.flatnonzero(~near) + 1).tolist(), len(order)]
    shards, starts, stops, places = (a.tolist() for a in (shard, start, stop, order))
    return [Run(shards[a], starts[a], stops[b - 1], places[a:b]) for a, b in pairwise(bounds)]


@dataclass(slots=True)
class _OpenShard:
    file: int
    mapping: mmap.mmap | None = None  # only to announce by; nothing is read through it


class ShardFiles:
    """Open shards, least recently used closed first. One process's own; not thread-safe."""

    def __init__(self, paths: Sequence[str], most: int | None = None) -> None:
        self._paths = paths
        self._most = _open_shards_limit() if most is None else most
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._owner = os.getpid()

    def read(self, shard: int, start: int, buffer: memoryview) -> int:
        """Fill `buffer` from byte `start` of a shard; returns how much there was, or OSError."""
        file = self._opened(shard).file
        got = more = os.preadv(file, [buffer], start)
        while more and got < len(buffer):
            more = os.preadv(file, [buffer[got:]], start + got)
            got += more
        return got

    def announce(self, shard: int, start: int, stop: int) -> None:
        """Have the kernel fetch these bytes soon; never fails.

        By advice on a mapping. Advice on the descriptor of a file that a FUSE server passes through
        would fetch the bytes from that server, into a page cache that no read looks at.
        """
        try:
            mapping = self._mapped(shard)
            stop = min(stop, len(mapping))
            for at in range(start - start % mmap.PAGESIZE, stop, _ANNOUNCED_AT_ONCE):
                mapping.madvise(mmap.MADV_WILLNEED, at, min(_ANNOUNCED_AT_ONCE, stop - at))
        except (OSError, ValueError) as error:
            _log.debug("%s: can't be read ahead: %s", self._paths[shard], error)

    def forget(self, shard: int, start: int, stop: int) -> None:
        """Have these bytes read from storage next time where the system can; never fails."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                file = self._opened(shard).file
                os.posix_fadvise(file, start, stop - start, os.POSIX_FADV_DONTNEED)
        self.reopen(shard)

    def reopen(self, shard: int) -> None:
        """Close a shard, so that the next read opens it again."""
        opened = self._open.pop(shard, None)
        if opened is not None:
            _close(opened)

    def close(self) -> None:
        """Close all; the object can be used again."""
        for shard in list(self._open):
            self.reopen(shard)

    def _mapped(self, shard: int) -> mmap.mmap:
        opened = self._opened(shard)
        if opened.mapping is None:
            opened.mapping = mmap.mmap(opened.file, 0, access=mmap.ACCESS_READ)
        return opened.mapping

    def _opened(self, shard: int) -> _OpenShard:
        if self._owner != os.getpid():  # a fork: the descriptors are shared, the bookkeeping is not
            self.close()
            self._owner = os.getpid()
        opened = self._open.get(shard)
        if opened is None:
            opened = _OpenShard(os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC))
            self._open[shard] = opened
        self._open.move_to_end(shard)
        if len(self._open) > self._most:
            _close(self._open.popitem(last=False)[1])
        return opened


def _close(opened: _OpenShard) -> None:
    if opened.mapping is not None:
        opened.mapping.close()
    os.close(opened.file)


def _open_shards_limit() -> int:
    """How many shards may be open: each takes two descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(16, min(1024, soft // 8))


class Reader:
    """Reads the payloads of selected rows, each checked. One process's own; not thread-safe."""

    def __init__(
        self,
        plan: Plan,
        files: ShardFiles,
        *,
        seek_threshold: int,
        retries: int,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._plan = plan
        self._files = files
        self._threshold = seek_threshold
        self._retries = retries
        self._sleep = sleep
        self._buffer = memoryview(bytearray())

    def payloads(self, rows: Int64s) -> Iterator[tuple[int, memoryview | FsmountError]]:
        """For each of `rows`, in storage order: its place in `rows`, and its payload or the error.

        A payload is valid until the next one is asked for. An error is an IntegrityError where the
        bytes are not what the manifest says after they were read twice, a LoadError where they
        can't be read after all retries; both name shard, key and offset.
        """
        r = self._plan.rows
        shard, offset, size = r.shard[rows], r.offset[rows], r.size[rows]
        offsets, sizes, checksums = offset.tolist(), size.tolist(), r.checksum[rows].tolist()
        for run in coalesce(shard, offset, size, self._threshold):
            data = self._attempt(run.shard, run.start, run.stop)
            for place in run.places:
                at = offsets[place] - run.start
                payload = data[at : at + sizes[place]]
                intact = _intact(payload, sizes[place], checksums[place])
                yield place, payload if intact else self._again(int(rows[place]))

    def announce(self, first: int, end: int) -> None:
        """Have the kernel fetch what `payloads` of the rows from `first` to `end` would read."""
        r = self._plan.rows
        shard, offset, size = r.shard[first:end], r.offset[first:end], r.size[first:end]
        gaps = offset[1:] - offset[:-1] - size[:-1]
        if np.all((gaps >= 0) & (gaps <= self._threshold)) and shard[0] == shard[-1]:  # as a rule
            self._files.announce(int(shard[0]), int(offset[0]), int(offset[-1] + size[-1]))
            return
        for run in coalesce(shard, offset, size, self._threshold):
            self._files.announce(run.shard, run.start, run.stop)

    def _attempt(self, shard: int, start: int, stop: int) -> memoryview:
        """What can be read of a run at the first attempt, perhaps nothing."""
        if len(self._buffer) < stop - start:
            self._buffer = memoryview(bytearray(stop - start))
        buffer = self._buffer[: stop - start]
        try:
            return buffer[: self._files.read(shard, start, buffer)]
        except OSError:
            return buffer[:0]

    def _again(self, row: int) -> memoryview | FsmountError:
        """Read one payload alone, twice if it is not right, and after errors up to the retries."""
        r = self._plan.rows
        shard, start = int(r.shard[row]), int(r.offset[row])
        buffer = memoryview(bytearray(int(r.size[row])))
        checksum = int(r.checksum[row])
        for trial in range(2):
            self._files.forget(shard, start, start + len(buffer))
            try:
                got = self._retried(shard, start, buffer)
            except OSError as error:
                return LoadError(f"{self.where(row)}: {error.strerror or error}")
            if _intact(buffer[:got], len(buffer), checksum):
                return buffer
            _log.warning("%s: damaged at attempt %d", self.where(row), trial + 2)
        if got < len(buffer):
            return IntegrityError(f"{self.where(row)}: the shard is truncated")
        return IntegrityError(f"{self.where(row)}: the payload differs from its checksum")

    def _retried(self, shard: int, start: int, buffer: memoryview) -> int:
        wait = _FIRST_WAIT
        for left in range(self._retries, -1, -1):
            try:
                return self._files.read(shard, start, buffer)
            except OSError:
                self._files.reopen(shard)
                if not left:
                    raise
            self._sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        raise AssertionError("unreachable")

    def where(self, row: int) -> str:
        """The shard, sample and offset of a row, for a message."""
        r = self._plan.rows
        return (
            f"{self._plan.shards[int(r.shard[row])]}: sample {self._plan.key(row)!r} "
            f"at offset {int(r.offset[row])}"
        )


def _intact(payload: memoryview, size: int, checksum: int) -> bool:
    return len(payload) == size and xxhash.xxh3_64_intdigest(payload) == checksum
