"""One mount at a time is begun on a mountpoint, so that two never come to lie on each other."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fsmount.errors import MountError
from fsmount.mount import records

SECONDS = 120.0  # that another mount gets to begin
_PAUSE = 0.02  # seconds


@dataclass(slots=True)
class StartLock:
    """The right to mount on a mountpoint: the lock of a file beside the records.

    Where no records can be kept there is no lock either, and `descriptor` is None.
    """

    mountpoint: str
    descriptor: int | None

    def keep_over_exec(self) -> int | None:
        """The descriptor, for the program that this process becomes."""
        if self.descriptor is not None:
            os.set_inheritable(self.descriptor, True)
        return self.descriptor

    def release(self) -> None:
        """Let others mount; also where forked processes hold the descriptor."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            path = _path(self.mountpoint)
            with suppress(OSError):
                if path is not None:
                    os.unlink(path)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


@contextmanager
def starting(mountpoint: str, seconds: float = SECONDS) -> Iterator[StartLock]:
    """Nobody else of this user begins to mount on `mountpoint` meanwhile.

    Raises MountError when somebody else does so for longer than `seconds`.
    """
    lock = StartLock(mountpoint, _take(mountpoint, seconds))
    try:
        yield lock
    finally:
        lock.release()


def _take(mountpoint: str, seconds: float) -> int | None:
    path = _path(mountpoint)
    if path is None:  # the server says so
        return None
    deadline = time.monotonic() + seconds
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        if _is_locked(descriptor, path):
            return descriptor
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise MountError(f"another mount on {mountpoint} has been starting for {seconds:.0f} s")
        time.sleep(_PAUSE)


def _is_locked(descriptor: int, path: str) -> bool:
    """Lock an open file, if it is still the one at `path`: who unlocks it has removed it before."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _path(mountpoint: str) -> str | None:
    return records.path_for(mountpoint, ".lock")
