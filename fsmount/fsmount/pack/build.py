"""Building one partition: what a worker does. Reads a source, writes objects, returns a row.

The least that gives the right result: a partition of which only sidecars changed keeps its shards,
a shard that has just the samples it had is the old one, a sample whose files are as remembered is
copied from its old shard and not read again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import zstandard

from fsmount.errors import (
    FormatError,
    ObjectMissingError,
    SidecarError,
    SourceChangedError,
    SourceError,
)
from fsmount.formats import manifest, revision, sample
from fsmount.formats.checked import dump_compact
from fsmount.formats.fields import parse_sidecar
from fsmount.formats.manifest import ManifestMeta, Row, Text
from fsmount.formats.shard import member_order
from fsmount.model import Partition, ShardRef
from fsmount.pack.adopt import is_release, proven
from fsmount.pack.conform import encode, schema_for
from fsmount.pack.earlier import Earlier, earlier_samples
from fsmount.pack.faults import Faults
from fsmount.pack.progress import Progress
from fsmount.pack.settled import settled
from fsmount.pack.shards import Encoded, ShardSet, Stored, verify_payload
from fsmount.pack.source import SourceSample
from fsmount.pack.task import Advance, Built, Context, Failed, Outcome, Result, Task
from fsmount.store import durable
from fsmount.store.hashed import Hashed
from fsmount.store.inside import StorePath

COMPRESSOR = f"zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}"


def build_partition(task: Task, context: Context, advance: Advance) -> Result:
    """Make the partition of `task`; all its objects are in the store when this returns.

    Raises IntegrityError naming the file, StoreWriteError naming the object.
    """
    staging = context.staging / str(task.place)
    durable.make_directory(staging)
    try:
        return _Builder(task, context, staging, advance).build()
    finally:
        durable.remove_tree(staging)


@dataclass(frozen=True, slots=True)
class _Old:
    """The previous state of a partition, its samples in shard order.

    Unless it is `ours`, remembered by this user as made of known files, anybody may have written
    it: then its samples are those that are proven to be what their rows say.
    """

    ours: bool
    partition: Partition
    meta: ManifestMeta
    samples: dict[str, Earlier]


@dataclass(frozen=True, slots=True)
class _Fresh:
    """A sample as its source file has it now."""

    member: memoryview
    header: bytes  # of the member
    sha256: bytes  # of the member
    texts: tuple[Text, ...]


class _Builder:
    def __init__(self, task: Task, context: Context, staging: StorePath, advance: Advance) -> None:
        self._task = task
        self._context = context
        self._objects = context.objects
        self._staging = staging
        self._advance = advance
        self._settled = settled(task.samples, context.clock)
        self._progress = Progress.of(context.memory, task.id)
        self._read = 0
        self._equal: dict[str, tuple[Text, ...]] = {}  # read, and found to have the old tensors
        self._sound: set[str] = set()  # done
        self._held: dict[str, _Fresh] = {}  # read, and found to have others: one at most

    def build(self) -> Result:
        old = self._load_old()
        try:
            return self._build(old)
        except SourceError as error:
            faults = self._faults({} if old is None else old.samples)
            return Failed(faults if faults.count else Faults.of([error]))

    def _build(self, old: _Old | None) -> Built:
        texts = None if old is None else self._texts_if_same_data(old)
        if old is None or texts is None:
            partition, outcome = self._rebuild(self._earlier(old)), Outcome.BUILT
        elif old.ours:
            partition, outcome = self._refresh(old, texts)
        else:
            partition, outcome = self._adopt(old)
        remembered = self._context.memory.save(partition, self._settled)
        if remembered:
            self._progress.forget()
        return Built(partition, outcome, self._read, remembered)

    def _faults(self, known: Mapping[str, Earlier]) -> Faults:
        """What is wrong with the files that were not done yet: all of them are looked at."""
        errors = []
        for item in self._task.samples:
            if item.key not in self._sound:
                try:
                    self._look_at(item, known.get(item.key))
                except SourceError as error:
                    errors.append(error)
                self._done(item)
        return Faults.of(errors)

    def _look_at(self, item: SourceSample, earlier: Earlier | None) -> None:
        if earlier is not None and earlier.has_file_of(item):
            self._sidecar(item, earlier, earlier.row.texts)
        else:
            self._sidecar(item, earlier, self._encode(item).texts)

    def _load_old(self) -> _Old | None:
        previous = self._task.previous
        if previous is None:
            return None
        try:
            found = manifest.decode(self._objects.read(previous.manifest))
            found.meta.check_belongs(previous)
        except (ObjectMissingError, FormatError):
            return None  # damaged since: built anew from the source
        files = None if self._context.force else self._context.memory.samples(previous)
        samples = earlier_samples(found, files or {})
        if files is None:
            samples = proven(self._objects, samples, self._context.max_sample_bytes)
        return _Old(files is not None, previous, found.meta, samples)

    def _texts_if_same_data(self, old: _Old) -> dict[str, tuple[Text, ...]] | None:
        """Each sample's text arrays if all samples have the tensors they had, else None."""
        if old.samples.keys() != {s.key for s in self._task.samples}:
            return None
        if not all(map(self._objects.has, old.partition.objects())):
            return None
        pairs = [(key, earlier.row.sha256) for key, earlier in old.samples.items()]
        if old.partition.data_revision != revision.data_revision(self._context.recipe, pairs):
            return None
        for item in self._task.samples:
            earlier = old.samples[item.key]
            if not earlier.has_file_of(item):
                fresh = self._encode(item)
                if fresh.sha256 != earlier.row.sha256:
                    self._held[item.key] = fresh
                    return None
                self._equal[item.key] = fresh.texts
                self._advance(1, item.file.size)
        hashed = Hashed.of(self._objects.root)
        if not all(self._objects.is_sound(shard, hashed) for shard in old.partition.shards):
            return None  # damaged since: written anew
        return {key: self._equal.get(key, old.samples[key].row.texts) for key in old.samples}

    def _adopt(self, old: _Old) -> tuple[Partition, Outcome]:
        """The partition of somebody else, whose samples are the source's: its shards, if they are
        cut and ordered as ours, and a manifest of our own.
        """
        release = old.meta.compressor if is_release(old.meta.compressor) else COMPRESSOR
        known = {k: replace(earlier, compressor=COMPRESSOR) for k, earlier in old.samples.items()}
        partition = self._rebuild(known, release)
        if partition.shards != old.partition.shards:
            return partition, Outcome.BUILT
        same = partition.metadata_revision == old.partition.metadata_revision
        return partition, Outcome.UNCHANGED if same else Outcome.REFRESHED

    def _refresh(self, old: _Old, texts: dict[str, tuple[Text, ...]]) -> tuple[Partition, Outcome]:
        sidecars = {
            item.key: self._sidecar(item, old.samples[item.key], texts[item.key])
            for item in self._task.samples
        }
        rows = [
            replace(earlier.row, texts=texts[key], sidecar=sidecars[key])
            for key, earlier in old.samples.items()
        ]
        shards, schemas, release = old.partition.shards, old.meta.schemas, old.meta.compressor
        partition = self._partition(rows, shards, schemas, release, old.partition)
        for item in self._task.samples:
            self._done(item)
        same = partition.metadata_revision == old.partition.metadata_revision
        return partition, Outcome.UNCHANGED if same else Outcome.REFRESHED

    def _rebuild(self, known: Mapping[str, Earlier], release: str = COMPRESSOR) -> Partition:
        recipe, samples = self._context.recipe, {s.key: s for s in self._task.samples}
        files = {s.key: s for s in self._settled}

        def fetch(stored: Stored) -> bytes:
            return self._fetch(stored, samples[stored.row.key])

        def finished(members: Sequence[Stored]) -> None:
            self._progress.add(members, COMPRESSOR, files)

        with ShardSet(self._objects, self._staging, recipe, fetch, finished) as shards:
            for key in member_order(samples, recipe.order_seed):
                shards.add(self._sample(samples[key], known.get(key)))
                self._done(samples[key])
            rows, refs, schemas = shards.finish()
        return self._partition(rows, refs, schemas, release)

    def _earlier(self, old: _Old | None) -> dict[str, Earlier]:
        """Samples as an interrupted pack has stored them of the present files, else as in `old`."""
        earlier = {} if old is None else dict(old.samples)
        done = {} if self._context.force else self._progress.samples()
        for item in self._task.samples:
            found = done.get(item.key)
            if found is not None and (item.key not in earlier or found.has_file_of(item)):
                earlier[item.key] = found
        return earlier

    def _sample(self, item: SourceSample, earlier: Earlier | None) -> Encoded | Stored:
        """A sample as a shard has it already, or else as it is read from the source."""
        usable = earlier if earlier is not None and earlier.compressor == COMPRESSOR else None
        if usable is not None and (usable.has_file_of(item) or item.key in self._equal):
            return self._stored(item, usable, self._equal.get(item.key, usable.row.texts))
        fresh = self._held.pop(item.key) if item.key in self._held else self._encode(item)
        if usable is not None and fresh.sha256 == usable.row.sha256:
            return self._stored(item, usable, fresh.texts)
        return self._encoded(item, earlier, fresh)

    def _stored(self, item: SourceSample, earlier: Earlier, texts: tuple[Text, ...]) -> Stored:
        sidecar = self._sidecar(item, earlier, texts)
        row = replace(earlier.row, texts=texts, sidecar=sidecar)
        return Stored(row, earlier.header, earlier.shard)

    def _encoded(self, item: SourceSample, earlier: Earlier | None, fresh: _Fresh) -> Encoded:
        row = Row(
            key=item.key,
            shard=0,
            index=0,
            offset=0,
            size=0,
            raw_size=len(fresh.member),
            checksum=0,
            sha256=fresh.sha256,
            schema=0,
            texts=fresh.texts,
            sidecar=self._sidecar(item, earlier, fresh.texts),
        )
        payload = sample.compress(fresh.member, self._context.recipe.level)
        return Encoded(row, fresh.header, payload)

    def _fetch(self, stored: Stored, item: SourceSample) -> bytes:
        """A sample's payload from its shard, or from the source if that is damaged since."""
        try:
            with open(self._objects.open(stored.shard), "rb") as file:
                payload = os.pread(file.fileno(), stored.row.size, stored.row.offset)
            verify_payload(payload, stored.row)
        except (OSError, ObjectMissingError, FormatError):
            fresh = self._encode(item)
            if fresh.sha256 != stored.row.sha256:
                raise SourceChangedError(
                    f"{self._context.tree.path(item.key)}: changed since it was packed, though its "
                    "size and times did not; --force reads every file"
                ) from None
            return sample.compress(fresh.member, self._context.recipe.level)
        return payload

    def _encode(self, item: SourceSample) -> _Fresh:
        """A sample's member, which is seen to decode to the source's arrays."""
        arrays = self._context.tree.read_arrays(item, self._context.max_sample_bytes)
        self._read += 1
        digest = hashlib.sha256(arrays.member).digest()
        return _Fresh(arrays.member, arrays.schema.header, digest, arrays.texts)

    def _done(self, item: SourceSample) -> None:
        self._sound.add(item.key)
        if item.key not in self._equal:  # else it was counted when it was read
            self._advance(1, item.file.size)

    def _sidecar(
        self, item: SourceSample, earlier: Earlier | None, texts: tuple[Text, ...]
    ) -> bytes | None:
        if earlier is not None and earlier.has_sidecar_of(item):
            sidecar = earlier.row.sidecar
        else:
            sidecar = self._context.tree.read_sidecar(item)
        try:
            manifest.check_fields(parse_sidecar(sidecar) if sidecar and texts else {}, texts)
        except SidecarError as error:
            raise SidecarError(f"{self._context.tree.path(item.key)}: {error}") from error
        return sidecar

    def _partition(
        self,
        rows: list[Row],
        shards: tuple[ShardRef, ...],
        schemas: tuple[bytes, ...],
        release: str,
        old: Partition | None = None,
    ) -> Partition:
        """The partition; its manifest is that of `old`, if that says the same."""
        data = revision.data_revision(self._context.recipe, ((row.key, row.sha256) for row in rows))
        metadata = revision.metadata_revision(
            data,
            ((row.key, revision.metadata_bytes(row.texts_json(), row.sidecar)) for row in rows),
        )
        if old is not None and old.metadata_revision == metadata:
            fields, ref, schema = old.fields, old.manifest, old.schema
        else:
            meta = ManifestMeta(self._task.id, data, metadata, shards, schemas, (), release)
            own = manifest.fields_of(rows)
            wanted = schema_for(self._context.fields, own)
            ref = self._objects.put(encode(rows, meta, wanted), self._staging)
            fields, schema = own.dump(), dump_compact(wanted)
        return Partition(
            id=self._task.id,
            data_revision=data,
            metadata_revision=metadata,
            samples=len(rows),
            raw_bytes=sum(row.raw_size for row in rows),
            manifest=ref,
            shards=shards,
            source_fingerprint="",
            fields=fields,
            schema=schema,
        )
