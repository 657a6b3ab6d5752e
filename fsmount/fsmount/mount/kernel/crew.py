"""Threads of which one leads: it takes work, and does itself what it took.

Work that may wait is done by the thread that took it, while another one takes over the lead; no
work is handed from thread to thread, which would cost more than doing it. There are few threads
while work gets done soon, and more when it is slow or hangs.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger("fsmount.mount")

T = TypeVar("T")

CALM = 3  # threads while work gets done soon
MOST = 1024
STALL = 0.02  # seconds that work waits before one more thread is started for it
_STACK = 512 << 10  # bytes


class Crew(Generic[T]):
    """Runs `take` in one thread at a time, and `work` on what it returns in that thread.

    Where all threads are at work, what is taken waits, and the leader goes on leading.
    """

    def __init__(
        self, take: Callable[[bool], T | None], work: Callable[[T], None], ended: Callable[[], None]
    ) -> None:
        """`take(waiting)` returns work, or None when there was none; where work is `waiting` it
        returns within STALL. It raises EndOfWork. `work` must not raise; `ended` is called by a
        thread that ends.
        """
        self._take = take
        self._work = work
        self._on_end = ended
        self._lead = threading.Lock()
        self._backlog: deque[tuple[float, T]] = deque()  # since when each waits
        self._busy: set[int] = set()  # threads that are at work
        self._threads = 0  # changed by the leader only
        self._grown = 0.0  # when a thread was last added for work that waited
        self._over = threading.Event()
        self._failure: BaseException | None = None

    def add(self, work: T) -> None:
        """Have `work` done first. To be called before `run`."""
        self._backlog.append((time.monotonic(), work))

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Work until the end; raises what `take` raises but EndOfWork. Signals are handled.

        `started` is called when there is a thread that takes work; RuntimeError if there can be
        none. Where there can't be more later, work waits.
        """
        with self._lead:
            self._start()
        started()
        self._over.wait()
        if self._failure is not None:
            raise self._failure

    def _start(self) -> None:
        before = threading.stack_size(_STACK)
        try:
            threading.Thread(target=self._run, daemon=True).start()
            self._threads += 1
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        me = threading.get_ident()
        try:
            while (work := self._next(me)) is not None:
                self._work(work)
                while (late := self._late()) is not None:
                    self._work(late)
                self._busy.discard(me)
        except EndOfWork:
            self._over.set()
        except BaseException as error:  # noqa: BLE001 - it is raised where `run` was called
            self._failure = error
            self._over.set()
        self._on_end()

    def _next(self, me: int) -> T | None:
        """Lead until there is work for this thread; None if it is one too many."""
        with self._lead:
            if self._threads - len(self._busy) > CALM:
                self._threads -= 1
                return None
            while True:
                self._grow()
                found = self._late() if self._backlog and self._followed() else None
                if found is None:
                    found = self._take(bool(self._backlog))
                if found is not None:
                    if self._followed():
                        self._busy.add(me)
                        return found
                    self._backlog.append((time.monotonic(), found))

    def _try_to_start(self) -> bool:
        try:
            self._start()
        except RuntimeError as error:
            log.error("%d threads are at work, and there can't be more: %s", self._threads, error)
            return False
        return True

    def _late(self) -> T | None:
        """What waits longest; None if nothing does."""
        try:
            return self._backlog.popleft()[1]
        except IndexError:
            return None

    def _followed(self) -> bool:
        """Whether another thread can lead, if there can be one; one is started if there are few."""
        if self._threads - len(self._busy) > 1:
            return True
        if self._threads < CALM:
            return self._try_to_start() or self._threads == 1
        return False

    def _grow(self) -> None:
        """Start a thread if work has waited for too long."""
        try:
            since = self._backlog[0][0]
        except IndexError:
            return
        now = time.monotonic()
        if now - max(since, self._grown) >= STALL and self._threads < MOST:
            self._grown = now
            self._try_to_start()


class EndOfWork(Exception):
    """There will be no more."""
