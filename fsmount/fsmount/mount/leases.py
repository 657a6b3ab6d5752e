"""Keeps what is mounted from being collected, for as long as the server runs."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable

from fsmount.errors import StoreError
from fsmount.model import Digest
from fsmount.mount import threads
from fsmount.store import Lease, Store

log = logging.getLogger("fsmount.mount")

_RENEWALS = 4  # in a lease's time to live


class LeaseKeeper:
    """Holds leases on tables and renews them from a thread of its own; a context manager.

    A store that can't be written can't be leased: `warn` is told once, and that is all.
    """

    def __init__(self, store: Store, warn: Callable[[str], None]) -> None:
        self._store = store
        self._warn = warn
        self._leases: dict[tuple[Digest, ...], Lease] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None
        self._warned = False

    def hold(self, tables: Iterable[Digest]) -> None:
        """Lease `tables` until the end."""
        wanted = tuple(tables)
        with self._lock:
            if wanted not in self._leases:
                self._take(wanted)

    def __enter__(self) -> LeaseKeeper:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._renewing is not None:
            self._renewing.join()
        for lease in self._leases.values():
            try:
                lease.release()
            except StoreError as failure:
                log.warning("%s", failure)

    def _take(self, tables: tuple[Digest, ...]) -> None:
        try:
            lease = self._store.lease("mount", tables=tables)
        except StoreError as error:
            if not self._warned:
                self._warned = True
                self._warn(f"the store can't be leased, so gc may collect what is mounted: {error}")
            return
        self._leases[tables] = lease
        if self._renewing is None:
            self._renewing = threads.start(self._renew, lease.ttl)

    def _renew(self, ttl: int) -> None:
        # Signals are for the main thread, which waits in libfuse.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._ended.wait(ttl / _RENEWALS):
            with self._lock:
                for tables, lease in list(self._leases.items()):
                    try:
                        lease.renew()
                    except StoreError as error:
                        log.warning("a new lease is taken: %s", error)
                        del self._leases[tables]
                        self._take(tables)
