"""Lists of samples, made of manifests that no file has."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from fsmount.formats import sample as samples
from fsmount.formats.manifest import SCHEMA, Manifest, ManifestMeta
from fsmount.formats.shard import BLOCK
from fsmount.model import Digest, ObjectRef, ShardRef
from fsmount.vfs import memory_file, sample_index
from fsmount.vfs.memory_file import MemoryFile
from fsmount.vfs.reads import ObjectHandle
from fsmount.vfs.sample_list import SampleList


def list_of(
    keys: Sequence[str], partition: str, schemas: tuple[bytes, ...] = (), **more: pa.Array
) -> SampleList:
    """A list of rows of these keys; every third has a sidecar as long as its number."""
    revision, shard = Digest("0" * 64), ShardRef(Digest("1" * 64), 1, len(keys))
    sidecars = [b"x" * n if n % 3 == 0 else None for n in range(len(keys))]
    schemas = schemas or (samples.read_schema(samples.encode({})).header,)
    columns = {
        field.name: pa.array([None if field.name == "__text__" else 0] * len(keys), field.type)
        for field in SCHEMA
        if field.name not in ("__key__", "__sidecar__", "__sha256__")
    }
    columns |= {"__key__": pa.array(keys, pa.string()), "__sidecar__": pa.array(sidecars)}
    meta = ManifestMeta(partition, revision, revision, (shard,), schemas, (), "")
    manifest = Manifest(meta, pa.table({**columns, **more}))
    return SampleList(MemoryFile(sample_index.encode(manifest, partition)), partition)


def sample_of(
    member: bytes, header: bytes | None = None, payload: bytes | None = None, **more: pa.Array
) -> tuple[ObjectHandle, SampleList]:
    """A shard with the payload of `member`, and a list of that sample; or with what is given."""
    payload = payload or samples.compress(member, 1)
    ref = ObjectRef(Digest("1" * 64), BLOCK + len(payload))
    shard = ObjectHandle(0, memory_file.create(), ref, "it", keep_cache=True)
    memory_file.write(shard.fd, payload, BLOCK)
    columns = {
        "__offset__": pa.array([BLOCK]),
        "__size__": pa.array([len(payload)]),
        "__raw_size__": pa.array([len(member)]),
        "__checksum__": pa.array([samples.checksum(payload)], pa.uint64()),
    }
    schemas = (header or samples.read_schema(member).header,)
    return shard, list_of(["x"], "p", schemas, **columns, **more)
