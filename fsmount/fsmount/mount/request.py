"""What is asked of a server and what it answers, as values that travel between processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from fsmount.vfs.filesystem import Owner
from fsmount.vfs.parted import Look
from fsmount.vfs.reads import Verify

AUTO, KERNEL, FUSEPY = DRIVERS = ("auto", "kernel", "fusepy")


@dataclass(frozen=True, slots=True)
class MountRequest:
    """What to mount where, and how. Paths are absolute; the mountpoint may be /dev/fd/N."""

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
    driver: str = AUTO
    xattrs: bool = False
    passthrough: bool = True  # where driver, kernel and store have it

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
    features: tuple[str, ...] = ()  # what kernel and driver agreed on
    supervisor_pid: int | None = None  # None: the driver has none

    def to_json(self) -> str:
        """The answer as one line of ASCII text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """The answer that `to_json` wrote."""
        value = json.loads(text)
        return cls(
            value["error"],
            value["shown"],
            tuple(value["notes"]),
            tuple(value["features"]),
            value["supervisor_pid"],
        )
