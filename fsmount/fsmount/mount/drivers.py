"""Which driver serves a mount."""

from __future__ import annotations

import sys

from fsmount.errors import MountError
from fsmount.mount import places
from fsmount.mount.kernel import device
from fsmount.mount.request import FUSEPY, KERNEL, MountRequest


def choose(request: MountRequest) -> tuple[str, tuple[str, ...]]:
    """The driver for `request`, and notes for the user; MountError if it can't be had.

    What is asked for by name is never replaced by another one.
    """
    if request.driver == FUSEPY:
        _check_fusepy(request)
        return FUSEPY, ()
    reason = device.unavailable()
    if reason is None:
        return KERNEL, ()
    if request.driver == KERNEL:
        raise MountError(reason)
    _check_fusepy(request)
    if not sys.platform.startswith("linux"):
        return FUSEPY, ()
    return FUSEPY, (f"{reason}; fusepy serves, which is slower and does not outlive its server",)


def _check_fusepy(request: MountRequest) -> None:
    if device.passed_descriptor(request.mountpoint) is not None:
        raise MountError(f"{request.mountpoint}: only the kernel driver takes a descriptor")
    if request.xattrs:
        raise MountError("--xattrs needs the kernel driver")
    if places.is_root():
        _check_fixed(request.mountpoint)


def _check_fixed(mountpoint: str) -> None:
    """libfuse takes a path only, so it must name the same directory whatever others do."""
    try:
        part = places.movable(mountpoint)
    except OSError:  # the checks of the mountpoint say more
        return
    if part is not None:
        raise MountError(
            f"another user can move {part} while root mounts on {mountpoint}, and libfuse would "
            "follow: use --driver kernel, or a directory that only root can change"
        )
