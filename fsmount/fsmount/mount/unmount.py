"""Taking a mount off its mountpoint, without ever waiting for a server that hangs."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading

from fsmount.errors import MountError
from fsmount.mount import places
from fsmount.mount.mountinfo import mount_at

SECONDS = 20.0  # that the kernel gets


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
    mount = mount_at(mountpoint)
    if mount is None:
        raise MountError(f"nothing is mounted on {mountpoint}")
    result: list[int] = []
    asking = threading.Thread(
        target=lambda: result.append(places.take_off(mount, detach=lazy)), daemon=True
    )
    asking.start()
    asking.join(SECONDS)
    if not result:
        raise StuckError(f"{mountpoint}: the kernel did not unmount it in {SECONDS:.0f} s")
    if result[0] == errno.EBUSY:
        raise BusyError
    if result[0]:
        raise MountError(f"can't unmount {mountpoint}: {reason(result[0])}")


def reason(code: int) -> str:
    """Why a mount that is there could not be taken off, for people."""
    if code not in {errno.EINVAL, errno.ENOENT, errno.ENOTDIR}:
        return os.strerror(code)
    return (
        "its path does not lead to it: another mount lies on it, or a directory above it was "
        "replaced or mounted over"
    )


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
