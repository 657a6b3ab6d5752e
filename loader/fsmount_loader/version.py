"""A version as a directory: mounted, or exported in the mount's layout. Every byte is checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fsmount.errors import FormatError, IntegrityError, LoadError, PlanError
from fsmount.formats import document, keyset, table
from fsmount.model import ObjectRef, Partition, VersionDocument

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """The files of one version under the directory `root`."""

    root: str
    document: VersionDocument
    partitions: tuple[Partition, ...]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> VersionFiles:
        """Read the document and the partition table.

        Raises PlanError if `path` is no version, IntegrityError or FormatError if its files are not
        what they should be, LoadError if they can't be read.
        """
        root = os.path.abspath(os.fspath(path))
        if not os.path.isfile(os.path.join(root, "VERSION.json")):
            raise PlanError(f"not a mounted version: {root}{_versions_below(root)}")
        path = os.path.join(root, "VERSION.json")
        doc = _decoded(path, document.decode, _read(path))
        path = os.path.join(root, "partitions.parquet")
        found = _decoded(path, table.decode, _read_checked(path, doc.table))
        return cls(root, doc, found.partitions)

    def manifest(self, partition: Partition) -> bytes:
        """The bytes of a partition's manifest, which have its digest; errors as `open`."""
        path = os.path.join(self.root, "manifests", f"{partition.id}.parquet")
        return _read_checked(path, partition.manifest)

    def shard_path(self, partition: Partition, shard: int) -> str:
        """The path of a partition's shard, counted from 0."""
        return os.path.join(self.root, "shards", partition.id, f"{shard:06d}.tar")

    def keyset(self, name: str) -> Sequence[str]:
        """The keys of a key-set; PlanError naming those that are there if `name` is not."""
        folder = os.path.join(self.root, "keysets")
        found = sorted(entry.removesuffix(".parquet") for entry in _entries(folder))
        if name not in found:
            there = f"there are {', '.join(found)}" if found else "there are none"
            raise PlanError(f"no keyset {name!r} in {self.root}; {there}")
        path = os.path.join(folder, f"{name}.parquet")
        return _decoded(path, keyset.decode_keys, _read(path))


def _versions_below(root: str) -> str:
    tags = sorted(_entries(os.path.join(root, "versions")))
    return f"; give one of its versions, as {root}/versions/{tags[-1]}" if tags else ""


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}") from error


def _decoded(path: str, decode: Callable[[bytes], T], data: bytes) -> T:
    try:
        return decode(data)
    except FormatError as error:
        raise type(error)(f"{path}: {error}") from error


def _read_checked(path: str, ref: ObjectRef) -> bytes:
    data = _read(path)
    if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.digest:
        raise IntegrityError(f"{path}: not the object sha256:{ref.digest}")
    return data
