"""Revisions: what they depend on, what they don't, and their exact bytes."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

from examples import SHARDS, digest, partition
from hypothesis import given
from hypothesis import strategies as st

from fsmount.formats import revision
from fsmount.model import Digest, Recipe

PAIRS = st.lists(
    st.tuples(st.text(max_size=5), st.binary(min_size=32, max_size=32)),
    max_size=5,
    unique_by=lambda pair: pair[0],
)
SAMPLES = [("b", bytes(range(32))), ("a/é", b"\xff" * 32)]
METADATA = [("b", b"\0\0"), ("a/é", b"\0\1{}")]


@given(PAIRS, st.randoms())
def test_the_order_of_samples_does_not_matter(
    pairs: list[tuple[str, bytes]], random: object
) -> None:
    mixed = list(pairs)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert revision.data_revision(Recipe(), mixed) == revision.data_revision(Recipe(), pairs)
    one, other = (revision.metadata_revision(digest("d"), each) for each in (pairs, mixed))
    assert one == other


def test_the_data_revision_depends_on_every_part() -> None:
    variants = [
        revision.data_revision(recipe, samples)
        for recipe, samples in [
            (Recipe(), SAMPLES),
            (Recipe(), SAMPLES[:1]),
            (Recipe(), [("c", SAMPLES[0][1]), SAMPLES[1]]),
            (Recipe(), [("b", bytes(32)), SAMPLES[1]]),
            (Recipe(), [("b", SAMPLES[1][1]), ("a/é", SAMPLES[0][1])]),
            (Recipe(level=4), SAMPLES),
            (Recipe(shard_bytes=1), SAMPLES),
            (Recipe(order_seed=1), SAMPLES),
        ]
    ]
    assert len(set(variants)) == len(variants)


def test_the_metadata_revision_tells_all_metadata_apart() -> None:
    """No two contents of text arrays and sidecar give the same bytes."""
    texts = (None, "", "{}", "\0", '{"a":["<U1","x"]}')
    sidecars = (None, b"", b"\0", b"{}", b"{} ", b"\1\0\0\0\0")
    framed = {revision.metadata_bytes(text, sidecar) for text in texts for sidecar in sidecars}
    assert len(framed) == len(texts) * len(sidecars)
    variants = {
        revision.metadata_revision(data, [("a", one), ("b", two)])
        for data in (digest("d"), digest("e"))
        for one in framed
        for two in (b"\0\0", b"\0\1{}")
    }
    assert len(variants) == 2 * len(framed) * 2


def test_the_content_revision_depends_on_ids_and_revisions_alone() -> None:
    parts = [partition("a"), partition("b/c")]
    found = revision.content_revision(parts)
    assert revision.content_revision(parts[::-1]) == found
    moved = replace(
        parts[0], source_fingerprint="x", raw_bytes=1, shards=SHARDS[::-1], manifest=SHARDS[0]
    )
    assert revision.content_revision([moved, parts[1]]) == found
    others = [
        revision.content_revision(each)
        for each in (
            [],
            parts[:1],
            [partition("a", data="x"), parts[1]],
            [partition("a", metadata="x"), parts[1]],
            [partition("ab"), partition("/c"[1:])],
        )
    ]
    assert len({found, *others}) == 6


def test_vectors() -> None:
    """Fixed for ever: a store's partitions are compared by these."""
    data = revision.data_revision(Recipe(shard_bytes=4 << 30), SAMPLES)
    metadata = revision.metadata_revision(data, METADATA)
    assert data == "f1b42549f9346910531710ea3e30f5393ede0f6101d4554d53243858688f72b0"
    assert metadata == "5bb82b5337c6e1aa956e6d30beae89b0a848627f495bcdc60801cdb49929b7af"
    text = revision.metadata_bytes('{"t":["<U1","x"]}', b"{}")
    assert text.hex() == "01110000007b2274223a5b223c5531222c2278225d7d017b7d"
    part = replace(partition("a/é"), data_revision=data, metadata_revision=metadata)
    assert (
        revision.content_revision([part, partition("b")])
        == "3ae07f70be58e68f48d21ccff12692579dffd4ab9c2f39fda6c06a8074a939d8"
    )


def test_the_bytes_are_as_specified() -> None:
    """The same again, spelled out from docs/format.md."""
    recipe = (
        '{"codec":"safetensors.zst","format":1,"level":3,"order_seed":0,"shard_bytes":4294967296}'
    )
    framed = [
        fingerprint + struct.pack("<I", len(key.encode())) + key.encode()
        for key, fingerprint in (SAMPLES[1], SAMPLES[0])
    ]
    content = b"fsmount data revision 1\n" + recipe.encode() + b"\n" + b"".join(framed)
    data = Digest(hashlib.sha256(content).hexdigest())
    assert revision.data_revision(Recipe(shard_bytes=4 << 30), SAMPLES) == data
    hashes = [hashlib.sha256(each).digest() for each in (METADATA[1][1], METADATA[0][1])]
    content = f"fsmount metadata revision 1\n{data}\n".encode() + b"".join(hashes)
    metadata = hashlib.sha256(content).hexdigest()
    assert revision.metadata_revision(data, METADATA) == metadata
