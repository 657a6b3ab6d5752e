"""Waiting until a pack can trust the times of files that were just written."""

from __future__ import annotations

import time
from pathlib import Path

_STEP = 30_000_000  # ns; more than a step of any kernel's clock


def settle(source: Path) -> None:
    """Wait, some milliseconds, until the clock of the files below `source` has passed all of them.

    What was written in the very step of a listing is read again by the next pack.
    """
    newest = max((path.lstat().st_ctime_ns for path in source.rglob("*")), default=0)
    probe = source.with_name(".settled")
    while not probe.exists() or probe.stat().st_ctime_ns <= newest + _STEP:
        time.sleep(0.002)
        probe.write_bytes(b"")
    probe.unlink()
