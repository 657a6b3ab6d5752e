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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest as _checksum

from fsmount.errors import FsmountError, IntegrityError, LoadError
from fsmount_loader.order import Int64s
from fsmount_loader.plan import Plan

_log = logging.getLogger("fsmount_loader")

_RUN_MAX = 16 << 20  # bytes read at once, about
_GROUP = 512 << 10  # bytes of payloads that are read before they are decoded, unless one has more
_ANNOUNCED_AT_ONCE = 128 << 10  # bytes; Linux ignores what is beyond a device's read-ahead
_FIRST_WAIT = 0.1  # seconds before the first retry; doubled each time
_LONGEST_WAIT = 5.0


Payload = tuple[int, memoryview | FsmountError]  # a place in the rows asked for, and what it is


class Span(NamedTuple):
    """Bytes of a shard."""

    shard: int
    start: int
    stop: int


# Neighbouring payloads of a shard that are read at once: the shard, the bytes from start to stop,
# and their places in the rows that were asked for.
Run = tuple[int, int, int, Sequence[int]]


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
    first = np.concatenate(([0], np.flatnonzero(~near) + 1))
    last = np.append(first[1:], len(order)) - 1
    places = order.tolist()
    bounds = (shard[first], start[first], stop[last], first, last + 1)
    runs = zip(*(values.tolist() for values in bounds), strict=True)
    return [(number, begin, end, places[i:j]) for number, begin, end, i, j in runs]


@dataclass(slots=True)
class _OpenShard:
    file: int
    mapping: mmap.mmap | None = None  # only to announce by; nothing is read through it


class ShardFiles:
    """Open shards, least recently used closed first. Not thread-safe; a fork has its own copy."""

    def __init__(self, paths: Sequence[str], most: int | None = None) -> None:
        self._paths = paths
        self._most = _open_shards_limit() if most is None else most
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()

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
        self._lost: set[int] = set()  # shards that couldn't be read after all retries

    def payloads(self, rows: Int64s) -> Iterator[Sequence[Payload]]:
        """Each of `rows`, in storage order: its place in `rows`, and its payload or the error.

        They come in groups of half a megabyte, which a processor keeps at hand. A group is valid
        until the next one is asked for. An error is an IntegrityError where the bytes are not what
        the manifest says after they were read twice, a LoadError where they can't be read after all
        retries, which are made once for each shard as long as it can't be; both name shard, key and
        offset.
        """
        r = self._plan.rows
        shard, offset, size = r.shard[rows], r.offset[rows], r.size[rows]
        offsets, sizes, checksums = offset.tolist(), size.tolist(), r.checksum[rows].tolist()
        group: list[Payload] = []
        used = 0  # bytes of the buffer
        for number, start, stop, places in coalesce(shard, offset, size, self._threshold):
            if group and used + stop - start > _GROUP:
                yield group
                group, used = [], 0
            data = self._attempt(number, start, stop, used)
            used += len(data)
            for place in places:
                at = offsets[place] - start
                payload = data[at : at + sizes[place]]
                intact = len(payload) == sizes[place] and _checksum(payload) == checksums[place]
                group.append((place, payload if intact else self._again(int(rows[place]))))
        yield group

    def spans(self, rows: Int64s, chunk: Int64s) -> list[tuple[int, Span]]:
        """What `payloads` would read of the `rows` of each chunk alone, with the chunk's number."""
        r = self._plan.rows
        shard = r.shard[rows]
        return [
            (number, Span(int(shard[places[0]]), start, stop))
            for number, start, stop, places in coalesce(
                chunk, r.offset[rows], r.size[rows], self._threshold
            )
        ]

    def announce(self, span: Span) -> None:
        """Have the kernel fetch these bytes soon; never fails."""
        self._files.announce(*span)

    def _attempt(self, shard: int, start: int, stop: int, used: int) -> memoryview:
        """What can be read of these bytes at the first attempt, perhaps nothing.

        It lies in the buffer behind what is `used`.
        """
        end = used + stop - start
        if len(self._buffer) < end:
            self._buffer = memoryview(bytearray(max(end, _GROUP)))
        buffer = self._buffer[used:end]
        try:
            got = self._files.read(shard, start, buffer)
        except OSError:
            return buffer[:0]
        if self._lost:
            self._lost.discard(shard)
        return buffer if got == len(buffer) else buffer[:got]

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
            if got == len(buffer) and _checksum(buffer) == checksum:
                return buffer
            _log.warning("%s: damaged at attempt %d", self.where(row), trial + 2)
        if got < len(buffer):
            return IntegrityError(f"{self.where(row)}: the shard is truncated")
        return IntegrityError(f"{self.where(row)}: the payload differs from its checksum")

    def _retried(self, shard: int, start: int, buffer: memoryview) -> int:
        wait = _FIRST_WAIT
        for left in range(0 if shard in self._lost else self._retries, -1, -1):
            try:
                got = self._files.read(shard, start, buffer)
            except OSError:
                self._files.reopen(shard)
                if not left:
                    self._lost.add(shard)
                    raise
            else:
                self._lost.discard(shard)
                return got
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
