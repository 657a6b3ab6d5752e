"""Proving what a pack takes over unread, so that no damage is published again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from fsmount.errors import FormatError, IntegrityError, ObjectMissingError
from fsmount.model import ObjectRef, Partition
from fsmount.pack.renewal import Renewal
from fsmount.store import Store
from fsmount.store.hashed import Hashed

_log = logging.getLogger(__name__)
_LONG = 10.0  # seconds


class Proof:
    """Hashes objects of one store, unless their files are as they were when they were last hashed.

    That may take long where this host has not seen the store before, so the lease is renewed.
    """

    def __init__(self, store: Store, renew: Renewal) -> None:
        self._objects = store.objects
        self._hashed = Hashed.of(store.path)
        self._renew = renew
        self._begun = time.monotonic()
        self._told = False

    def is_sound(self, partition: Partition) -> bool:
        """Whether all objects of `partition` are there and whole; StoreError."""
        return all(map(self._is_sound, partition.objects()))

    def check_kept(self, partitions: Iterable[Partition]) -> None:
        """Raise IntegrityError if an object of `partitions`, whose source is gone, is damaged."""
        for partition in partitions:
            for ref in partition.objects():
                try:
                    self._prove(ref)
                except (ObjectMissingError, FormatError) as error:
                    raise IntegrityError(
                        f"partition {partition.id!r} is kept from the base, since the source does "
                        f"not have it, but {error}; nothing is published: put its samples back "
                        "into the source, restore the object, or drop the partition with --sync"
                    ) from error

    def _is_sound(self, ref: ObjectRef) -> bool:
        self._take_time()
        return self._objects.is_sound(ref, self._hashed)

    def _prove(self, ref: ObjectRef) -> None:
        self._take_time()
        self._objects.prove(ref, self._hashed)

    def _take_time(self) -> None:
        self._renew()
        if time.monotonic() - self._begun > _LONG and not self._told:
            self._told = True
            _log.warning("hashing what is reused of the store, once on this host: it may take long")
