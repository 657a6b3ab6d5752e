"""A version as a directory: mounted, or exported in the mount's layout. Every byte is checked."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fsmount.errors import FormatError, IntegrityError, LoadError, PlanError
from fsmount.formats import document, keyset, table
from fsmount.model import ObjectRef, Partition, VersionDocument
from fsmount.paths import manifest_path, shard_path

T = TypeVar("T")

_OUR_MOUNT = "fuse.fsmount"


@dataclass(frozen=True, slots=True)
class VersionName:
    """Which version it is: its tag, its partition table's digest, and the store it is mounted from.

    The tag is None for a version without one, the store for a directory that is no mount of ours.
    """

    tag: str | None
    table: str
    store: str | None

    def __str__(self) -> str:
        tag = "" if self.tag is None else f"{self.tag} "
        return f"{tag}sha256:{self.table[:12]}"


class VersionFiles:
    """The files of one version under the directory `root`. Immutable, can be pickled."""

    def __init__(self, root: str, document: VersionDocument) -> None:
        self.root = root
        self.document = document
        self._partitions: tuple[Partition, ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return VersionFiles, (self.root, self.document)

    @classmethod
    def open(cls, path: str | bytes | os.PathLike[str]) -> VersionFiles:
        """Read the document.

        Raises PlanError if `path` is no version, FormatError if its document is not what it should
        be, LoadError if it can't be read.
        """
        try:
            root = os.path.abspath(os.fsdecode(path))
        except TypeError:
            raise PlanError(f"path must be the path of a version, not {path!r}") from None
        if not os.path.isfile(os.path.join(root, "VERSION.json")):
            raise PlanError(f"not a mounted version: {root}{_hint(root)}")
        path = os.path.join(root, "VERSION.json")
        return cls(root, _decoded(path, document.decode, _read(path)))

    def name(self) -> VersionName:
        """Which version it is."""
        tag, table = self.document.tag, self.document.table.digest
        # Plain texts, as all in a state: torch.load takes no other by default.
        return VersionName(None if tag is None else str(tag), str(table), _store_of(self.root))

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The partition table, read when it is first asked for; errors as `open`."""
        if self._partitions is None:
            path = self.path("partitions.parquet")
            data = _read_checked(path, self.document.table)
            self._partitions = _decoded(path, table.decode, data).partitions
        return self._partitions

    def path(self, name: str) -> str:
        """The path of a file of this version."""
        return os.path.join(self.root, name)

    def manifest(self, partition: Partition) -> bytes:
        """The bytes of a partition's manifest, which have its digest; errors as `open`."""
        return _read_checked(self.path(manifest_path(partition.id)), partition.manifest)

    def shard(self, partition: Partition, shard: int) -> str:
        """A partition's shard, counted from 0, as a path from the root."""
        return shard_path(partition.id, shard)

    def keyset(self, name: str) -> Sequence[str]:
        """The keys of a key-set; PlanError naming those that are there if `name` is not."""
        path = self._keyset_path(name)
        return _decoded(path, keyset.decode_keys, _read(path))

    def keyset_digest(self, name: str) -> str:
        """The SHA-256 of a key-set's file; errors as `keyset`."""
        return hashlib.sha256(_read(self._keyset_path(name))).hexdigest()

    def _keyset_path(self, name: str) -> str:
        folder = self.path("keysets")
        found = sorted(entry.removesuffix(".parquet") for entry in _entries(folder))
        if name not in found:
            there = f"there are {', '.join(found)}" if found else "there are none"
            raise PlanError(f"no keyset {name!r} in {self.root}; {there}")
        return os.path.join(folder, f"{name}.parquet")


def _store_of(root: str) -> str | None:
    """The store that is mounted where the directory `root` is, as Linux tells it."""
    try:
        with open("/proc/self/mountinfo", errors="surrogateescape", newline="\n") as file:
            mounts = [line.split(" ") for line in file]
    except OSError:
        return None
    real = os.path.realpath(root)
    above = {real}
    while real != "/":
        real = os.path.dirname(real)
        above.add(real)
    over = [fields for fields in mounts if _unescaped(fields[4]) in above]
    mount = max(over, key=lambda fields: len(_unescaped(fields[4])), default=None)
    if mount is None or mount[mount.index("-") + 1] != _OUR_MOUNT:
        return None
    source = _unescaped(mount[mount.index("-") + 2])
    store, at, ref = source.rpartition("@")
    return store if at and "/" not in ref else source


def _unescaped(field: str) -> str:
    """A field of mountinfo, where a space, for one, is written as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _hint(root: str) -> str:
    """What else may be at `root`, and what to do then."""
    if os.path.isfile(os.path.join(root, "store.json")):
        return f" but a store; mount a version of it: fsmount mount {root}@latest MOUNTPOINT"
    if not os.path.isdir(root):
        return "; no such directory"
    if not _entries(root):
        return "; an empty directory: is it mounted?"
    tags = sorted(_entries(os.path.join(root, "versions")))
    return f"; give one of its versions, as {root}/versions/{tags[-1]}" if tags else ""


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (OSError, ValueError):  # a zero byte is a ValueError
        return []


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}") from error


def _read_if(path: str, size: int) -> bytes:
    """The content of a file if it has `size` bytes, else nothing.

    With few system calls: there are thousands of manifests.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size != size:
                return b""
            data = os.read(file, size)
            while len(data) < size and (more := os.read(file, size - len(data))):
                data += more
        finally:
            os.close(file)
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}") from error
    return data


def _decoded(path: str, decode: Callable[[bytes], T], data: bytes) -> T:
    try:
        return decode(data)
    except FormatError as error:
        raise type(error)(f"{path}: {error}") from error


def _read_checked(path: str, ref: ObjectRef) -> bytes:
    data = _read_if(path, ref.size)
    if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.digest:
        raise IntegrityError(f"{path}: not the object sha256:{ref.digest}")
    return data
