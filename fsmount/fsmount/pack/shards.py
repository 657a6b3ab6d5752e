"""Writing a partition's shards, and reading each back before it becomes an object."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import TracebackType

from fsmount.errors import IntegrityError
from fsmount.formats import sample, shard
from fsmount.formats.cuts import CutStream
from fsmount.formats.manifest import Row
from fsmount.model import Recipe, ShardRef
from fsmount.store import Mark, Objects, ObjectWriter, durable
from fsmount.store.hashed import Hashed
from fsmount.store.inside import StorePath, open_regular


@dataclass(frozen=True, slots=True)
class Encoded:
    """A sample on its way into a shard. Its row's shard, index, offset and schema are not set."""

    row: Row
    header: bytes  # of the member: its schema
    payload: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """A sample that a shard which exists holds as it is to be: at its row's index and offset."""

    row: Row
    header: bytes
    shard: ShardRef


@dataclass(frozen=True, slots=True)
class _Spooled:
    """A sample that waits in the file which may become its shard, at its row's offset."""

    row: Row
    header: bytes
    file: ObjectWriter


_Waiting = _Spooled | Stored
Fetch = Callable[[Stored], bytes]  # the payload of a sample, checked
Finished = Callable[[Sequence[Stored]], None]  # of the samples of one shard


class ShardSet:
    """The shards of one partition, from samples in the order of members; a context manager.

    Where a shard ends is known only after samples that are no longer in it: those move to a file of
    their own then. A shard is not written if one exists that has just its samples. `finished` is
    told of every shard that was written but the last. Leaving without `finish` leaves no object
    behind but shards that were complete.
    """

    def __init__(
        self,
        objects: Objects,
        staging: StorePath,
        recipe: Recipe,
        fetch: Fetch,
        finished: Finished,
    ) -> None:
        self._objects = objects
        self._hashed = Hashed.of(objects.root)
        self._staging = staging
        self._seed = recipe.order_seed
        self._fetch = fetch
        self._finished = finished
        self._cuts = CutStream(recipe.shard_bytes)
        self._waiting: list[_Waiting] = []
        self._spool: ObjectWriter | None = None  # has all that is spooled, in order
        self._mark: Mark | None = None  # where the spool would be cut
        self._schemas: dict[bytes, int] = {}
        self._shards: list[ShardRef] = []
        self._rows: list[Row] = []

    def add(self, item: Encoded | Stored) -> None:
        """Take in the next sample."""
        complete = self._cuts.add(shard.member_hash(item.row.key, self._seed), item.row.raw_size)
        for count, boundary in zip(complete, [*complete, self._cuts.boundary][1:], strict=True):
            written = self._close(count, boundary)
            if written:
                self._finished(written)
        self._take(item, self._cuts.boundary)

    def finish(self) -> tuple[list[Row], tuple[ShardRef, ...], tuple[bytes, ...]]:
        """Complete the last shard; returns the rows in shard order, the shards, the schemas."""
        self._close(len(self._waiting), 0)
        return self._rows, tuple(self._shards), tuple(self._schemas)

    def _take(self, item: Encoded | Stored, boundary: int) -> None:
        """Let a sample wait. The next cut may come before the waiting sample at `boundary`."""
        if self._spool is not None and len(self._waiting) == boundary:
            self._mark = self._spool.mark()
        if isinstance(item, Stored):
            self._waiting.append(item)
            return
        if self._spool is None:
            self._spool = self._objects.writer(self._staging)
        row = _append(self._spool, item.row, item.payload)
        self._waiting.append(_Spooled(row, item.header, self._spool))

    def _close(self, count: int, boundary: int) -> list[Stored]:
        """Make the first `count` waiting samples a shard; returns them if it had to be written."""
        members, rest = self._waiting[:count], self._waiting[count:]
        spool, mark = self._spool, self._mark
        self._waiting, self._spool, self._mark = [], None, None
        with spool or nullcontext():
            for item in rest:
                self._take(self._as_it_came(item), boundary)
            found = self._existing(members)
            if found is not None:
                self._record(found, [item.row for item in members], members)
                return []
            if spool is not None and all(isinstance(item, _Spooled) for item in members):
                if rest and mark is not None:
                    spool.rewind(mark)
                return self._commit(spool, [item.row for item in members], members)
            with self._objects.writer(self._staging) as writer:
                rows = [_append(writer, item.row, self._payload(item)) for item in members]
                return self._commit(writer, rows, members)

    def _existing(self, members: list[_Waiting]) -> ShardRef | None:
        """The shard that has just these members, if there is one and it is whole."""
        first = members[0]
        if not isinstance(first, Stored) or first.shard.samples != len(members):
            return None
        for place, item in enumerate(members):
            if not isinstance(item, Stored) or (item.shard, item.row.index) != (first.shard, place):
                return None
        return first.shard if self._objects.is_sound(first.shard, self._hashed) else None

    def _as_it_came(self, item: _Waiting) -> Encoded | Stored:
        if isinstance(item, Stored):
            return item
        return Encoded(item.row, item.header, self._payload(item))

    def _payload(self, item: _Waiting) -> bytes:
        if isinstance(item, Stored):
            return self._fetch(item)
        return item.file.read(item.row.offset, item.row.size)

    def _commit(
        self, writer: ObjectWriter, rows: list[Row], members: list[_Waiting]
    ) -> list[Stored]:
        writer.write(shard.END)
        writer.flush()
        with durable.changing(writer.path):
            verify_shard(writer.path, rows)
        ref = writer.commit()
        return self._record(ShardRef(ref.digest, ref.size, len(rows)), rows, members)

    def _record(self, ref: ShardRef, rows: list[Row], members: list[_Waiting]) -> list[Stored]:
        """Number the shard and its rows."""
        stored = []
        for index, (row, item) in enumerate(zip(rows, members, strict=True)):
            schema = self._schemas.setdefault(item.header, len(self._schemas))
            placed = replace(row, shard=len(self._shards), index=index, schema=schema)
            stored.append(Stored(placed, item.header, ref))
        self._shards.append(ref)
        self._rows += [item.row for item in stored]
        return stored

    def __enter__(self) -> ShardSet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._spool is not None:
            self._spool.__exit__(kind, error, trace)


def _append(writer: ObjectWriter, row: Row, payload: bytes) -> Row:
    """Write a sample's member; returns its row with its place in the file."""
    writer.write(shard.member_header(shard.member_name(row.key), len(payload)))
    offset = writer.tell()
    writer.write(payload)
    writer.write(shard.padding(len(payload)))
    return replace(row, offset=offset, size=len(payload), checksum=sample.checksum(payload))


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
