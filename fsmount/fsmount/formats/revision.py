"""Revisions: what names the content of a partition and of a version.

Each is the SHA-256 of a byte string that docs/format.md, "Revisions", spells out. No library's
version, no time, no place of the source has a part in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fsmount.formats.checked import dump_compact
from fsmount.formats.document import recipe_to_json
from fsmount.model import Digest, Partition, Recipe


def data_revision(recipe: Recipe, fingerprints: Iterable[tuple[str, bytes]]) -> Digest:
    """Name a partition's samples, given as (key, SHA-256 of the member), and the recipe."""
    digest = hashlib.sha256(b"fsmount data revision 1\n")
    digest.update(dump_compact(recipe_to_json(recipe)).encode() + b"\n")
    for key, fingerprint in _by_key(fingerprints):
        digest.update(fingerprint + _framed(key.encode()))
    return Digest(digest.hexdigest())


def metadata_revision(data: Digest, metadata: Iterable[tuple[str, bytes]]) -> Digest:
    """Name a data revision and what its samples carry beside: pairs (key, `metadata_bytes`)."""
    digest = hashlib.sha256(b"fsmount metadata revision 1\n" + data.encode() + b"\n")
    for _, metadata_of_sample in _by_key(metadata):
        digest.update(hashlib.sha256(metadata_of_sample).digest())
    return Digest(digest.hexdigest())


def metadata_bytes(texts: str | None, sidecar: bytes | None) -> bytes:
    """What a metadata revision hashes of one sample: its text arrays' JSON and its sidecar."""
    framed_texts = b"\0" if texts is None else b"\1" + _framed(texts.encode())
    return framed_texts + (b"\0" if sidecar is None else b"\1" + sidecar)


def content_revision(partitions: Iterable[Partition]) -> Digest:
    """Name the content of a version: its partitions' ids with their two revisions."""
    digest = hashlib.sha256(b"fsmount content revision 1\n")
    for part in sorted(partitions, key=lambda part: part.id.encode()):
        digest.update(_framed(part.id.encode()))
        digest.update(bytes.fromhex(part.data_revision) + bytes.fromhex(part.metadata_revision))
    return Digest(digest.hexdigest())


def _by_key(pairs: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return sorted(pairs, key=lambda pair: pair[0].encode())


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data
