"""What a store's cache remembers of sources: which files made which partition.

One file a partition of a source, replaced whole. It may be deleted at any time; a pack then reads
what it would have skipped. Whoever finds a memory still checks that its objects exist.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass

import pyarrow as pa

from fsmount.errors import FsmountError
from fsmount.formats import parquet
from fsmount.formats.checked import dump_compact, get
from fsmount.formats.document import recipe_to_json, rule_to_json
from fsmount.formats.table import partition_from_json, partition_to_json
from fsmount.model import Partition, Recipe, Rule
from fsmount.pack.source import FileStat, SourceSample
from fsmount.store import durable

_FILES = ("file", "sidecar")
_NUMBERS = ("size", "mtime_ns", "inode")
_SCHEMA = pa.schema(
    [("key", pa.string())]
    + [(f"{file}_{number}", pa.int64()) for file in _FILES for number in _NUMBERS]
)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one source, rule and recipe, below a store's cache directory. Picklable."""

    directory: str

    @classmethod
    def of(cls, cache: str, namespace: str, rule: Rule, recipe: Recipe) -> Memory:
        """The memory that belongs to these; a changed rule or recipe starts an empty one."""
        what = dump_compact([namespace, rule_to_json(rule), recipe_to_json(recipe)])
        return cls(os.path.join(cache, "sources", hashlib.sha256(what.encode()).hexdigest()))

    def partition(self, partition_id: str) -> Partition | None:
        """The partition that was last built of this id, or None."""
        found = self._load(partition_id, columns=())
        return None if found is None else found[0]

    def samples(self, partition: Partition) -> dict[str, SourceSample]:
        """The files that this very `partition` was built of, by key; empty if that is not known.

        Another process may have remembered a newer state of it meanwhile: those files are not its.
        """
        found = self._load(partition.id, columns=None)
        if found is None or found[0] != partition or not found[1].schema.equals(_SCHEMA):
            return {}
        return {row["key"]: _sample(row) for row in found[1].to_pylist()}

    def save(self, partition: Partition, samples: tuple[SourceSample, ...]) -> None:
        """Remember that `samples` made `partition`; StoreWriteError where that can't be written."""
        rows = [_row(sample) for sample in samples]
        data = parquet.write(
            pa.Table.from_pylist(rows, schema=_SCHEMA),
            {"partition": partition_to_json(partition)},
        )
        path = self._path(partition.id)
        staged = f"{path}.{secrets.token_hex(8)}"
        with durable.changing(path):
            os.makedirs(self.directory, exist_ok=True)
            with open(staged, "xb") as file:
                file.write(data)
            os.replace(staged, path)

    def _load(
        self, partition_id: str, columns: tuple[str, ...] | None
    ) -> tuple[Partition, pa.Table] | None:
        try:
            with open(self._path(partition_id), "rb") as file:
                table, metadata = parquet.read(file.read(), "memory", columns)
            partition = partition_from_json(get(metadata, "partition", dict))
        except (FsmountError, OSError):
            return None  # a cache: what can't be read is as good as deleted
        return (partition, table) if partition.id == partition_id else None

    def _path(self, partition_id: str) -> str:
        name = hashlib.sha256(partition_id.encode()).hexdigest()
        return os.path.join(self.directory, f"{name}.parquet")


def _row(sample: SourceSample) -> dict[str, object]:
    row: dict[str, object] = {"key": sample.key}
    for file, stat in zip(_FILES, (sample.file, sample.sidecar), strict=True):
        for number in _NUMBERS:
            row[f"{file}_{number}"] = None if stat is None else getattr(stat, number)
    return row


def _sample(row: dict[str, int]) -> SourceSample:
    file, sidecar = (FileStat(*(row[f"{file}_{number}"] for number in _NUMBERS)) for file in _FILES)
    return SourceSample(str(row["key"]), file, None if row["sidecar_size"] is None else sidecar)
