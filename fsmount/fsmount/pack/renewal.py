"""Keeping a pack's lease while it works."""

from __future__ import annotations

import time

from fsmount.store import Lease


class Renewal:
    """Renews a lease when a quarter of its time has passed; to be called now and then."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._renewed = time.monotonic()

    def __call__(self) -> None:
        """Renew the lease if it is time; StoreError if it was collected, StoreWriteError."""
        if time.monotonic() - self._renewed > self._lease.ttl / 4:
            self._lease.renew()
            self._renewed = time.monotonic()
