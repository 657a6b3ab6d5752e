"""What a supervisor is told to serve, as a value that travels between processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from fsmount.mount.mountinfo import KernelMount
from fsmount.vfs.filesystem import Owner
from fsmount.vfs.parted import Look
from fsmount.vfs.reads import Verify


@dataclass(frozen=True, slots=True)
class Config:
    """A mount. Paths are absolute."""

    store: str
    mountpoint: str  # or /dev/fd/N
    source: str  # what the kernel is told that it comes from
    shown: str | None  # tag or `sha256:<table>`; None for the whole store
    paths: str | int | None  # a version's path list, or its descriptor; None for the whole store
    tables: tuple[str, ...]  # digests that are leased
    uid: int
    gid: int
    umask: int = 0
    list_samples: bool = False
    verify: Verify = Verify.SIZE
    allow_other: bool = False
    passthrough: bool = True
    splice: bool = True
    xattrs: bool = False
    ref: str | None = None  # as the user gave it
    log: str | None = None  # where stderr goes; None: to people
    notes: tuple[str, ...] = ()  # for the user
    lock: int | None = None  # a descriptor that holds the mountpoint's StartLock
    mounted: KernelMount | None = None  # as the kernel lists it, once it is mounted

    @property
    def tag(self) -> str | None:
        """The version's tag; None if it has none, and for the whole store."""
        return None if self.shown is None or self.shown.startswith("sha256:") else self.shown

    @property
    def look(self) -> Look:
        """How versions are shown."""
        return Look(Owner(self.uid, self.gid, self.umask), self.list_samples)

    def to_json(self) -> str:
        """The value as ASCII text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        """The value that `to_json` wrote."""
        value = json.loads(text)
        value["verify"] = Verify(value["verify"])
        value["tables"] = tuple(value["tables"])
        value["notes"] = tuple(value["notes"])
        return cls(**value)
