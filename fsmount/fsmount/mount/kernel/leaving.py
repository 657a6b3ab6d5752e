"""Taking the mount off, in a process of its own, since the kernel may take any time."""

from __future__ import annotations

import errno
import logging
import os
import select
import time
from dataclasses import dataclass

from fsmount.mount.kernel import device as devices
from fsmount.mount.kernel.config import Config
from fsmount.mount.unmount import reason

log = logging.getLogger("fsmount.mount")

_SECONDS = 5.0  # that the kernel gets


@dataclass(slots=True)
class _Attempt:
    pid: int
    pidfd: int
    detach: bool
    deadline: float  # by the monotonic clock

    def reap(self) -> int:
        """Wait for it; 0 or an errno."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(status)


class Leaving:
    """How a mount is taken off its mountpoint. Where that can't be, its connection is to be ended:
    the methods that return a bool say so.
    """

    def __init__(self, config: Config, device: int) -> None:
        """`device` is a descriptor of the connection."""
        self._config = config
        self._device = device
        self._attempt: _Attempt | None = None
        self._asked = False

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when `see` is to be called."""
        return [] if self._attempt is None else [self._attempt.pidfd]

    def ask(self, wishes: int) -> bool:
        """Somebody wants an end. Who uses the mount may go on until a second wish, also where it
        can't be taken off: it may be gone here, and be there in a container.
        """
        passed = devices.passed_descriptor(self._config.mountpoint) is not None
        if passed or wishes > 1 or self._asked:
            return True
        self._asked = True
        self._attempt = self._begin(detach=False)
        return False

    def see(self) -> bool:
        """See to an attempt, which may have ended, or take too long."""
        attempt, mountpoint = self._attempt, self._config.mountpoint
        if attempt is None:
            return False
        if not select.select([attempt.pidfd], [], [], 0)[0]:
            if time.monotonic() <= attempt.deadline:
                return False
            log.error("%s: the kernel does not unmount it", mountpoint)
            return True
        code, self._attempt = attempt.reap(), None
        if code == errno.EBUSY and not attempt.detach:
            log.warning("%s is in use: detached, served until it is not", mountpoint)
            self._attempt = self._begin(detach=True)
        elif code:
            say_why(self._config, code)
        return False

    def detach(self) -> None:
        """Take it off now, whoever uses it."""
        self._begin(detach=True).reap()

    def finish(self) -> None:
        """Wait for an attempt. The connection has ended, so that it ends as well."""
        if self._attempt is not None:
            self._attempt.reap()

    def _begin(self, *, detach: bool) -> _Attempt:
        config = self._config
        pid = os.fork()
        if pid == 0:
            code = errno.EIO
            try:
                os.close(self._device)  # or the connection could not be ended while this waits
                code = devices.unmount(config.mountpoint, detach=detach, only=config.mounted)
            finally:
                os._exit(code)
        return _Attempt(pid, os.pidfd_open(pid), detach, time.monotonic() + _SECONDS)


def say_why(config: Config, code: int) -> None:
    """Say why a mount was not taken off, and what the next wish does."""
    if devices.is_listed(config.mounted):
        log.error(
            "can't unmount %s: %s; asked again, it is ended as it is",
            config.mountpoint,
            reason(code),
        )
    else:
        log.warning(
            "%s is not mounted here any more: served where it still is; asked again, it is ended "
            "there too",
            config.mountpoint,
        )
