"""Getting a descriptor of /dev/fuse that is mounted, and taking the mount off again.

Root mounts by mount(2), others through the setuid helper fusermount3, which hands the descriptor
over a socket. A mountpoint `/dev/fd/N` is a descriptor that somebody else has mounted.
"""

from __future__ import annotations

import array
import ctypes
import errno
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from dataclasses import dataclass

from fsmount.errors import MountError
from fsmount.mount import places
from fsmount.mount.mountinfo import KernelMount, all_mounts, mount_at

FUSE_DEVICE = "/dev/fuse"
SUBTYPE = "fsmount"
_CONNECTIONS = "/sys/fs/fuse/connections"
_HELPERS = ("fusermount3", "fusermount")
_HELPER_SECONDS = 20.0
_PASSED = re.compile(r"/dev/fd/([0-9]+)")
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOATIME = 1, 2, 4, 1024


@dataclass(frozen=True, slots=True)
class MountOptions:
    """What is mounted where, and who may look into it."""

    source: str  # the first column of /proc/mounts
    mountpoint: str  # absolute, or /dev/fd/N
    allow_other: bool
    max_read: int  # bytes of one request


def unavailable() -> str | None:
    """Why this process can't mount with the kernel driver; None if it can."""
    if not sys.platform.startswith("linux"):
        return "the kernel driver needs Linux"
    if os.geteuid() != 0 and _helper() is None:
        return "without root the kernel driver needs fusermount3 (package fuse3)"
    if not os.path.exists(FUSE_DEVICE):
        return f"there is no {FUSE_DEVICE}"
    return None


def abort(number: str) -> bool:
    """End the connection of the mount with the device number "major:minor", whoever uses it.

    What hangs in it gets ENOTCONN. False where the kernel's control files can't be had; then it
    ends when supervisor and server are killed.
    """
    minor = int(number.partition(":")[2])
    try:
        with open(f"{_CONNECTIONS}/{minor}/abort", "w", encoding="ascii") as file:
            file.write("1")
    except OSError:
        return False
    return True


def passed_descriptor(mountpoint: str) -> int | None:
    """The descriptor that `/dev/fd/N` means; None for a path."""
    match = _PASSED.fullmatch(mountpoint)
    return None if match is None else int(match[1])


def open_and_mount(options: MountOptions) -> int:
    """Mount, and return the descriptor to serve; MountError."""
    passed = passed_descriptor(options.mountpoint)
    if passed is not None:
        return _check_passed(passed)
    if os.geteuid() == 0:
        return _mount(options)
    return _mount_by_helper(options)


def unmount(mountpoint: str, *, detach: bool, only: KernelMount | None = None) -> int:
    """Take the mount off; 0, or the errno of why it can't be (EBUSY: it is in use).

    `detach` does so whoever uses it. With `only` it is that mount and no other, also where a
    directory above it was renamed since; EINVAL if it is gone. May wait for a server that hangs.
    """
    mount = mount_at(mountpoint) if only is None else _now(only)
    if mount is None:
        return errno.EINVAL
    if os.geteuid() == 0:
        return places.take_off(mount, detach=detach)
    return _unmount_by_helper(mount.mountpoint, detach=detach)


def raise_read_ahead(mount: KernelMount | None, size: int) -> str | None:
    """Let the kernel read `size` bytes ahead in `mount`; None, or why that can't be set."""
    if mount is None:
        return "it is not in the list of mounts"
    path = f"/sys/class/bdi/{mount.device}/read_ahead_kb"
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(str(size >> 10))
    except OSError as error:
        return f"can't write {path}: {error.strerror}"
    return None


def is_listed(mount: KernelMount | None) -> bool:
    """Whether a mount is still there, as far as this process sees."""
    return mount is not None and _now(mount) is not None


def _now(mount: KernelMount) -> KernelMount | None:
    """The same mount as the kernel lists it now; None if it is gone."""
    same = (mount.number, mount.device)
    return next((one for one in all_mounts() if (one.number, one.device) == same), None)


def _check_passed(fd: int) -> int:
    try:
        found = os.fstat(fd)
    except OSError as error:
        raise MountError(f"/dev/fd/{fd}: {error.strerror}") from error
    if not stat.S_ISCHR(found.st_mode):
        raise MountError(f"/dev/fd/{fd} is no descriptor of {FUSE_DEVICE}")
    os.set_inheritable(fd, False)
    return fd


def _mount(options: MountOptions) -> int:
    try:
        fd = os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MountError(f"can't mount on {options.mountpoint}: {error}") from error
    try:
        with places.opened(options.mountpoint) as directory:
            _mount_on(directory, fd, options)
    except OSError as error:
        os.close(fd)
        raise MountError(
            f"can't mount on {options.mountpoint}: {error.strerror}; it was moved or replaced "
            "meanwhile"
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mount_on(directory: int, fd: int, options: MountOptions) -> None:
    """Mount on the directory that `directory` holds, and only while it has the right path."""
    place = places.path_of(directory)
    if os.listdir(place):
        raise MountError(f"{options.mountpoint} is not empty any more")
    data = f"fd={fd},rootmode={stat.S_IFDIR:o},user_id={os.geteuid()},group_id={os.getegid()}"
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mount(
        os.fsencode(options.source),
        place.encode(),
        f"fuse.{SUBTYPE}".encode(),
        ctypes.c_ulong(_MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOATIME),
        f"{data},{_common(options)}".encode(),
    )
    if failed:
        code = ctypes.get_errno()
        hint = " (a container needs --cap-add SYS_ADMIN)" if code == errno.EPERM else ""
        raise MountError(f"can't mount on {options.mountpoint}: {os.strerror(code)}{hint}")
    mount = places.mounted_on(directory)
    if mount is None or mount.mountpoint != options.mountpoint:
        places.take_off_from(directory)
        raise MountError(
            f"{options.mountpoint} was moved while it was mounted on; it was taken off"
        )


def _common(options: MountOptions) -> str:
    other = ",allow_other" if options.allow_other else ""
    return f"default_permissions,max_read={options.max_read}{other}"


def _mount_by_helper(options: MountOptions) -> int:
    helper = _helper()
    if helper is None:
        raise MountError("mounting without root needs fusermount3: install the package fuse3")
    name = options.source.replace("\\", "\\\\").replace(",", "\\,")
    text = f"ro,nosuid,nodev,noatime,fsname={name},subtype={SUBTYPE},{_common(options)}"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(_HELPER_SECONDS)
        done = subprocess.run(
            [helper, "-o", text, "--", options.mountpoint],
            check=False,
            capture_output=True,
            text=True,
            timeout=_HELPER_SECONDS,
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
        )
        if done.returncode:
            raise MountError(f"can't mount on {options.mountpoint}: {done.stderr.strip()}")
        return _receive_descriptor(ours)


def _receive_descriptor(from_helper: socket.socket) -> int:
    fds = array.array("i")
    _, ancillary, _, _ = from_helper.recvmsg(1, socket.CMSG_SPACE(fds.itemsize))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: fds.itemsize])
            os.set_inheritable(fds[0], False)
            return fds[0]
    raise MountError("fusermount3 mounted, but handed over no descriptor")


def _unmount_by_helper(mountpoint: str, *, detach: bool) -> int:
    helper = _helper()
    if helper is None:
        return errno.ENOENT
    command = [helper, "-u", *(["-z"] if detach else []), "--", mountpoint]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return errno.EBUSY if "busy" in done.stderr else errno.EPERM
    return 0


def _helper() -> str | None:
    return next(filter(None, map(shutil.which, _HELPERS)), None)
