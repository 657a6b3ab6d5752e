"""Keys and frames made to do harm, every digest of which is right: an error that says where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hostile import at, change_manifest
from small_versions import add_keyset, build, numbered

from fsmount.errors import FormatError, IntegrityError
from fsmount.formats import manifest, sample
from fsmount_loader import ShardDataset
from fsmount_loader.webdataset import ShardSamples, decoder

READ: list[dict[str, Any]] = [
    {"keys": True},
    {"columns": ["n", "__key__"]},
    {"where": "__key__ <> 'q'", "keys": True},
    {"keyset": "some"},
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = build(tmp_path / "v", {"a": [numbered(4)], "b": [numbered(3, 1)]})
    add_keyset(made, "some", ["a/0000", "a/0001", "b/0001"])
    return made


@pytest.mark.parametrize("options", READ)
@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("a/0001", "partition 'b': key 'a/0001' is in the manifest of partition 'a' too"),
        ("b/0001", "partition 'b': manifest: key 'b/0001' stands twice"),
        ("../../etc/x", "partition 'b': manifest: .*'../../etc/x'"),
        ("a\0b", "partition 'b': manifest: "),
    ],
)
def test_keys_that_are_none_or_stand_twice(
    root: Path, options: dict[str, Any], key: str, message: str
) -> None:
    change_manifest(root, "b", columns={"__key__": at(0, key)})
    for kind in (ShardDataset, ShardSamples):
        with pytest.raises(FormatError, match=message) as caught:
            next(iter(kind(root, batch_size=7, max_pad_fraction=1, **options)))
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("kind", [ShardDataset, ShardSamples])
def test_a_frame_that_lies_about_its_size(root: Path, kind: type[ShardDataset]) -> None:
    """Though its checksum is the manifest's."""
    row = manifest.decode((root / "manifests" / "b.parquet").read_bytes()).rows()[1]
    shard = root / "shards" / "b" / "000000.tar"
    data = bytearray(shard.read_bytes())
    data[row.offset + 5] ^= 64  # of the content size in the frame's header
    shard.write_bytes(data)
    payload = bytes(data[row.offset :][: row.size])
    change_manifest(root, "b", columns={"__checksum__": at(1, sample.checksum(payload))})
    data = kind(root, batch_size=7, max_pad_fraction=1)
    message = rf"b/000000.tar: sample 'b/0001' at offset {row.offset}: .* not hold {row.raw_size} b"
    with pytest.raises(IntegrityError, match=message):
        list(data)


@pytest.mark.parametrize("size", [1 << 40, (1 << 64) - 2])
def test_a_frame_that_claims_what_no_payload_holds(size: int) -> None:
    frame = bytes.fromhex("28b52ffde0") + size.to_bytes(8, "little") + b"\x01\x00\x00" + bytes(4)
    with pytest.raises(IntegrityError, match="a payload of 20 bytes that can't be decompressed"):
        decoder("x.safetensors.zst", frame)
