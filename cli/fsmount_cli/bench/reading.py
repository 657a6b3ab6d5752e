"""How fast shards are read through each contestant, and what that leaves in the page cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fsmount_cli.bench import pages
from fsmount_cli.bench.scratch import BenchError, UnavailableError, wait_for
from fsmount_cli.bench.served import (
    COPIED,
    FUSEPY,
    LOOPBACK,
    OBJECT,
    PASSTHROUGH,
    Served,
    Shard,
    Target,
    paths_of,
)

REQUEST = 1 << 20  # bytes of one read
RATIOS = (
    (PASSTHROUGH, OBJECT),
    (COPIED, OBJECT),
    (COPIED, LOOPBACK),
    (FUSEPY, LOOPBACK),
    (PASSTHROUGH, FUSEPY),
)
_LEFT = 0.01  # of a file's bytes that may stay in the cache when it is dropped
_DROP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Reader:
    """A contestant: where its shards are, and the mount that shows them unless they are objects."""

    name: str
    paths: list[str]
    served: Served | None


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often something is measured; no round but the first begins after `deadline`."""

    count: int
    deadline: float  # by the monotonic clock

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            if number and time.monotonic() > self.deadline:
                return
            yield number


def readers_of(target: Target, mounts: Sequence[Served]) -> list[Reader]:
    """The objects themselves, then each mount."""
    return [
        Reader(served.name if served else OBJECT, paths_of(target, served), served)
        for served in (None, *mounts)
    ]


def warm(target: Target, readers: Sequence[Reader], rounds: Rounds) -> dict[str, Any]:
    """Rates with the objects in the page cache; a mount's own pages are dropped before each run,
    so that each byte comes from the object.
    """
    _read(target, readers[0].paths)

    def prepare(reader: Reader) -> None:
        _drop_own(reader)

    return _rates(target, readers, rounds, prepare)


def cold(
    target: Target, readers: Sequence[Reader], rounds: Rounds, *, everything: bool
) -> dict[str, Any]:
    """Rates with nothing in the page cache: neither objects nor, if `everything`, anything else.

    UnavailableError where objects can't be dropped, as on tmpfs.
    """

    def prepare(reader: Reader) -> None:
        _drop_own(reader)
        _drop_objects(target)
        if everything:
            pages.drop_all()

    return _rates(target, readers, rounds, prepare)


def page_cache(target: Target, readers: Sequence[Reader]) -> dict[str, float]:
    """By contestant: page cache that one read takes, of object and mounted file, ÷ bytes read.

    UnavailableError where the kernel can't tell.
    """
    return {reader.name: _pages_of_a_read(target, reader) / target.size for reader in readers}


def by_passthrough(target: Target, reader: Reader) -> bool:
    """Whether the kernel reads the objects by itself: mounted files have no pages of their own."""
    buffer = bytearray(REQUEST)
    for path, shard in zip(reader.paths, target.shards, strict=True):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            _read_from(descriptor, buffer, min(REQUEST, shard.read))
            if pages.cached(descriptor, shard.read) != 0:
                return False
        finally:
            os.close(descriptor)
    return True


def ratios(runs: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The medians of one round's rates, one contestant's ÷ another's."""
    return {
        f"{one} / {other}": median(a / b for a, b in zip(runs[one], runs[other], strict=True))
        for one, other in RATIOS
        if one in runs and other in runs
    }


def _rates(
    target: Target, readers: Sequence[Reader], rounds: Rounds, prepare: Callable[[Reader], None]
) -> dict[str, Any]:
    """MB/s of each contestant, in turn; each round begins with another one."""
    runs: dict[str, list[float]] = {reader.name: [] for reader in readers}
    for number in rounds:
        first = number % len(readers)
        for reader in (*readers[first:], *readers[:first]):
            prepare(reader)
            runs[reader.name].append(_read(target, reader.paths))
    return {
        "mb_per_second": {name: median(rates) for name, rates in runs.items()},
        "ratios": ratios(runs),
        "runs": runs,
    }


def _read(target: Target, paths: Sequence[str]) -> float:
    """Read the shards at `paths` and return MB/s."""
    buffer = bytearray(REQUEST)
    begin = time.perf_counter()
    for path, shard in zip(paths, target.shards, strict=True):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            _read_from(descriptor, buffer, shard.read)
        finally:
            os.close(descriptor)
    return target.size / 1e6 / (time.perf_counter() - begin)


def _read_from(descriptor: int, buffer: bytearray, size: int) -> None:
    left, into = size, [buffer]
    while left > 0:
        done = os.readv(descriptor, into)
        if not done:
            raise BenchError(f"a shard ended {left} bytes too early")
        left -= done


def _pages_of_a_read(target: Target, reader: Reader) -> int:
    _drop_own(reader)
    _drop_objects(target)
    total = 0
    for path, shard in zip(reader.paths, target.shards, strict=True):
        opened = [os.open(path, os.O_RDONLY)]
        try:
            if reader.served is not None:
                opened.append(os.open(shard.object, os.O_RDONLY))
            _read_from(opened[0], bytearray(REQUEST), shard.read)
            total += sum(_cached(descriptor, shard.read) for descriptor in opened)
        finally:
            for descriptor in opened:
                os.close(descriptor)
    return total


def _cached(descriptor: int, size: int) -> int:
    found = pages.cached(descriptor, size)
    if found is None:
        raise UnavailableError("the kernel does not tell what is cached: that needs Linux 6.5")
    return found


def _drop_own(reader: Reader) -> None:
    if reader.served is not None:
        for path in reader.paths:
            pages.drop(path)


def _drop_objects(target: Target) -> None:
    for shard in target.shards:
        descriptor = os.open(shard.object, os.O_RDONLY)
        try:
            wait_for(lambda: _dropped(descriptor, shard), _DROP_SECONDS, "")  # noqa: B023 - at once
        except BenchError:
            raise UnavailableError(
                f"{shard.object} stays in the page cache: on tmpfs, or in use"
            ) from None
        finally:
            os.close(descriptor)


def _dropped(descriptor: int, shard: Shard) -> bool:
    """Whether a shard could be dropped; what the kernel is still reading ahead can't at once."""
    pages.drop(shard.object)
    return (pages.cached(descriptor, shard.read) or 0) <= _LEFT * shard.read
