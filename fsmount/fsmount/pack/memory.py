"""What this user remembers of sources: which files made which partition.

One Parquet file a partition of a source, replaced whole, in the user's own cache and never in a
store: whoever can write there decides what a pack publishes unread. It may be deleted at any time;
a pack then reads what it would have skipped. Whoever finds a memory still checks that its objects
exist.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass

import pyarrow as pa

from fsmount.errors import FsmountError
from fsmount.formats import parquet
from fsmount.formats.checked import dump_compact, get
from fsmount.formats.document import recipe_to_json, rule_to_json
from fsmount.formats.partition import partition_from_json, partition_to_json
from fsmount.model import Partition, Recipe, Rule
from fsmount.pack.files import FileStat
from fsmount.pack.source import SourceSample, fingerprint
from fsmount.private import cache_directory, replace_file
from fsmount.store import durable
from fsmount.store.inside import StorePath

_log = logging.getLogger(__name__)
_FILES = ("file", "sidecar")
_NUMBERS = ("size", "mtime_ns", "ctime_ns", "inode")
_SCHEMA = pa.schema(
    [("key", pa.string())]
    + [(f"{file}_{number}", pa.int64()) for file in _FILES for number in _NUMBERS]
)
_LIMIT = 1 << 30  # bytes of one file
_UNREADABLE = (FsmountError, OSError, ValueError, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class Remembered:
    """A partition, and the `fingerprint` of the files that it was made of."""

    partition: Partition
    listing: str


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one store, source, rule and recipe. Picklable.

    Without a directory it remembers nothing.
    """

    directory: str | None
    owner: str  # store, source, rule and recipe as JSON; each file repeats it

    @classmethod
    def of(cls, store: str, namespace: str, rule: Rule, recipe: Recipe) -> Memory:
        """The memory that belongs to these; a changed rule or recipe starts an empty one."""
        where = os.path.realpath(store)
        owner = dump_compact([where, namespace, rule_to_json(rule), recipe_to_json(recipe)])
        directory = cache_directory("builds", hashlib.sha256(owner.encode()).hexdigest())
        if directory is None:
            _log.info(
                "no directory that only this user can write: every file is read. Set "
                "XDG_CACHE_HOME to one, and the next pack of this source reads what has changed"
            )
        return cls(directory, owner)

    def partition(self, partition_id: str) -> Remembered | None:
        """The partition that was last built of this id, or None."""
        found = self._load(partition_id, columns=())
        return None if found is None else found[0]

    def samples(self, partition: Partition) -> dict[str, SourceSample] | None:
        """The files that this very `partition` was built of, by key; None if that is not known.

        Another process may have remembered a newer state of it meanwhile: those files are not its.
        """
        found = self._load(partition.id, columns=None)
        if found is None or found[0].partition != partition:
            return None
        try:
            return {row["key"]: _sample(row) for row in found[1].to_pylist()}
        except _UNREADABLE:
            return None

    def save(self, partition: Partition, samples: tuple[SourceSample, ...]) -> bool:
        """Remember that `samples` made `partition`; False where that can't be written."""
        if self.directory is None:
            return False
        data = parquet.write(
            pa.Table.from_pylist([_row(sample) for sample in samples], schema=_SCHEMA),
            {
                "owner": self.owner,
                "partition": partition_to_json(partition),
                "listing": fingerprint(samples),
            },
        )
        try:
            replace_file(self._path(self.directory, partition.id), data)
        except OSError:
            return False
        return True

    def _load(
        self, partition_id: str, columns: tuple[str, ...] | None
    ) -> tuple[Remembered, pa.Table] | None:
        if self.directory is None:
            return None
        try:
            data = durable.read_small(self._path(self.directory, partition_id), _LIMIT)
            if data is None:
                return None
            table, metadata = parquet.read(data, "memory", columns)
            partition = partition_from_json(get(metadata, "partition", dict))
            found = Remembered(partition, get(metadata, "listing", str))
        except _UNREADABLE:
            return None  # a cache: what can't be read is as good as deleted
        known = columns is not None or table.schema.equals(_SCHEMA)
        ours = metadata.get("owner") == self.owner and partition.id == partition_id
        return (found, table) if known and ours else None

    @staticmethod
    def _path(directory: str, partition_id: str) -> StorePath:
        name = hashlib.sha256(partition_id.encode()).hexdigest()
        return StorePath(directory, f"{name}.parquet")


def _row(sample: SourceSample) -> dict[str, object]:
    row: dict[str, object] = {"key": sample.key}
    for file, stat in zip(_FILES, (sample.file, sample.sidecar), strict=True):
        for number in _NUMBERS:
            row[f"{file}_{number}"] = None if stat is None else getattr(stat, number)
    return row


def _sample(row: dict[str, int]) -> SourceSample:
    file, sidecar = (FileStat(*(row[f"{file}_{number}"] for number in _NUMBERS)) for file in _FILES)
    return SourceSample(str(row["key"]), file, None if row["sidecar_size"] is None else sidecar)
