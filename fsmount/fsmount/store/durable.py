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
from contextlib import contextmanager, suppress
from typing import BinaryIO

from fsmount.errors import FormatError, StoreError, StoreWriteError
from fsmount.store import inside
from fsmount.store.inside import StorePath, directory_of

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


def create(path: StorePath) -> int:
    """Create `path`, which must not exist, and return a descriptor to write and read it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with changing(path), directory_of(path) as above:
        return os.open(path.name, flags, 0o600, dir_fd=above)  # nobody else's until it is sealed


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


def write_file(path: StorePath, data: bytes) -> None:
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


def link(staged: StorePath, path: StorePath) -> bool:
    """Give the file `staged` the name `path` as well; False if `path` exists already.

    A repeated request on a network file system may answer "exists" for a link that was made: the
    same file under both names counts as made.
    """
    with changing(path), directory_of(staged) as here, directory_of(path) as there:
        try:
            os.link(
                staged.name, path.name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False
            )
        except FileExistsError:
            return os.path.samestat(_status(staged.name, here), _status(path.name, there))
        return True


def _status(name: str, directory: int) -> os.stat_result:
    return os.stat(name, dir_fd=directory, follow_symlinks=False)


def replace(staged: StorePath, path: StorePath) -> None:
    """Rename `staged` to `path` in one step, whatever was there."""
    with changing(path), directory_of(staged) as here, directory_of(path) as there:
        os.replace(staged.name, path.name, src_dir_fd=here, dst_dir_fd=there)


def remove(path: StorePath) -> None:
    """Unlink `path`; it is fine if it is gone."""
    with changing(path), suppress(FileNotFoundError), directory_of(path) as above:
        os.unlink(path.name, dir_fd=above)


def remove_tree(path: StorePath) -> None:
    """Remove the directory `path` and what is in it, as far as that can be done; never raises.

    What stays is part of no version. Anything but a directory is left alone.
    """
    with suppress(OSError, StoreError), directory_of(path) as above:
        if stat.S_ISDIR(_status(path.name, above).st_mode):
            shutil.rmtree(path.name, ignore_errors=True, dir_fd=above)


def make_directory(path: StorePath) -> None:
    """Make the directory `path` unless it is there; its entry is not yet durable."""
    with changing(path), directory_of(path) as above:
        try:
            os.mkdir(path.name, dir_fd=above)
        except FileExistsError as error:
            if not stat.S_ISDIR(_status(path.name, above).st_mode):
                inside.refuse(path, above, error)


@contextmanager
def staging(root: str, name: str | None = None) -> Iterator[StorePath]:
    """A fresh directory for work in progress in the store at `root`, removed on leaving."""
    above = StorePath(root, STAGING)
    make_directory(above)
    path = above / (name or secrets.token_hex(16))
    with changing(path), directory_of(path) as directory:
        os.mkdir(path.name, dir_fd=directory)
    try:
        yield path
    finally:
        remove_tree(path)


def touch(path: StorePath) -> float:
    """Set the times of `path` to the file server's present and return that, in seconds."""
    with changing(path), directory_of(path) as above:
        os.utime(path.name, dir_fd=above, follow_symlinks=False)
        return _status(path.name, above).st_mtime


def touch_new(path: StorePath) -> float:
    """The same, of a file that is made when missing."""
    with _open_writable(path):
        return touch(path)


def sync_directory(path: StorePath) -> None:
    """Make the entries of the directory `path` durable."""
    with changing(path):
        fd = inside.open_directory(path)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def locked(path: StorePath, wait: float = LOCK_WAIT) -> Iterator[None]:
    """Hold the lock file `path`, made when missing; it frees itself when its holder dies.

    Raises StoreWriteError when another process holds it for more than `wait` seconds.
    """
    with _open_writable(path) as fd:
        _lock(fd, path, time.monotonic() + wait)
        yield


@contextmanager
def _open_writable(path: StorePath) -> Iterator[int]:
    """A descriptor of the regular file `path`, which is made when missing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with changing(path), directory_of(path) as above:
        try:
            fd = os.open(path.name, flags, 0o666, dir_fd=above)
        except OSError as error:
            inside.refuse(path, above, error)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StoreWriteError(f"can't write {path}: not a regular file; remove it")
        yield fd
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


def read_small(path: StorePath, limit: int) -> bytes | None:
    """The bytes of the regular file `path`, None where there is none.

    Raises FormatError for more than `limit` bytes and StoreError when it can't be read.
    """
    try:
        with open(inside.open_regular(path), "rb") as file:
            data = read_up_to(file, limit)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"can't read {path}: {cause(error)}") from error
    if data is None:
        raise FormatError(f"{path}: over {limit} bytes")
    return data


def read_up_to(file: BinaryIO, limit: int) -> bytes | None:
    """The bytes of the regular `file`; None if there are more than `limit`. OSError."""
    size = os.fstat(file.fileno()).st_size
    data = file.read(size + 1) if size <= limit else None
    return None if data is None or len(data) > limit else data
