"""Where a partition's members are cut into shards: by their hashes and decoded bytes alone.

A range of hashes is one shard if it is small enough, else its two halves are looked at. So a cut
does not depend on what was packed before, and a change moves none but those of its own range.
docs/format.md, "Shard", specifies it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

BITS = 64  # of a member's hash


def cut(members: Sequence[tuple[int, int]], limit: int, bits: int = BITS) -> list[int]:
    """How many members each shard has, in order.

    `members` are (hash, decoded bytes), sorted by hash, and equal in all but the last `bits` bits
    of it. A shard has at most `limit` decoded bytes, or one member, or members of one hash.
    """
    if not members:
        return []
    if sum(size for _, size in members) <= limit or members[0][0] == members[-1][0]:
        return [len(members)]
    half = bisect_left(members, 1, key=lambda member: member[0] >> (bits - 1) & 1)
    return cut(members[:half], limit, bits - 1) + cut(members[half:], limit, bits - 1)


class CutStream:
    """What `cut` says of members that come one by one, each with its size only when it comes.

    It holds back no more than `limit` decoded bytes and one member. All held members lie in one
    range of hashes, which is a shard if nothing more comes than it can hold. The range above it, if
    there is one, is known to hold more than `limit`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: list[tuple[int, int]] = []
        self._size = 0  # decoded bytes of what is held
        self._bits = BITS  # the range: hashes that are equal in all but their last so many bits
        self.boundary = 0  # how many of the held members would be cut off next; 0: none

    def add(self, hashed: int, size: int) -> list[int]:
        """Take in the next member.

        Returns how many members each shard has that is complete now; this one is in none of them.
        """
        complete = []
        if self._held and (hashed ^ self._held[0][0]) >> self._bits:
            complete.append(len(self._held))
            self._bits = _highest(hashed ^ self._held[-1][0])
            self._drop(len(self._held))
        self._append(hashed, size)
        while self._size > self._limit and self.boundary:
            complete.append(self.boundary)
            self._bits = _highest(self._held[0][0] ^ hashed)
            self._drop(self.boundary)
        return complete

    def _append(self, hashed: int, size: int) -> None:
        if self._held:
            first, last = self._held[0][0], self._held[-1][0]
            if _highest(first ^ hashed) > _highest(first ^ last):
                self.boundary = len(self._held)
        self._held.append((hashed, size))
        self._size += size

    def _drop(self, count: int) -> None:
        held, self._held = self._held[count:], []
        self._size = self.boundary = 0
        for hashed, size in held:
            self._append(hashed, size)


def _highest(difference: int) -> int:
    """The place of the highest bit that is set, -1 if none is."""
    return difference.bit_length() - 1
