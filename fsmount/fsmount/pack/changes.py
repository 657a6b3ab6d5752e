"""What a pack did to samples, partition by partition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fsmount.diff import Changes, count_changes
from fsmount.errors import FormatError, ObjectMissingError
from fsmount.formats import manifest
from fsmount.formats.manifest import Manifest
from fsmount.model import Partition
from fsmount.store import Objects


def changes_by_partition(
    objects: Objects, before: Iterable[Partition], after: Iterable[Partition]
) -> dict[str, Changes]:
    """The changes of each partition that differs, by id; only their manifests are read.

    Where the manifest of the state before can't be read any more, all its samples count as removed
    and all present ones as added.
    """
    old, new = _by_id(before), _by_id(after)
    return {
        name: _changes(objects, old.get(name), new.get(name))
        for name in sorted({*old, *new}, key=str.encode)
        if _revision(old.get(name)) != _revision(new.get(name))
    }


def _by_id(partitions: Iterable[Partition]) -> Mapping[str, Partition]:
    return {part.id: part for part in partitions}


def _revision(part: Partition | None) -> str | None:
    return None if part is None else part.metadata_revision


def _changes(objects: Objects, before: Partition | None, after: Partition | None) -> Changes:
    old = None if before is None or after is None else _old_manifest(objects, before)
    if old is None or after is None:
        return Changes(
            added=0 if after is None else after.samples,
            removed=0 if before is None else before.samples,
        )
    return count_changes(old, manifest.decode(objects.read(after.manifest)))


def _old_manifest(objects: Objects, part: Partition) -> Manifest | None:
    try:
        return manifest.decode(objects.read(part.manifest))
    except (ObjectMissingError, FormatError):
        return None
