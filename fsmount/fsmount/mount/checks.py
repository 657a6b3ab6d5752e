"""What must hold before anything is mounted; each failure is a MountError that says what to do."""

from __future__ import annotations

import os
import re

from fsmount.errors import MountError
from fsmount.mount import records
from fsmount.mount.kernel.device import passed_descriptor
from fsmount.mount.mountinfo import FSTYPE, mount_at
from fsmount.mount.unmount import unmount

FUSE_DEVICE = "/dev/fuse"
FUSE_CONF = "/etc/fuse.conf"
_ALLOWS = re.compile(r"^\s*user_allow_other\s*$", re.MULTILINE)


def make_ready(mountpoint: str, store: str) -> tuple[str, ...]:
    """Clear `mountpoint` of dead mounts and check it; notes for the user. Hold its lock meanwhile.

    A mountpoint /dev/fd/N is mounted already, and only whoever did that knows where.
    """
    if passed_descriptor(mountpoint) is not None:
        return ()
    notes: tuple[str, ...] = ()
    if clear_dead_mount(mountpoint):
        notes = (f"cleared a dead mount from {mountpoint}",)
    check_mountpoint(mountpoint)
    check_apart(mountpoint, store)
    return notes


def clear_dead_mount(mountpoint: str) -> bool:
    """Take off the mounts of killed servers from `mountpoint`; whether there was one."""
    cleared = False
    while (mount := mount_at(mountpoint)) is not None and mount.fstype == FSTYPE:
        found = records.describe(mount)
        if not found.dead:
            break
        unmount(mountpoint, lazy=True)
        records.remove(found.record)
        cleared = True
    return cleared


def check_mountpoint(mountpoint: str) -> None:
    """An empty directory that nothing is mounted on."""
    mount = mount_at(mountpoint)
    if mount is not None and mount.fstype == FSTYPE:
        raise MountError(
            f"{mountpoint} has {mount.source} mounted already; "
            f"choose another mountpoint, or unmount it: fsmount umount {mountpoint}"
        )
    if mount is not None:
        raise MountError(
            f"{mountpoint} has {mount.fstype} ({mount.source}) mounted; choose a directory below it"
        )
    try:
        first = next(iter(sorted(os.listdir(mountpoint))), None)
    except FileNotFoundError:
        raise MountError(f"no mountpoint {mountpoint}; make it: mkdir -p {mountpoint}") from None
    except NotADirectoryError:
        raise MountError(f"{mountpoint} is not a directory") from None
    except OSError as error:
        raise MountError(f"can't look into {mountpoint}: {error.strerror}") from error
    if first is not None:
        raise MountError(f"{mountpoint} is not empty ({first!r}); choose an empty directory")


def check_apart(mountpoint: str, store: str) -> None:
    """Neither lies in the other, by whatever path."""
    if _lies_in(mountpoint, store):
        raise MountError(f"mountpoint {mountpoint} is inside the store {store}")
    if _lies_in(store, mountpoint):
        raise MountError(f"the store {store} is inside the mountpoint {mountpoint}")


def check_device() -> None:
    """The kernel has FUSE and lets this process use it."""
    if not os.path.exists(FUSE_DEVICE):
        raise MountError(
            f"no {FUSE_DEVICE}: load the kernel's fuse module (modprobe fuse), or start the "
            "container with --device /dev/fuse --cap-add SYS_ADMIN"
        )
    if not os.access(FUSE_DEVICE, os.R_OK | os.W_OK):
        raise MountError(
            f"{FUSE_DEVICE} is closed to this user; root opens it to all: chmod 666 {FUSE_DEVICE}"
        )


def check_allow_other(conf: str = FUSE_CONF) -> None:
    """Only root may let others in, unless the administrator lets everybody."""
    if os.geteuid() == 0:
        return
    try:
        with open(conf, encoding="utf-8", errors="replace") as file:
            allowed = _ALLOWS.search(file.read()) is not None
    except OSError:
        allowed = False
    if not allowed:
        raise MountError(
            f"--allow-other needs root, or the line user_allow_other in {conf}; "
            "without it only you can look into the mount"
        )


def _lies_in(path: str, directory: str) -> bool:
    """Whether `path` is `directory` or below it; both exist."""
    try:
        wanted = os.stat(directory)
        here = os.path.realpath(path)
        while not os.path.samestat(os.stat(here), wanted):
            above = os.path.dirname(here)
            if above == here:
                return False
            here = above
    except OSError:
        return False
    return True
