"""Listings that the kernel keeps for ever unless it is told to drop them.

Where no OPENDIR is sent, the kernel keeps every listing. Those of directories that grow are dropped
a moment after they were listed, whether a name has appeared or not: so nothing needs to be watched,
and where nobody lists such a directory nothing happens at all.

Why none is missed: a listing is used by others once the kernel has got the answer that ends it. It
asks for that when it has kept all that came before, and the question is noted here; so what is
dropped later is the whole of it. Only two who list a directory at the same time can make a listing
of the older beginning of one and the end of the other, if both are held up inside the kernel until
the listing has been dropped. It is dropped twice, so they would have to be for all of KEPT.

Why nothing hangs: the kernel drops a page when it has its lock. Who lists holds that while names
are copied from the page to a program's memory, not while it waits for a listing. If that memory is
a mapped file, the copying may need answers; so listings are dropped by a thread of its own, which
holds nothing that an answer needs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from queue import Empty, SimpleQueue

from fsmount.errors import FsmountError
from fsmount.mount import threads
from fsmount.vfs.filesystem import MOMENT

KEPT = 0.25  # seconds that the listing of a growing directory may be kept


class Listings:
    """Has the listings of growing directories dropped. Safe in any thread."""

    def __init__(self, drop: Callable[[int], None]) -> None:
        """`drop` has the kernel drop the listing of a node, if it has one; it may wait."""
        self._drop = drop
        self._noted: SimpleQueue[int] = SimpleQueue()

    def begin(self) -> None:
        """Drop from now on what is noted."""
        threads.start(self._run)

    def note(self, node: int) -> None:
        """A part of the growing directory `node` is about to be told to the kernel."""
        self._noted.put(node)

    def note_all(self, growing: Callable[[], Collection[int]]) -> None:
        """Note what `growing` gives, as soon as the store lets it: another server has died, and
        nobody knows what it had noted.
        """
        threads.start(self._note_all, growing)

    def _note_all(self, growing: Callable[[], Collection[int]]) -> None:
        _leave_signals()
        while True:
            with suppress(FsmountError, OSError):
                for node in growing():
                    self.note(node)
                return
            time.sleep(MOMENT)

    def _run(self) -> None:
        _leave_signals()
        again: set[int] = set()
        while True:
            listed = set() if again else {self._noted.get()}
            time.sleep(KEPT)
            listed |= self._drain()
            for node in listed | again:
                self._drop(node)
            again = listed

    def _drain(self) -> set[int]:
        found = set()
        with suppress(Empty):
            while True:
                found.add(self._noted.get_nowait())
        return found


def _leave_signals() -> None:
    """To the main thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
