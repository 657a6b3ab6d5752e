"""Payloads from shards by offset: coalesced, checked, retried, and announced ahead."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from fsmount.errors import FsmountError, IntegrityError, LoadError
from fsmount_loader.order import Int64s
from fsmount_loader.plan import Plan

_log = logging.getLogger("fsmount_loader")

_RUN_MAX = 16 << 20  # bytes read at once, unless one payload is larger
_FIRST_WAIT = 0.1  # seconds before the first retry; doubled each time
_LONGEST_WAIT = 5.0


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring payloads of one shard that are read at once."""

    shard: int
    start: int
    stop: int
    places: tuple[int, ...]  # in the rows that were asked for


def coalesce(
    shard: npt.NDArray[np.integer], offset: Int64s, size: Int64s, threshold: int
) -> Iterator[Run]:
    """Group payloads into runs, in shard and offset order.

    Payloads up to `threshold` bytes apart are read through, others sought.
    """
    order = np.lexsort((offset, shard))
    starts, ends = offset[order].tolist(), (offset + size)[order].tolist()
    places: list[int] = []
    now = start = stop = 0
    for place, of, here, end in zip(
        order.tolist(), shard[order].tolist(), starts, ends, strict=True
    ):
        near = of == now and here - stop <= threshold and max(stop, end) - start <= _RUN_MAX
        if places and not near:
            yield Run(now, start, stop, tuple(places))
            places = []
        if not places:
            now, start, stop = of, here, here
        places.append(place)
        stop = max(stop, end)
    if places:
        yield Run(now, start, stop, tuple(places))


class ShardFiles:
    """Open shards, least recently used closed first. One process's own; not thread-safe."""

    def __init__(self, paths: Sequence[str], most: int | None = None) -> None:
        self._paths = paths
        self._most = _open_files_limit() if most is None else most
        self._open: OrderedDict[int, int] = OrderedDict()
        self._owner = os.getpid()

    def read(self, shard: int, start: int, buffer: memoryview) -> int:
        """Fill `buffer` from byte `start` of a shard; returns how much there was, or OSError."""
        fd, got = self._fd(shard), 0
        while got < len(buffer):
            more = os.preadv(fd, [buffer[got:]], start + got)
            if not more:
                break
            got += more
        return got

    def announce(self, shard: int, start: int, stop: int) -> None:
        """Tell the kernel that these bytes will be read soon; never fails."""
        self._advise(shard, start, stop, "POSIX_FADV_WILLNEED")

    def forget(self, shard: int, start: int, stop: int) -> None:
        """Have these bytes read from storage next time, through a new descriptor; never fails."""
        self._advise(shard, start, stop, "POSIX_FADV_DONTNEED")
        self.reopen(shard)

    def reopen(self, shard: int) -> None:
        """Close a shard, so that the next read opens it again."""
        fd = self._open.pop(shard, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close all; the object can be used again."""
        for shard in list(self._open):
            self.reopen(shard)

    def _advise(self, shard: int, start: int, stop: int, advice: str) -> None:
        if hasattr(os, "posix_fadvise"):
            try:
                os.posix_fadvise(self._fd(shard), start, stop - start, getattr(os, advice))
            except OSError as error:
                _log.debug("%s: %s: %s", self._paths[shard], advice, error)

    def _fd(self, shard: int) -> int:
        if self._owner != os.getpid():  # a fork: the descriptors are shared, the bookkeeping is not
            self.close()
            self._owner = os.getpid()
        fd = self._open.get(shard)
        if fd is None:
            fd = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC)
            self._open[shard] = fd
        self._open.move_to_end(shard)
        if len(self._open) > self._most:
            os.close(self._open.popitem(last=False)[1])
        return fd


def _open_files_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(16, min(1024, soft // 4))


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
        self._buffer = bytearray()

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
            self._buffer = bytearray(stop - start)
        buffer = memoryview(self._buffer)[: stop - start]
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
