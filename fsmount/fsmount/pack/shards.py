"""Writing a partition's shards, and reading each back before it becomes an object."""

from __future__ import annotations

import hashlib
import os
import tarfile
from dataclasses import dataclass
from types import TracebackType

from fsmount.errors import IntegrityError
from fsmount.formats import sample, shard
from fsmount.formats.manifest import Row, Text
from fsmount.model import ShardRef
from fsmount.store import Objects, ObjectWriter
from fsmount.store.inside import StorePath, open_regular


@dataclass(frozen=True, slots=True)
class Encoded:
    """A sample on its way into a shard."""

    key: str
    payload: bytes
    header: bytes  # of the member: its schema
    raw_size: int
    sha256: bytes  # of the member
    texts: tuple[Text, ...]
    sidecar: bytes | None


class ShardSet:
    """The shards of one partition, written member by member; a context manager.

    A shard is cut before the member whose raw bytes would take it over `shard_bytes`. Leaving
    without `finish` leaves no object behind but shards that were complete.
    """

    def __init__(self, objects: Objects, staging: StorePath, shard_bytes: int) -> None:
        self._objects = objects
        self._staging = staging
        self._limit = shard_bytes
        self._writer: ObjectWriter | None = None
        self._raw = 0
        self._current: list[Row] = []
        self._schemas: dict[bytes, int] = {}
        self._shards: list[ShardRef] = []
        self._rows: list[Row] = []

    def add(self, item: Encoded) -> None:
        """Append one sample."""
        if self._writer is not None and self._raw + item.raw_size > self._limit:
            self._close_shard(self._writer)
        if self._writer is None:
            self._writer, self._raw, self._current = self._objects.writer(self._staging), 0, []
        name = shard.member_name(item.key)
        self._writer.write(shard.member_header(name, len(item.payload)))
        row = Row(
            key=item.key,
            shard=len(self._shards),
            index=len(self._current),
            offset=self._writer.tell(),
            size=len(item.payload),
            raw_size=item.raw_size,
            checksum=sample.checksum(item.payload),
            sha256=item.sha256,
            schema=self._schemas.setdefault(item.header, len(self._schemas)),
            texts=item.texts,
            sidecar=item.sidecar,
        )
        self._writer.write(item.payload)
        self._writer.write(shard.padding(len(item.payload)))
        self._current.append(row)
        self._raw += item.raw_size

    def finish(self) -> tuple[list[Row], tuple[ShardRef, ...], tuple[bytes, ...]]:
        """Complete the last shard; returns the rows in shard order, the shards, the schemas."""
        if self._writer is not None:
            self._close_shard(self._writer)
        return self._rows, tuple(self._shards), tuple(self._schemas)

    def _close_shard(self, writer: ObjectWriter) -> None:
        with writer:
            writer.write(shard.END)
            writer.flush()
            verify_shard(writer.path, self._current)
            ref = writer.commit()
        self._shards.append(ShardRef(ref.digest, ref.size, len(self._current)))
        self._rows += self._current
        self._writer = None

    def __enter__(self) -> ShardSet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.__exit__(kind, error, trace)


def verify_shard(path: StorePath, rows: list[Row]) -> None:
    """Raise IntegrityError unless the tar at `path` holds exactly `rows`, each decodable.

    Every member is found by tar's own walk, decompressed and compared with the fingerprint that was
    taken when its source was read.
    """
    with open(open_regular(path), "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for row in rows:
            member = tar.next()
            name = shard.member_name(row.key)
            if member is None or (member.name, member.offset_data, member.size) != (
                name,
                row.offset,
                row.size,
            ):
                raise IntegrityError(f"{path}: member {name!r} is not where it was written")
            verify_payload(os.pread(file.fileno(), row.size, row.offset), row)
        if tar.next() is not None:
            raise IntegrityError(f"{path}: more members than were written")


def verify_payload(payload: bytes, row: Row) -> None:
    """Raise IntegrityError unless `payload` is what `row` says, down to the decoded bytes."""
    intact = len(payload) == row.size and sample.checksum(payload) == row.checksum
    member = sample.decompress(payload, row.raw_size) if intact else b""
    if hashlib.sha256(member).digest() != row.sha256:
        raise IntegrityError(f"the payload of sample {row.key!r} is damaged")
