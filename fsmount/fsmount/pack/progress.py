"""Shards of partitions that aren't finished: what an interrupted pack leaves to the next one.

One Parquet file a finished shard, beside what the user's own cache remembers of finished
partitions, removed when the partition is finished. Like that, it may be deleted at any time, and
whoever finds a shard here still checks that its object exists.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from hashlib import sha256
from typing import Any

import pyarrow as pa

from fsmount.errors import FsmountError
from fsmount.formats import parquet
from fsmount.formats.checked import get
from fsmount.formats.manifest import Row, Text
from fsmount.formats.partition import shard_from_json, shard_to_json
from fsmount.model import Digest
from fsmount.pack.earlier import Earlier
from fsmount.pack.files import FileStat
from fsmount.pack.memory import Memory
from fsmount.pack.shards import Stored
from fsmount.pack.source import SourceSample
from fsmount.private import replace_file
from fsmount.store import durable
from fsmount.store.inside import StorePath

_LIMIT = 1 << 30  # bytes of one file
_DIGITS = 64  # of a digest
_SUFFIX = ".parquet"
_UNREADABLE = (FsmountError, OSError, ValueError, TypeError, pa.ArrowException)
_OF_ROW = ("key", "index", "offset", "size", "raw_size", "checksum", "sha256", "sidecar")
_STAT = tuple(field.name for field in fields(FileStat))
_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("index", pa.int64()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("raw_size", pa.int64()),
        ("checksum", pa.uint64()),
        ("sha256", pa.binary()),
        ("sidecar", pa.binary()),
        ("texts", pa.string()),
        ("header", pa.binary()),
        ("file", pa.list_(pa.int64())),
        ("sidecar_file", pa.list_(pa.int64())),
    ]
)


@dataclass(frozen=True, slots=True)
class Progress:
    """The finished shards of one partition that isn't finished; without a directory, none."""

    directory: str | None
    owner: str  # as that of the memory; each file repeats it

    @classmethod
    def of(cls, memory: Memory, partition_id: str) -> Progress:
        """That of a partition that `memory` will remember once it is finished."""
        if memory.directory is None:
            return cls(None, memory.owner)
        name = sha256(partition_id.encode()).hexdigest()
        return cls(os.path.join(memory.directory, f"{name}.shards"), memory.owner)

    def shards(self) -> tuple[Digest, ...]:
        """The digests of the finished shards, sorted."""
        try:
            names = [] if self.directory is None else os.listdir(self.directory)
        except OSError:
            return ()
        stems = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
        return tuple(sorted(Digest(stem) for stem in stems if len(stem) == _DIGITS))

    def samples(self) -> dict[str, Earlier]:
        """The samples of the finished shards by key."""
        return {
            earlier.row.key: earlier for digest in self.shards() for earlier in self._load(digest)
        }

    def add(
        self, samples: Sequence[Stored], compressor: str, files: Mapping[str, SourceSample]
    ) -> None:
        """Remember a shard with its samples, made of `files`; it is fine if that can't be done."""
        if self.directory is None:
            return
        shard = samples[0].shard
        data = parquet.write(
            pa.Table.from_pylist([_row(item, files[item.row.key]) for item in samples], _SCHEMA),
            {"owner": self.owner, "shard": shard_to_json(shard), "compressor": compressor},
        )
        with suppress(OSError):
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            replace_file(os.path.join(self.directory, shard.digest + _SUFFIX), data)

    def forget(self) -> None:
        """The partition is finished, and its manifest says more."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _load(self, digest: Digest) -> list[Earlier]:
        try:
            data = durable.read_small(StorePath(str(self.directory), digest + _SUFFIX), _LIMIT)
            table, metadata = parquet.read(data or b"", "progress")
            shard = shard_from_json(get(metadata, "shard", dict))
            compressor = get(metadata, "compressor", str)
            if metadata.get("owner") != self.owner or shard.digest != digest:
                return []
            found = [_sample(row) for row in table.to_pylist()]
        except _UNREADABLE:
            return []  # a cache: what can't be read is as good as deleted
        return [Earlier(row, header, shard, compressor, files) for row, header, files in found]


def _row(item: Stored, files: SourceSample) -> dict[str, Any]:
    row = item.row
    return {
        **{name: getattr(row, name) for name in _OF_ROW},
        "texts": json.dumps([astuple(text) for text in row.texts]),
        "header": item.header,
        "file": _numbers(files.file),
        "sidecar_file": None if files.sidecar is None else _numbers(files.sidecar),
    }


def _numbers(stat: FileStat) -> list[int]:
    return [getattr(stat, name) for name in _STAT]


def _sample(row: dict[str, Any]) -> tuple[Row, bytes, SourceSample]:
    texts = tuple(Text(*text) for text in json.loads(row["texts"]))
    sidecar = None if row["sidecar_file"] is None else FileStat(*row["sidecar_file"])
    files = SourceSample(row["key"], FileStat(*row["file"]), sidecar)
    own = {name: row[name] for name in _OF_ROW}
    return Row(**own, shard=0, schema=0, texts=texts), row["header"], files
