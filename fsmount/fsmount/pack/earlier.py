"""Samples as an earlier pack has stored them: what need not be read or written again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsmount.formats.manifest import Manifest, Row
from fsmount.model import ShardRef
from fsmount.pack.source import SourceSample


@dataclass(frozen=True, slots=True)
class Earlier:
    """A sample as an earlier pack has stored it."""

    row: Row
    header: bytes  # of the member: its schema
    shard: ShardRef  # in which it lies at the row's offset
    compressor: str  # the zstd release that made the payload
    files: SourceSample | None  # what it was made of; None where that isn't known

    def has_file_of(self, item: SourceSample) -> bool:
        """Whether it was made of the very file that `item` has."""
        return self.files is not None and self.files.file == item.file

    def has_sidecar_of(self, item: SourceSample) -> bool:
        """Whether it was made of the very sidecar that `item` has, or both have none."""
        return self.files is not None and self.files.sidecar == item.sidecar


def earlier_samples(found: Manifest, files: Mapping[str, SourceSample]) -> dict[str, Earlier]:
    """The samples of a manifest by key, in shard order; `files` are those it was made of."""
    meta = found.meta
    return {
        row.key: Earlier(
            row,
            meta.schemas[row.schema],
            meta.shards[row.shard],
            meta.compressor,
            files.get(row.key),
        )
        for row in found.rows()
    }
