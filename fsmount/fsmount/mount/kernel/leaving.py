"""Taking the mount off in a process of its own, since the kernel may take any time."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass

from fsmount.mount.kernel import device as devices
from fsmount.mount.kernel.config import Config

_SECONDS = 5.0


@dataclass(slots=True)
class Leaving:
    """An attempt to unmount."""

    pid: int
    pidfd: int
    detach: bool
    deadline: float  # by the monotonic clock

    def reap(self) -> int:
        """Wait for it; 0 or an errno."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(status)


def leave(config: Config, device: int, *, detach: bool) -> Leaving:
    """Begin to unmount; `detach`: whoever uses it. `device` is a descriptor of the connection."""
    pid = os.fork()
    if pid == 0:
        code = errno.EIO
        try:
            os.close(device)  # or the connection could not be ended while this waits
            code = devices.unmount(config.mountpoint, detach=detach, number=config.number)
        finally:
            os._exit(code)
    return Leaving(pid, os.pidfd_open(pid), detach, time.monotonic() + _SECONDS)
