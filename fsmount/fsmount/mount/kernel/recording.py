"""The record of a mount, kept by the process that the mount lives as long as."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

from fsmount.errors import MountError
from fsmount.mount import records
from fsmount.mount.kernel.config import Config
from fsmount.mount.kernel.device import passed_descriptor
from fsmount.mount.kernel.negotiate import Features
from fsmount.mount.mountinfo import mount_at
from fsmount.mount.records import Record
from fsmount.mount.request import KERNEL
from fsmount.store.owner import Owner

log = logging.getLogger("fsmount.mount")


class Recording:
    """The record of the mount of `config`, whose supervisor is this process.

    There is none for a descriptor that somebody else mounted, nobody knows where.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._record: Record | None = None

    def begin(self, features: Features) -> str | None:
        """It is mounted; None, or why no record can be kept."""
        config = self._config
        mount = mount_at(config.mountpoint)
        if mount is None or passed_descriptor(config.mountpoint) is not None:
            return None
        record = Record(
            mountpoint=config.mountpoint,
            store=config.store,
            ref=config.ref,
            tag=config.tag,
            table=next(iter(config.tables), None),
            driver=KERNEL,
            since=records.now(),
            server=None,
            log=config.log,
            device=mount.device,
            supervisor=Owner.current(),
            features=tuple(features.names()),
        )
        try:
            records.write(record)
        except MountError as error:
            return str(error)
        self._record = record
        return None

    def served_by(self, pid: int) -> None:
        """Another server has begun."""
        if self._record is None:
            return
        try:
            if records.read(self._record.mountpoint) != self._record:  # detached, another is there
                self._record = None
                return
            record = replace(self._record, server=Owner.of(pid))
            records.write(record)
            self._record = record
        except MountError as error:
            log.warning("%s", error)

    def end(self) -> None:
        """The mount is over."""
        if self._record is not None:
            with suppress(OSError, MountError):
                records.remove(self._record)


def forget(mountpoint: str) -> None:
    """Remove the record of a mount that this process has served to the end, alone."""
    with suppress(OSError, MountError):
        record = records.read(mountpoint)
        if record is not None and record.server == Owner.current():
            records.remove(record)
