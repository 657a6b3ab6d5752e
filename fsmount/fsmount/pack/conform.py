"""One schema for all manifests of a version, so that a reader of many files needs no care.

A partition whose manifest was written for another version's schema gets a new one, made of the old
one alone: no shard is touched, no revision changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from fsmount.errors import FormatError, SidecarError
from fsmount.formats import manifest
from fsmount.formats.checked import dump_compact
from fsmount.formats.kinds import Fields, Schema, settle, unify, unify_dumped
from fsmount.formats.manifest import ManifestMeta, Row
from fsmount.model import Partition
from fsmount.pack.memory import Memory
from fsmount.store import Objects
from fsmount.store.inside import StorePath

_log = logging.getLogger(__name__)


def schema_for(known: Fields, own: Fields) -> Schema:
    """The schema to write a partition's manifest with: that of the version, if nothing is new."""
    return settle(unify([known, own]))


def conform(
    parts: tuple[Partition, ...],
    objects: Objects,
    memory: Memory,
    staging: StorePath,
    tick: Callable[[int], None],
) -> tuple[Partition, ...]:
    """`parts` as one version has them: each with a manifest of the schema of all of them.

    `tick` is told before each manifest that is written anew how many are left. Raises
    ObjectMissingError or FormatError naming the partition whose manifest is not as it should be,
    StoreWriteError.
    """
    fields = unify_dumped(part.fields for part in parts)
    if fields.more:
        _log.warning(
            "the sidecars have too many fields: %d common ones are columns of the manifests, the "
            "others only in __sidecar__",
            len(fields.kinds),
        )
    schema = settle(fields)
    text = dump_compact(schema)
    left = sum(part.schema != text for part in parts)
    found = []
    for part in parts:
        fresh = part
        if part.schema != text:
            tick(left)
            left -= 1
            ref = objects.put(_rewritten(part, schema, objects), staging)
            fresh = replace(part, manifest=ref, schema=text)
            files = memory.samples(part)
            if files:
                memory.save(fresh, tuple(files.values()))
        found.append(fresh)
    return tuple(found)


def _rewritten(part: Partition, schema: Schema, objects: Objects) -> bytes:
    try:
        found = manifest.decode(objects.read(part.manifest))
        found.meta.check_belongs(part)
        rows = found.rows()
        if manifest.fields_of(rows).dump() != part.fields:
            raise FormatError("its fields are others than its partition table says")
        return encode(rows, found.meta, schema)
    except (FormatError, SidecarError) as error:
        raise FormatError(f"the manifest of partition {part.id!r}: {error}") from error


def encode(rows: list[Row], meta: ManifestMeta, schema: Schema) -> bytes:
    """The manifest of `rows`, which is seen to read back; FormatError."""
    data = manifest.encode(rows, meta, schema)
    if manifest.decode(data).rows() != rows:
        raise FormatError("does not read back as it was written")
    return data
