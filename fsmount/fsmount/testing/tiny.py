"""Tiny real stores: every byte goes through the formats and the store, nothing is faked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsmount.formats import keyset as keysets
from fsmount.formats import sample as samples
from fsmount.formats import shard as shards
from fsmount.formats import table as tables
from fsmount.formats.keyset import Keyset
from fsmount.formats.manifest import ManifestMeta, Row, Text
from fsmount.formats.revision import data_revision, metadata_bytes, metadata_revision
from fsmount.formats.table import PartitionTable
from fsmount.model import (
    DirectoryRule,
    Parent,
    Partition,
    Recipe,
    Rule,
    ShardRef,
    Totals,
    Version,
    VersionDocument,
)
from fsmount.store.inside import StorePath
from fsmount.store.store import Store
from fsmount.testing.one_schema import conform, encode_alone

CREATED_AT = "2024-05-06T07:08:09Z"
RECIPE = Recipe()


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a tiny store."""

    key: str
    arrays: Mapping[str, NDArray[Any]]
    texts: tuple[Text, ...] = ()
    sidecar: bytes | None = None


@dataclass(slots=True)
class _Shard:
    data: bytearray = field(default_factory=bytearray)
    samples: int = 0


def numbered(key: str, number: int, size: int = 100) -> Sample:
    """A sample of `size` floats and a label, told by `number`; every other one has a sidecar."""
    values = np.random.default_rng(number).standard_normal(size).astype(np.float32)
    sidecar = b'{"number": %d, "name": "n%d"}\n' % (number, number) if number % 2 == 0 else None
    return Sample(key, {"label": np.array(number), "values": values}, (), sidecar)


def publish(
    store: Store,
    tag: str,
    partitions: Mapping[str, Sequence[Sample]],
    *,
    rule: Rule | None = None,
    samples_a_shard: int = 3,
    created_at: str = CREATED_AT,
) -> Version:
    """Write `partitions` (id to samples) into `store` and publish them as `tag`."""
    with store.staging() as staging:
        parts = tuple(
            _write_partition(store, staging, ident, partitions[ident], samples_a_shard)
            for ident in sorted(partitions, key=str.encode)
        )
        rule = rule or DirectoryRule()
        return _publish(store, staging, tag, parts, rule=rule, created_at=created_at)


def publish_crowded(store: Store, tag: str, *, shards: int, samples: int) -> Version:
    """`shards/crowd` has `shards` names of one object, `samples/many` has `samples` samples.

    Each sample has a sidecar, so it is three files. The manifest of `crowd` tells of one sample.
    """
    arrays = {"label": np.array(1)}
    many = [Sample(f"many/{n:06d}", arrays, (), b"{}") for n in range(samples)]
    with store.staging() as staging:
        one = _write_partition(store, staging, "crowd", [numbered("crowd/x", 1)], 1)
        crowd = replace(one, samples=shards, shards=one.shards * shards)
        parts = (crowd, _write_partition(store, staging, "many", many, samples))
        rule = DirectoryRule()
        return _publish(store, staging, tag, parts, rule=rule, created_at=CREATED_AT)


def put_keyset(store: Store, version: Version, name: str, keys: Sequence[str]) -> Keyset:
    """Add a key-set to a version."""
    with store.staging() as staging:
        ref = store.objects.put(keysets.encode_keys(keys), staging)
        keyset = Keyset(name, version.document.table.digest, ref, len(keys), None)
        store.put_keyset(keyset, staging)
    return keyset


def _publish(
    store: Store,
    staging: StorePath,
    tag: str,
    parts: tuple[Partition, ...],
    *,
    rule: Rule,
    created_at: str,
) -> Version:
    parts = _conform(store, staging, parts)
    table = PartitionTable(rule, "", RECIPE, parts)
    ref = store.objects.put(tables.encode(table), staging)
    latest = store.latest()
    document = VersionDocument(
        tag=tag,
        table=ref,
        parent=None if latest is None else _parent(store, latest),
        rule=table.rule,
        source_namespace="",
        recipe=RECIPE,
        content_revision=table.content_revision,
        totals=Totals.of(parts),
        created_at=created_at,
        message="",
        provenance={},
        replaces=latest,
    )
    store.publish(document, staging)
    return Version(document, parts)


def _conform(
    store: Store, staging: StorePath, parts: tuple[Partition, ...]
) -> tuple[Partition, ...]:
    found = conform([store.objects.read(part.manifest) for part in parts])
    return tuple(
        replace(
            part,
            manifest=store.objects.put(each.data, staging),
            fields=each.fields,
            schema=each.schema,
        )
        for part, each in zip(parts, found, strict=True)
    )


def _parent(store: Store, latest: str) -> Parent:
    tables_by_tag = {document.tag: document.table.digest for document in store.versions()}
    return Parent(latest, tables_by_tag[latest])


def _write_partition(
    store: Store, staging: StorePath, ident: str, content: Sequence[Sample], samples_a_shard: int
) -> Partition:
    members = {sample.key: (sample, samples.encode(sample.arrays)) for sample in content}
    schemas: list[bytes] = []
    shard_data: list[_Shard] = []
    rows: list[Row] = []
    for number, key in enumerate(shards.member_order(members, RECIPE.order_seed)):
        if number % samples_a_shard == 0:
            shard_data.append(_Shard())
        sample, member = members[key]
        header = samples.read_schema(member).header
        if header not in schemas:
            schemas.append(header)
        place = (len(shard_data) - 1, schemas.index(header))
        rows.append(_append(shard_data[-1], place, sample, member))
    refs = []
    for shard in shard_data:
        ref = store.objects.put(bytes(shard.data) + shards.END, staging)
        refs.append(ShardRef(ref.digest, ref.size, shard.samples))
    data = data_revision(RECIPE, [(row.key, row.sha256) for row in rows])
    beside = [(row.key, metadata_bytes(row.texts_json(), row.sidecar)) for row in rows]
    metadata = metadata_revision(data, beside)
    meta = ManifestMeta(ident, data, metadata, tuple(refs), tuple(schemas), (), "test")
    return Partition(
        id=ident,
        data_revision=data,
        metadata_revision=metadata,
        samples=len(rows),
        raw_bytes=sum(row.raw_size for row in rows),
        manifest=store.objects.put(encode_alone(rows, meta), staging),
        shards=tuple(refs),
        source_fingerprint="",
    )


def _append(shard: _Shard, place: tuple[int, int], sample: Sample, member: bytes) -> Row:
    payload = samples.compress(member, RECIPE.level)
    shard.data += shards.member_header(shards.member_name(sample.key), len(payload))
    offset = len(shard.data)
    shard.data += payload + shards.padding(len(payload))
    shard.samples += 1
    return Row(
        key=sample.key,
        shard=place[0],
        index=shard.samples - 1,
        offset=offset,
        size=len(payload),
        raw_size=len(member),
        checksum=samples.checksum(payload),
        sha256=hashlib.sha256(member).digest(),
        schema=place[1],
        texts=sample.texts,
        sidecar=sample.sidecar,
    )
