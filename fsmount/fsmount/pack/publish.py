"""From partitions to a version: the table object, the document, the store's publish."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import version

from fsmount.errors import LatestMovedError
from fsmount.formats import table
from fsmount.formats.table import PartitionTable
from fsmount.model import Parent, TagRef, Totals, VersionDocument
from fsmount.store import Store
from fsmount.store.inside import StorePath

_LIBRARIES = ("fsmount", "numpy", "pyarrow", "xxhash", "zstandard")


def publish(
    store: Store,
    content: PartitionTable,
    *,
    tag: str,
    parent: Parent | None,
    message: str,
    replaces: str | None,
    staging: StorePath,
) -> tuple[VersionDocument, bool]:
    """Publish `content` under `tag`; returns its document, and whether anything had to be done.

    `replaces` is the tag that `latest` names so far: if it names another one by now, that one
    stays. Raises as `Store.publish` does otherwise.
    """
    document = VersionDocument(
        tag=tag,
        table=store.objects.put(table.encode(content), staging),
        parent=parent,
        rule=content.rule,
        source_namespace=content.source_namespace,
        recipe=content.recipe,
        content_revision=content.content_revision,
        totals=Totals.of(content.partitions),
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        message=message,
        provenance=provenance(),
        replaces=replaces,
    )
    try:
        done = store.publish(document, staging)
    except LatestMovedError:  # published all the same; another pack was faster with `latest`
        done = True
    return store.resolve(TagRef(tag)), done


def provenance() -> dict[str, str]:
    """The releases of the tools that make shards and manifests here."""
    return {"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}}
