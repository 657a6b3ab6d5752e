"""The most memory that a process and its descendants take."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Self

from fsmount_cli.bench.scratch import children, rss

_PERIOD = 0.05  # seconds


class Peak:
    """Watches a process while it is entered; what lives for less than the period may be missed."""

    def __init__(self) -> None:
        self.rss = 0  # bytes, of all together; what several share counts for each
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def watch(self, pid: int) -> None:
        """Begin, in a thread of its own."""
        self._thread = threading.Thread(target=self._watch, args=(pid,), daemon=True)
        self._thread.start()

    def _watch(self, pid: int) -> None:
        while not self._over.wait(_PERIOD):
            self.rss = max(self.rss, sum(map(rss, _family(pid))))


def _family(pid: int) -> Iterator[int]:
    yield pid
    for child in children(pid):
        yield from _family(child)
