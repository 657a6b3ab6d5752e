"""Directories that this user alone can change: only there is what a cache says believed.

What lies in a store's own `cache/` may have been written by anybody who can write the store, or by
a stranger whose store was copied. So whatever a later run takes on trust (remembered builds, lists
of a version's paths, plans of a training) lies below a directory that this module has checked.
"""

from __future__ import annotations

import errno
import os
import pwd
import secrets
import stat
import time
from contextlib import suppress

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_RECENT = 3600.0  # seconds


def cache_directory(*names: str) -> str | None:
    """`fsmount/<names>` in the user's cache, made when missing; None where there is no safe one.

    The cache is `XDG_CACHE_HOME`, else `~/.cache`. A home that belongs to another user, as root has
    it under sudo, is not taken: the home of the password database is.
    """
    base = _cache_home()
    return None if base is None else private_directory(os.path.join(base, "fsmount", *names))


def private_directory(path: str) -> str | None:
    """The real path of the directory `path`, made when missing, if `is_private`; else None."""
    with suppress(OSError):
        _make(path)
    return existing_private_directory(path)


def existing_private_directory(path: str) -> str | None:
    """The real path of the directory `path` if it is there, `is_private` and can be written."""
    if not os.path.isabs(path):
        return None
    try:
        real = os.path.realpath(path, strict=True)
    except OSError:
        return None
    return real if is_private(real) and os.access(real, os.W_OK | os.X_OK) else None


def open_private(path: str) -> int:
    """A descriptor to read the regular file `path` with, which nobody else could have written.

    OSError, EPERM for anything but a file of this user's that neither group nor others may write.
    For files in a private directory: what lies above `path` is not looked at.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(fd)
    ours = found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE
    if not (ours and stat.S_ISREG(found.st_mode)):
        os.close(fd)
        raise PermissionError(errno.EPERM, "not a file that this user alone can write", path)
    return fd


def replace_file(path: str, data: bytes) -> None:
    """Make `path` a file of `data`, for this user alone, in one step; OSError.

    A failure leaves nothing behind.
    """
    staged = f"{path}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(staged, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(staged, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(staged)
        raise


def shrink(directory: str, most: int) -> None:
    """Remove files of a cache, the longest unused first, until they have `most` bytes; never fails.

    What was used within an hour stays: somebody may be about to open it.
    """
    with suppress(OSError):
        found = [(e.stat().st_mtime, e.stat().st_size, e.path) for e in os.scandir(directory)]
        total = sum(size for _, size, _ in found)
        for used, size, path in sorted(found):
            if total <= most or used > time.time() - _RECENT:
                break
            os.unlink(path)
            total -= size


def is_private(path: str) -> bool:
    """Whether only this user and root can change what the real, absolute `path` names.

    The directory must be this user's and not writable by group or others. Each directory above it
    must be this user's or root's, and writable by nobody else unless it is sticky, as /tmp is.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return False
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return own and not found.st_mode & _OTHERS_WRITE and _are_guarded(os.path.dirname(path))


def _make(path: str) -> None:
    """Make `path` and what is missing above it, but only where nobody else has a say: root would
    follow a link of another user. Each is closed to others, whatever the umask.
    """
    if not os.path.isabs(path):
        return
    there, missing = path, []
    while not os.path.lexists(there):
        missing.append(there)
        there = os.path.dirname(there)
    if missing and _are_guarded(os.path.realpath(there)):
        for directory in reversed(missing):
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700)


def _are_guarded(path: str) -> bool:
    """Whether the real, absolute `path` and all directories above it are guarded."""
    uid = os.geteuid()
    parts = [part for part in path.split("/") if part]
    try:
        return all(
            _is_guarded(os.lstat("/" + "/".join(parts[:depth])), uid)
            for depth in range(len(parts) + 1)
        )
    except OSError:
        return False


def _is_guarded(found: os.stat_result, uid: int) -> bool:
    mode = found.st_mode
    shared = mode & _OTHERS_WRITE and not mode & stat.S_ISVTX
    return stat.S_ISDIR(mode) and found.st_uid in (0, uid) and not shared


def _cache_home() -> str | None:
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return named
    home = home_directory()
    return None if home is None else os.path.join(home, ".cache")


def home_directory() -> str | None:
    """The user's home: `HOME` if that is this user's directory, else the password database's."""
    for home in (os.environ.get("HOME"), _registered_home()):
        if home and os.path.isabs(home) and _belongs_to_us(home):
            return home
    return None


def _registered_home() -> str | None:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:  # a user of a container only
        return None


def _belongs_to_us(path: str) -> bool:
    try:
        return os.stat(path).st_uid == os.geteuid()
    except OSError:
        return False
