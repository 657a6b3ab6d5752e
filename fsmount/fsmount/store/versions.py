"""From a reference to a version whose parts are known to belong together."""

from __future__ import annotations

from fsmount.errors import FormatError, IntegrityError, VersionNotFoundError
from fsmount.formats import table as tables
from fsmount.formats.table import PartitionTable
from fsmount.model import (
    Digest,
    LatestRef,
    ObjectRef,
    Ref,
    TableRef,
    TagRef,
    VersionDocument,
)
from fsmount.store.objects import Objects
from fsmount.store.refs import Refs, Tombstone

_PARQUET = b"PAR1"  # how every Parquet file begins
_NAMED = 10  # so many versions are named in an error


def resolve(refs: Refs, objects: Objects, ref: Ref) -> VersionDocument:
    """The document that `ref` means; VersionNotFoundError names what there is instead."""
    match ref:
        case TagRef(tag):
            return _by_tag(refs, tag)
        case LatestRef():
            return _by_latest(refs)
        case TableRef(prefix):
            return _by_table(refs, objects, prefix)


def read_table(objects: Objects, document: VersionDocument) -> PartitionTable:
    """The verified table of `document`; IntegrityError if the two do not belong together."""
    table = _decode(objects, document.table)
    found = tables.document_of_table(document.table, table)
    for name in ("content_revision", "rule", "recipe", "source_namespace", "totals"):
        told, seen = getattr(document, name), getattr(found, name)
        if told != seen:
            raise IntegrityError(
                f"version {document.tag!r} says its {name.replace('_', ' ')} is {told}, "
                f"but its table {objects.path(document.table.digest)} has {seen}"
            )
    return table


def objects_of(document: VersionDocument, table: PartitionTable) -> dict[Digest, ObjectRef]:
    """All objects that the version needs, its table first."""
    needed = [document.table, *(ref for part in table.partitions for ref in part.objects())]
    return {ref.digest: ref for ref in needed}


def _by_tag(refs: Refs, tag: str) -> VersionDocument:
    found = refs.read(tag)
    if isinstance(found, Tombstone):
        raise VersionNotFoundError(f"version {tag!r} was pruned from {refs.root}")
    if found is None:
        raise VersionNotFoundError(f"no version {tag!r} in {refs.root}: {_what_exists(refs)}")
    return found


def _by_latest(refs: Refs) -> VersionDocument:
    latest = refs.latest()
    if latest is None:
        raise VersionNotFoundError(f"no latest version in {refs.root}: {_what_exists(refs)}")
    document = _by_tag(refs, latest.tag)
    if document.table.digest != latest.table:
        raise IntegrityError(
            f"latest names version {latest.tag!r} with table {latest.table}, "
            f"but {refs.path(latest.tag)} has table {document.table.digest}"
        )
    return document


def _by_table(refs: Refs, objects: Objects, prefix: str) -> VersionDocument:
    known = {document.table.digest: document.table for document in refs.survey().versions}
    found = [ref for digest, ref in known.items() if digest.startswith(prefix)]
    if not found:
        found = [ref for digest in objects.matching(prefix) if (ref := _table_at(objects, digest))]
    if not found:
        raise VersionNotFoundError(
            f"no partition table sha256:{prefix} in {refs.root}: {_what_exists(refs)}"
        )
    if len(found) > 1:
        candidates = ", ".join(sorted(f"sha256:{ref.digest}" for ref in found))
        raise VersionNotFoundError(f"sha256:{prefix} means more than one table: {candidates}")
    return tables.document_of_table(found[0], _decode(objects, found[0]))


def _table_at(objects: Objects, digest: Digest) -> ObjectRef | None:
    """The reference of the object `digest` if it is a partition table."""
    ref = ObjectRef(digest, objects.size(digest))
    if objects.begins_with(ref, _PARQUET):
        try:
            tables.decode(objects.read(ref))
        except IntegrityError:
            raise
        except FormatError:
            return None
        return ref
    return None


def _decode(objects: Objects, ref: ObjectRef) -> PartitionTable:
    try:
        return tables.decode(objects.read(ref))
    except IntegrityError:
        raise
    except FormatError as error:
        raise FormatError(f"object {objects.path(ref.digest)}: {error}") from error


def _what_exists(refs: Refs) -> str:
    tags = [str(document.tag) for document in refs.survey().versions]
    if not tags:
        return "the store has no versions yet"
    more = f" and {len(tags) - _NAMED} more" if len(tags) > _NAMED else ""
    return f"it has {', '.join(tags[-_NAMED:])}{more}"
