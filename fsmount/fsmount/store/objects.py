"""Objects: immutable bytes named by their SHA-256.

An object gets its name only after its bytes were fsynced, read back and found to have that digest,
and an existing object is never overwritten. A damaged one is found when the same bytes are written
again: it is kept in `quarantine/` and the good bytes take its name in one step.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from types import TracebackType

from fsmount.errors import (
    FormatError,
    IntegrityError,
    ObjectMissingError,
    StoreError,
    StoreWriteError,
)
from fsmount.model import Digest, ObjectRef
from fsmount.store import durable, inside
from fsmount.store.hashed import Hashed
from fsmount.store.inside import StorePath

OBJECTS = "objects"
QUARANTINE = "quarantine"
READ_LIMIT = 1 << 30  # bytes of a table, manifest or key-set: what is read as a whole
_BUFFER = 1 << 20
_NAME = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of the store at `root`. Holds only that path: picklable, safe in any thread."""

    root: str

    def path(self, digest: Digest) -> StorePath:
        """Where the object lies, whether it is there or not."""
        return StorePath(self.root, OBJECTS, digest[:2], digest)

    def has(self, ref: ObjectRef) -> bool:
        """Whether the object is there and has its size; StoreError when that can't be told."""
        try:
            self.check(ref)
        except (ObjectMissingError, FormatError):
            return False
        return True

    def check(self, ref: ObjectRef) -> None:
        """Raise ObjectMissingError if it is not there, IntegrityError if it isn't `ref.size` long.

        The bytes are not read: see `verify`.
        """
        try:
            found = inside.status(self.path(ref.digest))
        except OSError as error:
            raise self._unreadable(ref.digest, error) from error
        self._check_stat(ref, found)

    def verify(self, ref: ObjectRef) -> None:
        """Hash the whole object; raises as `check`, and IntegrityError for other bytes."""
        fd = self.open(ref)
        try:
            with open(fd, "rb", buffering=0) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise self._unreadable(ref.digest, error) from error
        self._check_digest(ref, digest)

    def prove(self, ref: ObjectRef, hashed: Hashed) -> None:
        """The same, unless its file is as it was when it was last hashed; raises as `verify`."""
        with open(self.open(ref), "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            if hashed.knows(ref.digest, before):
                return
            try:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise self._unreadable(ref.digest, error) from error
            self._check_digest(ref, digest)
            hashed.note(ref.digest, before)

    def is_sound(self, ref: ObjectRef, hashed: Hashed) -> bool:
        """Whether `prove` finds nothing wrong; StoreError when that can't be told."""
        try:
            self.prove(ref, hashed)
        except (ObjectMissingError, FormatError):
            return False
        return True

    def read(self, ref: ObjectRef) -> bytes:
        """The whole object, verified; raises as `verify`, and FormatError beyond READ_LIMIT."""
        if ref.size > READ_LIMIT:
            path = self.path(ref.digest)
            raise FormatError(
                f"object {path} has {ref.size} bytes; no more than {READ_LIMIT} are read at once"
            )
        fd = self.open(ref)
        try:
            with open(fd, "rb") as file:
                data = durable.read_up_to(file, ref.size) or b""
        except OSError as error:
            raise self._unreadable(ref.digest, error) from error
        self._check_digest(ref, hashlib.sha256(data).hexdigest())
        return data

    def begins_with(self, ref: ObjectRef, magic: bytes) -> bool:
        """Whether the object's first bytes are `magic`, not verified; raises as `check`."""
        fd = self.open(ref)
        try:
            return os.pread(fd, len(magic), 0) == magic
        except OSError as error:
            raise self._unreadable(ref.digest, error) from error
        finally:
            os.close(fd)

    def put(self, data: bytes, staging: StorePath) -> ObjectRef:
        """Store `data` as an object, staged in the directory `staging`; StoreWriteError.

        What `read` would refuse is not written.
        """
        if len(data) > READ_LIMIT:
            raise StoreWriteError(
                f"an object of {len(data)} bytes, more than the {READ_LIMIT} that are read at "
                "once; choose a rule that makes smaller partitions"
            )
        with self.writer(staging) as writer:
            writer.write(data)
            return writer.commit()

    def writer(self, staging: StorePath) -> ObjectWriter:
        """Begin an object of unknown length, staged in the directory `staging`; StoreWriteError."""
        return ObjectWriter(self, staging)

    def matching(self, prefix: str) -> tuple[Digest, ...]:
        """The digests of all objects that begin with `prefix` (2 digits or more), sorted."""
        directory = StorePath(self.root, OBJECTS, prefix[:2])
        try:
            names = inside.names_in(directory)
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except OSError as error:
            raise StoreError(f"can't read {directory}: {durable.cause(error)}") from error
        return tuple(
            Digest(n) for n in sorted(names) if n.startswith(prefix) and _NAME.fullmatch(n)
        )

    def size(self, digest: Digest) -> int:
        """The size in bytes of what lies under `digest`; raises as `check`."""
        try:
            return inside.status(self.path(digest)).st_size
        except OSError as error:
            raise self._unreadable(digest, error) from error

    def sync(self, digests: set[Digest]) -> None:
        """Make the names of `digests` durable, whoever wrote them."""
        for directory in sorted({self.path(digest).directory for digest in digests}):
            durable.sync_directory(directory)
        durable.sync_directory(StorePath(self.root, OBJECTS))

    def adopt(self, staged: StorePath, ref: ObjectRef) -> None:
        """Give the fsynced and verified file `staged` its name `ref`, durably.

        An object of that name is kept if its bytes are good. A damaged one moves to quarantine.
        """
        path = self.path(ref.digest)
        durable.make_directory(path.directory)
        while not durable.link(staged, path):
            try:
                self.verify(ref)
            except ObjectMissingError:  # collected since: try again
                continue
            except (FormatError, StoreError) as error:
                if not _means_damage(error):
                    raise
                self._quarantine(ref.digest)
                durable.replace(staged, path)
            break
        self.sync({ref.digest})

    def _quarantine(self, digest: Digest) -> None:
        """Keep the damaged file under a second name, so that its own name never goes missing."""
        directory = StorePath(self.root, QUARANTINE)
        durable.make_directory(directory)
        durable.link(self.path(digest), directory / f"{digest}.{secrets.token_hex(8)}")
        durable.sync_directory(directory)

    def open(self, ref: ObjectRef) -> int:
        """A descriptor to read the object with; raises as `check`."""
        try:
            fd = inside.open_regular(self.path(ref.digest))
        except OSError as error:
            raise self._unreadable(ref.digest, error) from error
        try:
            self._check_stat(ref, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_stat(self, ref: ObjectRef, found: os.stat_result) -> None:
        if stat.S_ISREG(found.st_mode) and found.st_size == ref.size:
            return
        path = self.path(ref.digest)
        if not stat.S_ISREG(found.st_mode):
            raise IntegrityError(f"object {path} is not a regular file")
        raise IntegrityError(f"object {path} has {found.st_size} bytes instead of {ref.size}")

    def _check_digest(self, ref: ObjectRef, digest: str) -> None:
        if digest != ref.digest:
            path = self.path(ref.digest)
            raise IntegrityError(f"object {path} is damaged: its bytes have the digest {digest}")

    def _unreadable(self, digest: Digest, error: OSError) -> StoreError:
        path = self.path(digest)
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return ObjectMissingError(f"object {path} is missing")
        return StoreError(f"can't read object {path}: {durable.cause(error)}")


def _means_damage(error: FormatError | StoreError) -> bool:
    """Whether the object itself is bad, and not just out of reach (no rights, a stale handle)."""
    reason = error.__cause__
    return not isinstance(reason, OSError) or reason.errno == errno.EIO


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in an object that is being written."""

    size: int  # bytes before it
    hash: hashlib._Hash  # of these


class ObjectWriter:
    """Writes one object; a context manager. Leaving it without `commit` leaves nothing behind.

    `path` is the staged file. Its bytes are all there only after `flush`. Every method raises
    StoreWriteError when the store can't be written. Not safe for two threads.
    """

    def __init__(self, objects: Objects, staging: StorePath) -> None:
        self.path = staging / secrets.token_hex(16)
        self._objects = objects
        self._hash = hashlib.sha256()
        self._size = 0
        self._pending = bytearray()
        self._fd = durable.create(self.path)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._size += len(view)
        if len(self._pending) + len(view) < _BUFFER:
            self._pending += view
        else:
            self.flush()
            durable.write_all(self._fd, view, self.path)

    def tell(self) -> int:
        """The number of bytes written so far."""
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        """The `size` bytes at `offset` of what was written."""
        self.flush()
        with durable.changing(self.path):
            return os.pread(self._fd, size, offset)

    def mark(self) -> Mark:
        """What has been written so far, for `rewind`."""
        return Mark(self._size, self._hash.copy())

    def rewind(self, mark: Mark) -> None:
        """Forget what was written since `mark`."""
        self.flush()
        with durable.changing(self.path):
            os.ftruncate(self._fd, mark.size)
            os.lseek(self._fd, mark.size, os.SEEK_SET)
        self._size, self._hash = mark.size, mark.hash.copy()

    def flush(self) -> None:
        """Hand all bytes to the file, so that whoever opens `path` sees them."""
        durable.write_all(self._fd, self._pending, self.path)
        self._pending = bytearray()

    def commit(self) -> ObjectRef:
        """Make the bytes an object, durably, and return its reference.

        The staged file is fsynced and read back first: IntegrityError if the disk gives other
        bytes than were written.
        """
        self.flush()
        durable.seal(self._fd, self.path)
        ref = ObjectRef(Digest(self._hash.hexdigest()), self._size)
        written = os.fstat(self._fd).st_mtime_ns
        self._read_back(ref)
        self._objects.adopt(self.path, ref)
        durable.remove(self.path)
        found = os.fstat(self._fd)  # its change time is the removal's
        if (found.st_size, found.st_mtime_ns) == (ref.size, written):
            Hashed.of(self._objects.root).note(ref.digest, found)
        self._close()
        return ref

    def _read_back(self, ref: ObjectRef) -> None:
        if hasattr(os, "posix_fadvise"):  # else the cached pages are compared, not the disk's
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(self._fd, 0, os.SEEK_SET)
        with durable.changing(self.path), open(self._fd, "rb", buffering=0, closefd=False) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != ref.digest:
            raise IntegrityError(
                f"{self.path} reads back with the digest {digest}, not {ref.digest}"
            )

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            durable.remove(self.path)

    def __enter__(self) -> ObjectWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
