"""Which files of a listing can't change any more without their times telling.

A file's ctime moves whenever it is written, and no program can set it back. But a file system
counts time in steps: a file that is written twice within one step looks the same. So a file that
was listed in the very step of its last change is read again next time (git: "racily clean").
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from fsmount.pack.files import FileStat
from fsmount.pack.source import SourceSample
from fsmount.store import durable
from fsmount.store.inside import StorePath

_SECOND = 1_000_000_000
_FINE_STEP = 20_000_000  # ns; kernels stamp files in steps of at most 10 ms
_COARSE_STEP = 2 * _SECOND  # some file systems keep whole seconds, FAT every other
_SKEW = 60 * _SECOND  # how far our clock may be ahead of a file server's
_NEVER = -1  # ns; no file has this ctime


def file_clock(source: str, staging: StorePath) -> int:
    """A time, in ns, that the clock which stamps the files of `source` has reached by now.

    Where the source lies on the store's file system, a file made in `staging` tells. Elsewhere
    nothing may be written, and it is our clock less a minute. Raises StoreWriteError.
    """
    path = staging / "clock"
    with open(durable.create(path), "rb") as file:
        made = os.fstat(file.fileno())
    durable.remove(path)
    same = os.stat(source).st_dev == made.st_dev
    return made.st_ctime_ns if same else time.time_ns() - _SKEW


def settled(samples: tuple[SourceSample, ...], clock: int) -> tuple[SourceSample, ...]:
    """`samples` as they may be remembered: a file that has not settled by `clock` equals none.

    `clock` is a time of `file_clock` from before the first of them was read.
    """
    return tuple(
        replace(
            item,
            file=_settled(item.file, clock),
            sidecar=None if item.sidecar is None else _settled(item.sidecar, clock),
        )
        for item in samples
    )


def _settled(file: FileStat, clock: int) -> FileStat:
    """`file`, or a stat that no file has. A ctime of the future never settles."""
    step = _FINE_STEP if file.ctime_ns % _SECOND else _COARSE_STEP
    recent = file.ctime_ns > clock - step or abs(file.mtime_ns - clock) < step
    return replace(file, ctime_ns=_NEVER) if recent else file
