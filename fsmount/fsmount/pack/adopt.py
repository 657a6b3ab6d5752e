"""Taking over shards that anybody may have written: every byte of them is looked at.

A manifest and a shard that agree with each other prove nothing. But a shard that is, byte for byte,
what we would write of its payloads, each of which decodes to the fingerprint of its row, holds what
these fingerprints name. Whoever knows the fingerprints from the source can then believe the rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from fsmount.errors import FormatError, IntegrityError, StoreError
from fsmount.formats import sample, shard
from fsmount.model import ShardRef
from fsmount.pack.earlier import Earlier
from fsmount.store import Objects

_RELEASE = re.compile(r"zstd \d{1,4}\.\d{1,4}\.\d{1,4}")


def proven(objects: Objects, found: Mapping[str, Earlier], limit: int) -> dict[str, Earlier]:
    """Those of the samples `found`, in shard order, whose shards hold just what their rows say.

    What a row says of texts and sidecar is not proven. Samples of over `limit` bytes are not.
    """
    shards: dict[int, list[Earlier]] = {}
    for earlier in found.values():
        shards.setdefault(earlier.row.shard, []).append(earlier)
    good = {number for number, members in shards.items() if _is_proven(objects, members, limit)}
    return {key: earlier for key, earlier in found.items() if earlier.row.shard in good}


def is_release(compressor: str) -> bool:
    """Whether a manifest's `compressor` is the name of a release, as those of ours are."""
    return bool(_RELEASE.fullmatch(compressor))


def _is_proven(objects: Objects, members: Sequence[Earlier], limit: int) -> bool:
    try:
        _check_shard(objects, members[0].shard, members, limit)
    except (FormatError, StoreError):
        return False
    return True


def _check_shard(objects: Objects, ref: ShardRef, members: Sequence[Earlier], limit: int) -> None:
    """Raise IntegrityError unless the object is the shard of `members` and has its digest."""
    objects.verify(ref)
    if ref.samples != len(members):
        raise IntegrityError(f"shard {ref.digest} does not hold {len(members)} samples")
    with open(objects.open(ref), "rb") as file:
        for index, earlier in enumerate(members):
            row = earlier.row
            header = shard.member_header(shard.member_name(row.key), row.size)
            found = file.read(len(header))
            if found != header or (row.index, row.offset) != (index, file.tell()):
                raise IntegrityError(f"sample {row.key!r} does not lie where its row says")
            if row.raw_size > limit:
                raise IntegrityError(f"sample {row.key!r} is larger than a sample may be")
            _check_payload(file.read(row.size), earlier)
            if any(file.read(len(shard.padding(row.size)))):
                raise IntegrityError(f"something follows sample {row.key!r} in its shard")
        if file.read(len(shard.END) + 1) != shard.END:
            raise IntegrityError(f"shard {ref.digest} does not end where it must")


def _check_payload(payload: bytes, earlier: Earlier) -> None:
    row = earlier.row
    if sample.checksum(payload) != row.checksum:
        raise IntegrityError(f"the payload of sample {row.key!r} is damaged")
    member = sample.decompress(payload, row.raw_size)
    same = hashlib.sha256(member).digest() == row.sha256
    if not same or sample.read_schema(member).header != earlier.header:
        raise IntegrityError(f"the payload of sample {row.key!r} is another one")
