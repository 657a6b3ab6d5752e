"""Manifests of one version made by hand, which must all have one schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsmount.formats import manifest
from fsmount.formats.checked import dump_compact
from fsmount.formats.kinds import settle, unify
from fsmount.formats.manifest import ManifestMeta, Row


@dataclass(frozen=True, slots=True)
class Conformed:
    """A manifest as its version has it, and what the partition table says of it."""

    data: bytes
    fields: str
    schema: str


def encode_alone(rows: Sequence[Row], meta: ManifestMeta) -> bytes:
    """A manifest as the only one of its version."""
    return manifest.encode(rows, meta, settle(manifest.fields_of(rows)))


def conform(manifests: Sequence[bytes]) -> list[Conformed]:
    """The manifests of one version, made of such as they would be alone."""
    found = [manifest.decode(data) for data in manifests]
    rows = [each.rows() for each in found]
    fields = list(map(manifest.fields_of, rows))
    schema = settle(unify(fields))
    return [
        Conformed(manifest.encode(part, each.meta, schema), own.dump(), dump_compact(schema))
        for each, part, own in zip(found, rows, fields, strict=True)
    ]
