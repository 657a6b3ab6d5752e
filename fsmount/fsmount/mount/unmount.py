"""Taking a mount off its mountpoint, without ever waiting for a server that hangs."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import threading

from fsmount.errors import MountError

SECONDS = 20.0  # that the kernel gets
_DETACH, _NOFOLLOW = 2, 8  # MNT_DETACH, UMOUNT_NOFOLLOW of umount(2)


class BusyError(Exception):
    """Somebody uses the mount."""


class StuckError(MountError):
    """The kernel does not come back from unmounting."""


def unmount(mountpoint: str, *, lazy: bool) -> None:
    """Unmount `mountpoint`; `lazy` detaches it at once, whoever uses it.

    Raises BusyError, StuckError, or MountError with the reason.
    """
    if os.geteuid() == 0:
        _by_kernel(mountpoint, lazy=lazy)
    else:
        _by_helper(mountpoint, lazy=lazy)


def _by_kernel(mountpoint: str, *, lazy: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    result: list[int] = []

    def call() -> None:
        failed = libc.umount2(os.fsencode(mountpoint), _NOFOLLOW | (_DETACH if lazy else 0))
        result.append(ctypes.get_errno() if failed else 0)

    asking = threading.Thread(target=call, daemon=True)
    asking.start()
    asking.join(SECONDS)
    if not result:
        raise StuckError(f"{mountpoint}: the kernel did not unmount it in {SECONDS:.0f} s")
    if result[0] == errno.EBUSY:
        raise BusyError
    if result[0]:
        raise MountError(f"can't unmount {mountpoint}: {os.strerror(result[0])}")


def _by_helper(mountpoint: str, *, lazy: bool) -> None:
    helper = shutil.which("fusermount3") or shutil.which("fusermount")
    if helper is None:
        raise MountError(f"can't unmount {mountpoint}: neither fusermount3 nor fusermount is there")
    command = [helper, "-u", *(["-z"] if lazy else []), "--", mountpoint]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise StuckError(f"{mountpoint}: {helper} did not end in {SECONDS:.0f} s") from None
    if done.returncode:
        if "busy" in done.stderr:
            raise BusyError
        raise MountError(f"can't unmount {mountpoint}: {done.stderr.strip()}")
