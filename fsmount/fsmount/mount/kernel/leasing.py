"""A lease on what a mount shows, held by the process that the mount lives as long as."""

from __future__ import annotations

import logging
import signal
import threading

from fsmount.errors import MountError, StoreError
from fsmount.model import Digest
from fsmount.mount import threads
from fsmount.store.leases import Lease, Leases

log = logging.getLogger("fsmount.mount")

_RENEWALS = 4  # in a lease's time to live
_kept: list[Leasing] = []


class Leasing:
    """Leases `tables` of the store at `store` for this process; nothing if there are none."""

    def __init__(self, store: str, tables: tuple[str, ...]) -> None:
        self._leases = Leases(store)
        self._tables = tuple(map(Digest, tables))
        self._lease: Lease | None = None
        self._lock = threading.RLock()  # one of `keep`'s thread and who releases
        self._released = False

    def take(self) -> str | None:
        """Take the lease; None, or why the store can't be leased."""
        with self._lock:
            if not self._tables or self._released:
                return None
            try:
                self._lease = self._leases.create("mount", tables=self._tables)
            except StoreError as error:
                return f"the store can't be leased, so gc may collect what is mounted: {error}"
            return None

    @property
    def interval(self) -> float:
        """Seconds in which it must be renewed."""
        return 60.0 if self._lease is None else self._lease.ttl / _RENEWALS

    def renew(self) -> None:
        """Hold it for longer; a new one is taken if it was lost."""
        with self._lock:
            if self._lease is None:
                return
            try:
                self._lease.renew()
            except StoreError as error:
                log.warning("a new lease is taken: %s", error)
                self._lease = None
                self.take()

    def release(self) -> None:
        """Give it back. None is taken afterwards."""
        with self._lock:
            self._released = True
            lease, self._lease = self._lease, None
            if lease is None:
                return
            try:
                lease.release()
            except StoreError as error:
                log.warning("%s", error)

    def keep(self) -> None:
        """Take it, and renew it from a thread of its own until `release_kept`."""
        _kept.append(self)
        try:
            threads.start(self._keep)
        except MountError as error:
            log.warning("the store is not leased, so gc may collect what is mounted: %s", error)

    def _keep(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        reason = self.take()
        if reason is not None:
            log.warning("%s", reason)
        waiting = threading.Event()
        while self._lease is not None and not waiting.wait(self.interval):
            self.renew()


def release_kept() -> None:
    """Give back all that is kept by this process, which ends."""
    for one in _kept:
        one.release()
