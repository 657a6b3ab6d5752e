"""Paths of a store and inside it, and the steps to them: none inside follows a symbolic link.

A store may come from a stranger, or be written by users who don't trust each other. A link in it
would lead out of it, to read, create or delete elsewhere. So each directory is opened from the one
above it, and the last step is done by name in the directory that was opened: what is put in the way
meanwhile changes nothing. The root itself may be reached through links.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from fsmount.errors import FormatError, InvalidNameError, NotAStoreError, StoreError

# Directories on the way need not be readable, where the system has a flag for that.
_STEP = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NO_NAMES = ("", ".", "..")
_IN_THE_WAY = (errno.ELOOP, errno.ENOTDIR, errno.EEXIST)


def store_path(text: str) -> str:
    """The absolute path of the store that a user means by `text`; NotAStoreError if it is none.

    Wherever somebody names a store, the name passes through here.
    """
    if not text:  # an unset variable, not the working directory
        raise NotAStoreError("no store: the path is empty")
    if _URL.match(text):
        raise NotAStoreError(
            f"{text}: a store is a directory, and URLs are not supported; mount the file system "
            "or copy the store, and give its path"
        )
    try:
        return os.path.abspath(text)
    except FileNotFoundError:  # of the working directory
        raise NotAStoreError(
            f"no store {text}: the working directory is gone; give an absolute path"
        ) from None


class StorePath(str):
    """A path inside a store: a text for messages; `root` and the `names` below it for steps."""

    __slots__ = ("names", "root")
    root: str
    names: tuple[str, ...]

    def __new__(cls, root: str, *names: str) -> StorePath:
        """The path of `names`, one component each, below the store at `root`."""
        for name in names:
            if name in _NO_NAMES or "/" in name:
                raise InvalidNameError(f"not a path inside a store: {'/'.join(names)!r}")
        made = super().__new__(cls, "/".join((root, *names)))
        made.root, made.names = root, names
        return made

    def __reduce__(self) -> tuple[type[StorePath], tuple[str, ...]]:
        return StorePath, (self.root, *self.names)

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self.root, *self.names, name)

    @property
    def name(self) -> str:
        """The last component."""
        return self.names[-1]

    @property
    def directory(self) -> StorePath:
        """The directory that it lies in."""
        return StorePath(self.root, *self.names[:-1])


@contextmanager
def directory_of(path: StorePath) -> Iterator[int]:
    """A descriptor of the directory that `path` lies in, for `dir_fd`; OSError.

    StoreError names a symbolic link on the way.
    """
    fd = _descend(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _descend(path: StorePath) -> int:
    fd = os.open(path.root, _STEP)
    for depth, name in enumerate(path.names[:-1], 1):
        try:
            below = os.open(name, _STEP | os.O_NOFOLLOW, dir_fd=fd)
        except OSError as error:
            refuse(StorePath(path.root, *path.names[:depth]), fd, error)
        finally:
            os.close(fd)
        fd = below
    return fd


def refuse(path: StorePath, directory: int, error: OSError) -> NoReturn:
    """Raise StoreError if a link at `path`, in the open `directory`, is to blame; else `error`."""
    if error.errno in _IN_THE_WAY:
        try:
            found = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
        except OSError:
            raise error from None
        if stat.S_ISLNK(found.st_mode):
            raise StoreError(
                f"{path} is a symbolic link, and none inside a store is followed; "
                "put the real directory or file there, or bind-mount it"
            ) from None
    raise error


def open_directory(path: StorePath) -> int:
    """A descriptor of the directory `path` that can be listed and synced; OSError, StoreError."""
    if not path.names:
        return os.open(path.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with directory_of(path) as above:
        try:
            return os.open(path.name, _READ_DIRECTORY, dir_fd=above)
        except OSError as error:
            refuse(path, above, error)


def open_regular(path: StorePath) -> int:
    """Open the regular file `path` to read; FormatError for anything else there, a link too.

    A FIFO or a device does not block. OSError passes; StoreError names a link on the way.
    """
    above = _descend(path)  # not `directory_of`, since a mount's server opens each object here
    try:
        fd = os.open(path.name, _READ_FILE, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):  # a link, socket, device
            raise FormatError(f"{path}: not a regular file") from None
        raise
    finally:
        os.close(above)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(f"{path}: not a regular file")
    return fd


def status(path: StorePath) -> os.stat_result:
    """What `lstat` says of `path`; OSError, StoreError."""
    if not path.names:
        return os.stat(path.root)
    with directory_of(path) as above:
        return os.stat(path.name, dir_fd=above, follow_symlinks=False)


def names_in(path: StorePath) -> list[str]:
    """The names in the directory `path`, in no order; OSError, StoreError."""
    fd = open_directory(path)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)
