"""The few file operations that everything in a store rests on.

A file is written whole under a staged name, fsynced, and only then linked to its own name; a name
counts as there once its directory is fsynced. Whatever goes wrong while a store is changed becomes
a StoreWriteError of one line that names the file and the cause.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fsmount.errors import FormatError, StoreError, StoreWriteError

STAGING = "staging"
READ_ONLY = 0o444
LOCK_WAIT = 60.0  # seconds; what is done under a lock takes milliseconds
_LOCK_POLL = 0.02


@contextmanager
def changing(path: str) -> Iterator[None]:
    """Turn an OSError of the block into a StoreWriteError that names `path`."""
    try:
        yield
    except OSError as error:
        raise StoreWriteError(f"can't write {path}: {cause(error)}") from error


def cause(error: OSError) -> str:
    """What the system says about `error`, without the path."""
    return error.strerror or str(error)


def create(path: str) -> int:
    """Create `path`, which must not exist, and return a descriptor to write and read it."""
    with changing(path):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write_all(fd: int, data: bytes | bytearray | memoryview, path: str) -> None:
    """Write all of `data` to `fd`; `path` is for the error."""
    view = memoryview(data)
    with changing(path):
        while view:
            view = view[os.write(fd, view) :]


def seal(fd: int, path: str) -> None:
    """Make the file behind `fd` read-only and its bytes durable."""
    with changing(path):
        os.fchmod(fd, READ_ONLY)
        os.fsync(fd)


def write_file(path: str, data: bytes) -> None:
    """Create `path` with `data` in it, read-only and fsynced; remove it again if that fails."""
    fd = create(path)
    try:
        write_all(fd, data, path)
        seal(fd, path)
    except BaseException:
        remove(path)
        raise
    finally:
        os.close(fd)


def link(staged: str, path: str) -> bool:
    """Give the file `staged` the name `path` as well; False if `path` exists already.

    A repeated request on a network file system may answer "exists" for a link that was made: the
    same file under both names counts as made.
    """
    with changing(path):
        try:
            os.link(staged, path)
        except FileExistsError:
            return os.path.samestat(os.lstat(staged), os.lstat(path))
        return True


def replace(staged: str, path: str) -> None:
    """Rename `staged` to `path` in one step, whatever was there."""
    with changing(path):
        os.replace(staged, path)


def remove(path: str) -> None:
    """Unlink `path`; it is fine if it is gone."""
    with changing(path):
        try:
            os.unlink(path)
        except FileNotFoundError:
            return


def make_directory(path: str) -> None:
    """Make the directory `path` unless it is there; its entry is not yet durable."""
    with changing(path):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise


@contextmanager
def staging(root: str, name: str | None = None) -> Iterator[str]:
    """A fresh directory for work in progress in the store at `root`, removed on leaving."""
    make_directory(f"{root}/{STAGING}")
    path = f"{root}/{STAGING}/{name or secrets.token_hex(16)}"
    with changing(path):
        os.mkdir(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # what stays is part of no version


def touch(path: str) -> float:
    """Set the times of `path` to the file server's present and return that, in seconds."""
    with changing(path):
        os.utime(path)
        return os.stat(path).st_mtime


def sync_directory(path: str) -> None:
    """Make the entries of the directory `path` durable."""
    with changing(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def locked(path: str, wait: float = LOCK_WAIT) -> Iterator[None]:
    """Hold the lock file `path`, made when missing; it frees itself when its holder dies.

    Raises StoreWriteError when another process holds it for more than `wait` seconds.
    """
    with changing(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(fd, path, time.monotonic() + wait)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, path: str, deadline: float) -> None:
    with changing(path):
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_LOCK_POLL)


def open_regular(path: str) -> int:
    """Open the regular file `path` for reading; anything else there (a link too) is a FormatError.

    A store may come from anywhere: a symbolic link would lead out of it, a FIFO would block.
    OSError passes.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise FormatError(f"{path}: not a regular file")
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):  # it changed in between
        os.close(fd)
        raise FormatError(f"{path}: not a regular file")
    return fd


def read_small(path: str, limit: int) -> bytes | None:
    """The bytes of the regular file `path`, None where there is none.

    Raises FormatError for more than `limit` bytes and StoreError when it can't be read.
    """
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            data = file.readall()[: limit + 1] if os.fstat(file.fileno()).st_size <= limit else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"can't read {path}: {cause(error)}") from error
    if data is None or len(data) > limit:
        raise FormatError(f"{path}: over {limit} bytes")
    return data
