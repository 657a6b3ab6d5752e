"""Attributes of the nodes of one version."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from fsmount.errors import FormatError
from fsmount.vfs.filesystem import FOREVER, Attr, Entry, Kind, Owner

UNKNOWN_LINKS = 1  # of a directory whose subdirectories were not counted; `find` understands it


@dataclass(frozen=True, slots=True)
class Attrs:
    """Makes the attributes of nodes that share an owner and a time (nanoseconds since 1970)."""

    owner: Owner
    time_ns: int

    def directory(self, node: int, links: int, ttl: float = FOREVER) -> Entry:
        """A directory; `links` is 2 and the number of its subdirectories."""
        return self._entry(node, Kind.DIRECTORY, links, 0, ttl)

    def file(self, node: int, size: int) -> Entry:
        """A file of `size` bytes."""
        return self._entry(node, Kind.FILE, 1, size, FOREVER)

    def symlink(self, node: int, target: str, ttl: float) -> Entry:
        """A symbolic link to `target`."""
        return self._entry(node, Kind.SYMLINK, 1, len(target.encode()), ttl)

    def _entry(self, node: int, kind: Kind, links: int, size: int, ttl: float) -> Entry:
        owner = self.owner
        mode = owner.mode(kind)
        return Entry(Attr(node, kind, mode, links, owner.uid, owner.gid, size, self.time_ns), ttl)


def nanoseconds(created_at: str) -> int:
    """The time of a version document as nanoseconds since 1970; FormatError if it is none."""
    try:
        moment = datetime.strptime(created_at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError as error:
        raise FormatError(f"not a time: {created_at!r}") from error
    return int(moment.timestamp()) * 10**9
