"""Versions put together by hand: true tables and documents over objects of any bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from fsmount.formats import table as tables
from fsmount.formats.table import PartitionTable
from fsmount.model import (
    Digest,
    DirectoryRule,
    Partition,
    Recipe,
    ShardRef,
    Totals,
    Version,
    VersionDocument,
)
from fsmount.store import Store


def put_version(
    store: Store,
    tag: str,
    content: Mapping[str, bytes],
    *,
    replaces: str | None = None,
    created_at: str = "2024-05-06T07:08:09Z",
    message: str = "",
) -> VersionDocument:
    """Put the objects of a version, one partition of one shard for each of `content`.

    Returns the document, which is not yet published. The manifests are no Parquet files.
    """
    with store.staging() as staging:
        partitions = tuple(
            _put_partition(store, name, data, staging) for name, data in sorted(content.items())
        )
        table = PartitionTable(DirectoryRule(), "tiny", Recipe(), partitions)
        ref = store.objects.put(tables.encode(table), staging)
    return VersionDocument(
        tag=tag,
        table=ref,
        parent=None,
        rule=table.rule,
        source_namespace=table.source_namespace,
        recipe=table.recipe,
        content_revision=table.content_revision,
        totals=Totals.of(partitions),
        created_at=created_at,
        message=message,
        provenance={"fsmount": "0"},
        replaces=replaces,
    )


def publish_version(
    store: Store, tag: str, content: Mapping[str, bytes], *, replaces: str | None = None
) -> bool:
    """Put and publish a version; returns and raises as `Store.publish`."""
    document = put_version(store, tag, content, replaces=replaces)
    with store.staging() as staging:
        return store.publish(document, staging)


def verify_version(store: Store, version: Version) -> None:
    """Hash every object of `version`; raises ObjectMissingError or IntegrityError."""
    for partition in version.partitions:
        for ref in partition.objects():
            store.objects.verify(ref)


def _put_partition(store: Store, name: str, data: bytes, staging: str) -> Partition:
    revision = Digest(hashlib.sha256(data).hexdigest())
    shard = store.objects.put(data, staging)
    return Partition(
        id=name,
        data_revision=revision,
        metadata_revision=revision,
        samples=1,
        raw_bytes=len(data),
        manifest=store.objects.put(b"manifest of " + data, staging),
        shards=(ShardRef(shard.digest, shard.size, 1),),
        source_fingerprint="",
    )
