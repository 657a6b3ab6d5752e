"""What is asked of a server and what it answers, as values that travel between processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from fsmount.vfs.filesystem import Owner
from fsmount.vfs.reads import Verify
from fsmount.vfs.version import Look


@dataclass(frozen=True, slots=True)
class MountRequest:
    """What to mount where, and how. Paths are absolute."""

    store: str
    ref: str | None  # None: the whole store
    mountpoint: str
    verify: Verify = Verify.SIZE
    list_samples: bool = False
    allow_other: bool = False
    uid: int | None = None  # None: the server's
    gid: int | None = None
    umask: int = 0
    log: str | None = None  # None: the server's stderr

    @property
    def look(self) -> Look:
        """How the mount shows its files."""
        me = Owner.of_process()
        uid = me.uid if self.uid is None else self.uid
        gid = me.gid if self.gid is None else self.gid
        return Look(Owner(uid, gid, self.umask), self.list_samples)

    def to_json(self) -> str:
        """The request as ASCII text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MountRequest:
        """The request that `to_json` wrote."""
        value = json.loads(text)
        return cls(**{**value, "verify": Verify(value["verify"])})


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says once: that it serves (no error), or why it does not."""

    error: str | None = None
    shown: str | None = None  # the tag or `sha256:<table>` that is served
    notes: tuple[str, ...] = ()  # what works less well than it could, each one line

    def to_json(self) -> str:
        """The answer as one line of ASCII text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """The answer that `to_json` wrote."""
        value = json.loads(text)
        return cls(value["error"], value["shown"], tuple(value["notes"]))
