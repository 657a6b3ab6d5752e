"""Which objects were hashed and found right, and in which state of their file.

An object whose file is still in that state need not be hashed again, by a pack that reuses it or by
a mount that checks it. That is believed, so it lies where only its user can write: files of fixed
records, one for each store and first two digits, appended to. They may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from struct import Struct

from fsmount.model import Digest
from fsmount.private import cache_directory, open_private, shrink

_RECORD = Struct("=32sQQqq")  # digest; inode, size, modification and change time
_FILE_MAX = 1 << 20  # bytes; a longer file loses its older half
_ALL_MAX = 256 << 20  # bytes of all files


@dataclass(frozen=True, slots=True)
class Hashed:
    """What is remembered of one store; picklable, safe in any thread. Get one by `of`."""

    prefix: str | None  # of the files; None where nothing can be kept beyond this process
    _here: set[bytes] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, store: str) -> Hashed:
        """What this user remembers of the objects in the store at `store`."""
        directory = cache_directory("hashed")
        if directory is None:
            return cls(None)
        name = hashlib.sha256(os.fsencode(os.path.realpath(store))).hexdigest()[:32]
        return cls(f"{directory}/{name}")

    def knows(self, digest: Digest, found: os.stat_result) -> bool:
        """Whether the object's bytes were right when its file was as `found`."""
        record = _record(digest, found)
        if record not in self._here and record in self._read(digest):
            self._here.add(record)
        return record in self._here

    def note(self, digest: Digest, found: os.stat_result) -> None:
        """Remember that they were, of the very file that was hashed; never fails."""
        record = _record(digest, found)
        self._here.add(record)
        if self.prefix is not None:
            with suppress(OSError):
                self._append(digest, record)

    def _path(self, digest: Digest) -> str:
        return f"{self.prefix}-{digest[:2]}"

    def _read(self, digest: Digest) -> bytes:
        if self.prefix is None:
            return b""
        try:
            with open(open_private(self._path(digest)), "rb") as file:
                return file.read(2 * _FILE_MAX)
        except OSError:
            return b""

    def _append(self, digest: Digest, record: bytes) -> None:
        path = self._path(digest)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "ab", buffering=0) as file:
            file.write(record)
            size = file.tell()
        if size == len(record):
            shrink(os.path.dirname(path), _ALL_MAX)
        elif size > _FILE_MAX:
            self._halve(path)

    @staticmethod
    def _halve(path: str) -> None:
        """What others append meanwhile is lost, and those objects are hashed once more."""
        with open(open_private(path), "rb") as file:
            newer = file.read()[_FILE_MAX // 2 :]
        fresh = f"{path}.{secrets.token_hex(8)}"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(newer)
        os.replace(fresh, path)


def _record(digest: Digest, found: os.stat_result) -> bytes:
    times = found.st_mtime_ns, found.st_ctime_ns
    return _RECORD.pack(bytes.fromhex(digest), found.st_ino, found.st_size, *times)
