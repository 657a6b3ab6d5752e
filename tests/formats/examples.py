"""One small valid value of each format."""

from __future__ import annotations

import hashlib

import numpy as np

from fsmount.formats import sample
from fsmount.formats.keyset import Keyset
from fsmount.formats.manifest import ManifestMeta, Row, Text
from fsmount.formats.table import PartitionTable, document_of_table
from fsmount.model import (
    DepthRule,
    Digest,
    ObjectRef,
    Parent,
    Partition,
    Recipe,
    ShardRef,
    VersionDocument,
)


def digest(text: str) -> Digest:
    return Digest(hashlib.sha256(text.encode()).hexdigest())


SHARDS = (ShardRef(digest("s0"), 4096, 2), ShardRef(digest("s1"), 2048, 1))


def partition(name: str, data: str = "data", metadata: str = "metadata") -> Partition:
    return Partition(
        name, digest(data), digest(metadata), 3, 999, ObjectRef(digest(name), 500), SHARDS, "f"
    )


TABLE = PartitionTable(
    DepthRule(2), "/data/é", Recipe(level=5), (partition("a/b"), partition("a/c"))
)
DOCUMENT = VersionDocument(
    **{
        name: getattr(document_of_table(ObjectRef(digest("t"), 77), TABLE), name)
        for name in VersionDocument.__dataclass_fields__
    }
    | {
        "tag": "v2",
        "parent": Parent("v1", digest("p")),
        "created_at": "2024-05-06T07:08:09Z",
        "message": 'two\nlines, "é"',
        "provenance": {"fsmount": "0.1"},
        "replaces": "v1",
    }
)
KEYSET = Keyset("train", digest("t"), ObjectRef(digest("k"), 12), 3, "label < 3")

ARRAYS = {"x": np.arange(3, dtype="<f4"), "y": np.array(1, ">i2")}
MEMBER = sample.encode(ARRAYS)
SIDECARS = (b'{"n": 1, "s": {"a": [1, 2]}, "m": 5}', None, b'{"n": 18446744073709551615}\n')
TEXTS = ((Text("m", "<U3", "hi"), Text("t", "|S2", "b")), (), (Text("t", "|S2", ""),))


def row(number: int) -> Row:
    """Row `number` of 0, 1, 2. The first has a field and another a text array named `m`."""
    return Row(
        key=f"a/b/{number}",
        shard=number // 2,
        index=number % 2,
        offset=512 + 1024 * (number % 2),
        size=300,
        raw_size=len(MEMBER),
        checksum=(1 << 64) - 1 - number,
        sha256=hashlib.sha256(MEMBER).digest(),
        schema=0,
        texts=TEXTS[number],
        sidecar=SIDECARS[(number + 1) % 3],
    )


ROWS = [row(0), row(1), row(2)]
META = ManifestMeta(
    "a/b", digest("data"), digest("metadata"), SHARDS,
    (sample.read_schema(MEMBER).header,), (), "zstd 1.5.7",
)  # fmt: skip
