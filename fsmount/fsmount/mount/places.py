"""Directories that root acts on: what was checked is a descriptor, and that is what is used.

A path that leads through directories of other users may name another place at any moment: who owns
one of them moves it away and puts a link there. So root resolves a path once, by `resolve`, later
walks it without following any link, and mounts on the descriptor that it has found.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from fsmount.errors import MountError
from fsmount.mount.mountinfo import KernelMount, all_mounts

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DETACH, _NOFOLLOW = 2, 8  # MNT_DETACH, UMOUNT_NOFOLLOW of umount(2)
_ALL_USERS = str((1 << 32) - 1)
_LINKS = 40  # in one path, as the kernel has it


def is_root() -> bool:
    """Whether this process has rights that other users could abuse: not as root of a user namespace
    (user_namespaces(7)), to whom most owners look the same.
    """
    if os.geteuid() != 0:
        return False
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() == ["0", "0", _ALL_USERS]
    except OSError:  # a system without user namespaces
        return True


def resolve(path: str) -> str:
    """The absolute `path` without links, whether it exists or not.

    Root follows a link of another user only to what belongs to that user as well: MountError.
    """
    if not is_root():
        return os.path.realpath(path)
    real, links = _follow(path)
    for link, owner in links:
        if not _belongs_to(real, owner):
            raise MountError(
                f"{link} is a link of user {owner} and leads to {real}, which belongs to somebody "
                "else; root does not follow it: give the path without the link"
            )
    return real


@contextmanager
def opened(path: str) -> Iterator[int]:
    """A descriptor (O_PATH) of the directory with the absolute path `path`.

    OSError (ENOTDIR) if any part of the path is a link.
    """
    descriptor = os.open("/", _DIRECTORY)
    try:
        for name in filter(None, path.split("/")):
            above = descriptor
            descriptor = os.open(name, _DIRECTORY, dir_fd=above)
            os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def path_of(descriptor: int) -> str:
    """A path that means the directory behind `descriptor`, whatever becomes of its names."""
    return f"/proc/self/fd/{descriptor}"


def take_off(mount: KernelMount, *, detach: bool) -> int:
    """Unmount `mount` and nothing else, as root; 0, or the errno of why it can't be.

    EBUSY: it is in use, which `detach` does not mind. EINVAL: it is not at its path (any more).
    May wait for a server that hangs.
    """
    above, name = os.path.split(mount.mountpoint)
    try:
        with opened(above) as directory:
            if not name or _mount_id(directory, name) != mount.number:
                return errno.EINVAL
            flags = _NOFOLLOW | (_DETACH if detach else 0)
            return _umount2(f"{path_of(directory)}/{name}", flags)
    except OSError as error:
        return error.errno or errno.EIO


def take_off_from(directory: int) -> None:
    """Detach what was just mounted on the directory behind `directory`, wherever that is now."""
    _umount2(path_of(directory), _DETACH)


def mounted_on(directory: int) -> KernelMount | None:
    """The mount on the directory behind `directory`, which was opened before it was mounted on."""
    below = _descriptor_mount(directory)
    path = os.readlink(path_of(directory))
    found = [one for one in all_mounts() if one.parent == below and one.mountpoint == path]
    return found[-1] if found else None


def _umount2(path: str, flags: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.umount2(os.fsencode(path), flags) else 0


def movable(path: str) -> str | None:
    """The first part of the absolute `path` that another user can move away; None if none can."""
    here = "/"
    for name in filter(None, path.split("/")):
        above, here = os.lstat(here), os.path.join(here, name)
        others_write = above.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        kept = above.st_mode & stat.S_ISVTX and _is_ours(os.lstat(here))
        if not _is_ours(above) or (others_write and not kept):
            return here
    return None


def _is_ours(found: os.stat_result) -> bool:
    return found.st_uid in {0, os.geteuid()}


def _mount_id(directory: int, name: str) -> int:
    """The number of the mount whose root is `name`. Its server is not asked anything."""
    descriptor = os.open(name, _DIRECTORY, dir_fd=directory)
    try:
        return _descriptor_mount(descriptor)
    finally:
        os.close(descriptor)


def _descriptor_mount(descriptor: int) -> int:
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("mnt_id:"))


def _belongs_to(path: str, owner: int) -> bool:
    try:
        return os.lstat(path).st_uid == owner
    except OSError:  # what does not exist belongs to nobody
        return False


def _follow(path: str) -> tuple[str, list[tuple[str, int]]]:
    """`path` without links, and the links on the way that are neither root's nor this user's."""
    real, ahead = "/", list(reversed(path.split("/")))
    links: list[tuple[str, int]] = []
    followed = 0
    while ahead:
        name = ahead.pop()
        if name in {"", "."}:
            continue
        here = os.path.dirname(real) if name == ".." else os.path.join(real, name)
        try:
            found = os.lstat(here)
            target = os.readlink(here) if stat.S_ISLNK(found.st_mode) else None
        except OSError:  # whoever uses it says so
            target = None
        if target is None:
            real = here
            continue
        followed += 1
        if followed > _LINKS:
            raise MountError(f"{path}: {os.strerror(errno.ELOOP)}")
        if not _is_ours(found):
            links.append((here, found.st_uid))
        ahead += reversed(target.split("/"))
        real = "/" if target.startswith("/") else real
    return real, links
