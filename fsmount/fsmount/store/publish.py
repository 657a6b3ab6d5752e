"""Publishing: a version exists from the instant its document has its name.

The order of steps is what makes a crash at any instant harmless: the objects are durable, the
document is linked, its objects are looked for once more, `latest` moves. Each run of the same tag
and content goes through all steps and makes durable what it relies on, so it completes whatever an
earlier one left undone.
"""

from __future__ import annotations

from fsmount.errors import (
    InvalidNameError,
    LatestMovedError,
    ObjectMissingError,
    StoreError,
    VersionExistsError,
)
from fsmount.model import Digest, VersionDocument
from fsmount.store import durable
from fsmount.store.inside import StorePath
from fsmount.store.objects import Objects
from fsmount.store.refs import LATEST_LOCK, Latest, Refs, Tombstone
from fsmount.store.versions import objects_of, read_table


def publish(refs: Refs, objects: Objects, document: VersionDocument, staging: StorePath) -> bool:
    """Publish `document` under its tag and move `latest` from `document.replaces` to it.

    True if anything was done, False if a version of this tag and content revision was complete.

    Raises VersionExistsError if the tag is pruned or has other content; ObjectMissingError or
    IntegrityError if the objects are not as the document says (nothing is published then, unless
    they went missing in that very instant); LatestMovedError if the version is published but
    `latest` named another by then; StoreWriteError.
    """
    if document.tag is None:
        raise InvalidNameError("a version needs a tag to be published")
    fresh = False
    if refs.read(document.tag) is None:
        objects.sync(_check(objects, document))
        refs.sync()
        fresh = refs.add(document, staging)
    published = _published(refs, document)
    refs.sync()
    try:
        needed = _check(objects, published)
    except ObjectMissingError as error:
        raise ObjectMissingError(
            f"version {published.tag!r} is published but {error}; "
            "pack the same content under the same tag again"
        ) from error
    if not fresh:
        objects.sync(needed)
    return _move_latest(refs, published, staging, fresh=fresh) or fresh


def _check(objects: Objects, document: VersionDocument) -> set[Digest]:
    """Check that all objects of `document` are there, and return their digests."""
    needed = objects_of(document, read_table(objects, document))
    for ref in needed.values():
        objects.check(ref)
    return set(needed)


def _published(refs: Refs, document: VersionDocument) -> VersionDocument:
    """The document that stands under the tag, ours or one with the same content."""
    tag = str(document.tag)
    found = refs.read(tag)
    if found is None:
        raise StoreError(f"{refs.path(tag)} was removed while it was published")
    if isinstance(found, Tombstone):
        raise VersionExistsError(
            f"tag {tag!r} belongs to a pruned version and is never used again; choose another tag"
        )
    if found.content_revision != document.content_revision:
        raise VersionExistsError(
            f"version {tag!r} exists with other content (revision {found.content_revision[:12]}, "
            f"not {document.content_revision[:12]}); choose another tag"
        )
    return found


def _move_latest(refs: Refs, document: VersionDocument, staging: StorePath, *, fresh: bool) -> bool:
    """Compare-and-swap `latest`; True if it moved.

    Only a `fresh` version minds that `latest` moved elsewhere: for one that a former run published
    that is what later versions do.
    """
    tag = str(document.tag)
    with durable.locked(StorePath(refs.root, LATEST_LOCK)):
        now = refs.latest()
        named = None if now is None else now.tag
        if named == tag:
            durable.sync_directory(StorePath(refs.root))  # another process may just have moved it
        elif named == document.replaces:
            refs.set_latest(Latest(tag, document.table.digest), staging)
            return True
        elif fresh:
            raise LatestMovedError(
                f"version {tag!r} is published, but latest names {named or 'no version'} now, not "
                f"{document.replaces or 'no version'} as when it was made, and stays there; "
                f"use {tag!r} by its tag, or pack onto latest again under a new tag"
            )
    return False
