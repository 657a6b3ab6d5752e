"""Reading objects so that no fault goes unnoticed: what was checked is the descriptor that is read.

A missing object, one of another size, a failing disk: each is an error that names file, object and
cause, and EIO for whoever reads that file. A read is never short.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from fsmount.errors import FsmountError, IntegrityError, ObjectMissingError, StoreError
from fsmount.model import Digest, ObjectRef
from fsmount.store import durable, inside
from fsmount.store.hashed import Hashed
from fsmount.store.objects import Objects

_CHUNK = 1 << 20
_REMEMBERED = 1 << 16  # nodes; what a kernel has cached of others is read again

Identity = tuple[int, int, int, int]  # device, inode, size, modification time: one state of a file


class Verify(StrEnum):
    """What is checked when an object is opened."""

    SIZE = "size"  # that it is there and as long as it should be
    OPEN = "open"  # its digest as well, once for each state of the object's file


@dataclass(slots=True)
class BytesHandle:
    """An open file whose bytes are in memory and known to be right."""

    node: int
    data: bytes
    keep_cache: bool = True

    @property
    def descriptor(self) -> int | None:
        return None

    @property
    def ready(self) -> bool:
        return True

    def read(self, size: int, offset: int) -> bytes:
        return self.data[offset : offset + size]

    def close(self) -> None:
        pass


@dataclass(slots=True)
class ObjectHandle:
    """An open object; `about` is the path it is shown under."""

    node: int
    fd: int
    ref: ObjectRef
    about: str
    keep_cache: bool
    reopen: Callable[[], int] | None = None  # opens and checks it again

    @property
    def descriptor(self) -> int | None:
        return self.fd

    @property
    def ready(self) -> bool:
        return False

    def read(self, size: int, offset: int) -> bytes:
        """Up to the object's end, exactly what was asked for; IntegrityError or StoreError."""
        wanted = max(0, min(size, self.ref.size - offset))
        data = self._pread(wanted, offset)
        while len(data) < wanted:
            more = self._pread(wanted - len(data), offset + len(data))
            if not more:
                raise IntegrityError(
                    f"{self.about}: object {self.ref.digest} ends at byte {offset + len(data)} "
                    f"instead of {self.ref.size}"
                )
            data += more
        return data

    def _replace(self, fresh: int) -> None:
        """Put a fresh descriptor in the place of one that a file server has forgotten."""
        try:
            os.dup2(fresh, self.fd, inheritable=False)
        finally:
            os.close(fresh)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _pread(self, size: int, offset: int) -> bytes:
        try:
            try:
                return os.pread(self.fd, size, offset)
            except OSError as error:
                if error.errno != errno.ESTALE or self.reopen is None:
                    raise
            self._replace(self.reopen())
            return os.pread(self.fd, size, offset)
        except OSError as error:
            raise StoreError(
                f"{self.about}: can't read object {self.ref.digest} at byte {offset}: "
                f"{durable.cause(error)}"
            ) from error


class ObjectReader:
    """Opens the objects of one store. Safe in any thread.

    Each object is checked at least as `verify` says; what is hashed is not hashed again while its
    file is as it was.
    """

    def __init__(self, objects: Objects, verify: Verify = Verify.SIZE) -> None:
        self._objects = objects
        self._verify = verify
        self._hashed: Hashed | None = None  # found when it is first needed
        self._hashing: dict[Digest, threading.Lock] = {}
        self._last_opened: dict[int, Identity] = {}  # the latest at the end
        self._opening = threading.Lock()

    def open(
        self, ref: ObjectRef, about: str, node: int, verify: Verify = Verify.SIZE
    ) -> ObjectHandle:
        """Open and check an object that is shown as `about` at `node`, at least as `verify` says.

        Raises ObjectMissingError, IntegrityError (another size or other bytes) or StoreError.
        """
        verify = self._verify if verify is Verify.SIZE else verify
        fd, identity = self._open_checked(ref, about, verify)
        return ObjectHandle(
            node,
            fd,
            ref,
            about,
            keep_cache=self._is_as_before(node, identity),
            reopen=lambda: self._open_checked(ref, about, verify)[0],
        )

    def _is_as_before(self, node: int, identity: Identity) -> bool:
        """Whether the node's object is the file that it was when it was opened last."""
        with self._opening:
            before = self._last_opened.pop(node, None)
            self._last_opened[node] = identity
            if len(self._last_opened) > _REMEMBERED:
                del self._last_opened[next(iter(self._last_opened))]
        return before == identity

    def _open_checked(self, ref: ObjectRef, about: str, verify: Verify) -> tuple[int, Identity]:
        fd = self._open(ref, about)
        try:
            return fd, self._check(fd, ref, about, verify)
        except BaseException:
            os.close(fd)
            raise

    def _open(self, ref: ObjectRef, about: str) -> int:
        path = self._objects.path(ref.digest)
        try:
            return inside.open_regular(path)
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissingError(f"{about}: object {path} is missing") from None
        except OSError as error:
            raise StoreError(
                f"{about}: can't open object {path}: {durable.cause(error)}"
            ) from error
        except FsmountError as error:
            raise IntegrityError(f"{about}: {error}") from error

    def _check(self, fd: int, ref: ObjectRef, about: str, verify: Verify) -> Identity:
        found = os.fstat(fd)
        if found.st_size != ref.size:
            raise IntegrityError(
                f"{about}: object {self._objects.path(ref.digest)} has {found.st_size} bytes "
                f"instead of {ref.size}"
            )
        if verify is Verify.OPEN:
            if self._hashed is None:
                self._hashed = Hashed.of(self._objects.root)
            with self._hashing.setdefault(ref.digest, threading.Lock()):
                if not self._hashed.knows(ref.digest, found):
                    self._hash(fd, ref, about)
                    self._hashed.note(ref.digest, found)
                self._hashing.pop(ref.digest, None)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _hash(self, fd: int, ref: ObjectRef, about: str) -> None:
        digest = hashlib.sha256()
        handle = ObjectHandle(0, fd, ref, about, keep_cache=False)
        for offset in range(0, ref.size, _CHUNK):
            digest.update(handle.read(_CHUNK, offset))
        if digest.hexdigest() != ref.digest:
            raise IntegrityError(
                f"{about}: object {self._objects.path(ref.digest)} is damaged: "
                f"its bytes have the digest {digest.hexdigest()}"
            )
