"""What is mounted, from what, since when: one small file a mount, in a directory of the user's.

The process that a mount lives as long as (the supervisor, or the server of a driver that has none)
writes it before anybody learns that it serves, and removes it when it ends. A record whose
processes were killed is recognised by the kernel's list of mounts, and cleared.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from fsmount.errors import MountError
from fsmount.mount import mountinfo
from fsmount.mount.mountinfo import KernelMount
from fsmount.store.owner import Owner

PROBE_SECONDS = 5.0  # in which a serving mount answers
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Record:
    """One mount. What only the record knows is None where there is none."""

    mountpoint: str
    store: str
    ref: str | None  # as the user gave it; None for the whole store
    tag: str | None
    table: str | None  # digest of the version's table; None for the whole store
    driver: str | None
    since: str | None  # ISO 8601, UTC
    server: Owner | None
    log: str | None  # None: stderr of a server in the foreground
    device: str | None  # as in mountinfo
    supervisor: Owner | None = None  # who replaces the server when it dies
    features: tuple[str, ...] = ()  # what kernel and driver agreed on

    @property
    def server_pid(self) -> int | None:
        """The process that serves it."""
        return None if self.server is None else self.server.pid

    @property
    def supervisor_pid(self) -> int | None:
        """The process that replaces the server."""
        return None if self.supervisor is None else self.supervisor.pid

    @property
    def processes(self) -> tuple[Owner, ...]:
        """Who keeps the mount alive, the one who outlives the other first."""
        return tuple(one for one in (self.supervisor, self.server) if one is not None)

    @property
    def is_over(self) -> bool:
        """Whether all its processes are known to have ended."""
        return all(one.is_gone() for one in self.processes)

    def to_json(self) -> dict[str, object]:
        """The record as a JSON object."""
        pids = {"server_pid": self.server_pid, "supervisor_pid": self.supervisor_pid}
        return {**asdict(self), **pids}


@dataclass(frozen=True, slots=True)
class Mounted:
    """A mount that the kernel lists; `dead` when nobody serves it any more."""

    record: Record
    dead: bool

    def to_json(self) -> dict[str, object]:
        """What is known as a JSON object; a supervisor that is gone is none."""
        found = {**self.record.to_json(), "dead": self.dead}
        if self.record.supervisor is not None and self.record.supervisor.is_gone():
            found |= {"supervisor": None, "supervisor_pid": None}
        return found


def directory() -> str:
    """Where records lie: made if need be, private to the user. MountError where that can't be."""
    uid = os.geteuid()
    base = os.environ.get("XDG_RUNTIME_DIR") or ("/run" if uid == 0 else None)
    path = f"{base}/fsmount" if base else f"{tempfile.gettempdir()}/fsmount-{uid}"
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise MountError(f"can't keep records of mounts: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid:
        raise MountError(f"can't keep records of mounts: {path} belongs to somebody else")
    return path


def source_of(store: str, ref: str | None) -> str:
    """What the kernel is told a mount comes from: what fstab says, which `mount -a` looks for."""
    return store if ref is None else f"{store}@{ref}"


def now() -> str:
    """This moment as records have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def write(record: Record) -> str:
    """Write `record` in one step and return its path; MountError."""
    path = _path(record.mountpoint)
    try:
        with open(f"{path}.new", "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(record.to_json(), file, indent=2)
        os.replace(f"{path}.new", path)
    except OSError as error:
        raise MountError(f"can't keep a record of the mount: {error}") from error
    return path


def read(mountpoint: str) -> Record | None:
    """The record of a mountpoint, None where there is none that can be read."""
    return _read(_path(mountpoint))


def remove(record: Record) -> None:
    """Remove `record`, unless another mount has taken its place."""
    path = _path(record.mountpoint)
    if _read(path) == record:
        os.unlink(path)


def mounted() -> list[Mounted]:
    """All fsmount mounts that this process sees, by mountpoint; clears records of ended ones."""
    clear_ended()
    live = [mount for mount in mountinfo.all_mounts() if mount.fstype == mountinfo.FSTYPE]
    return sorted(map(describe, live), key=lambda one: one.record.mountpoint)


def clear_ended() -> None:
    """Remove the records of mounts that are over."""
    devices = {mount.device for mount in mountinfo.all_mounts()}
    for record in list(_records()):
        if record.device not in devices and record.is_over:
            remove(record)


def describe(mount: KernelMount) -> Mounted:
    """What is known of a mount, from its record or at least from the kernel."""
    record = read(mount.mountpoint)
    if record is None or record.device != mount.device:
        record = _from_kernel(mount)
    if record.processes and not record.is_over:
        return Mounted(record, dead=False)
    if record.processes and record.supervisor is None:  # nobody else can serve it
        return Mounted(record, dead=True)
    return Mounted(record, probe(mount.mountpoint) == errno.ENOTCONN)


def probe(path: str) -> int | None:
    """The errno of a statvfs of `path`, 0 if it succeeds, None without an answer in time.

    A stat would not do: the kernel answers it from its cache when the server is long dead. A
    question that is not answered keeps the mount busy, so whoever knows the server asks it instead.
    """
    answer: list[int] = []

    def ask() -> None:
        try:
            os.statvfs(path)
            answer.append(0)
        except OSError as error:
            answer.append(error.errno or errno.EIO)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PROBE_SECONDS)
    return answer[0] if answer else None


def _from_kernel(mount: KernelMount) -> Record:
    store, at, ref = mount.source.rpartition("@")
    if not at or "/" in ref:
        store, ref = mount.source, ""
    empty = Record(mount.mountpoint, store, None, None, None, None, None, None, None, mount.device)
    return replace(empty, ref=ref, tag=None if ref == "latest" else ref) if ref else empty


def path_for(mountpoint: str, suffix: str) -> str:
    """The path of a file about a mountpoint; MountError."""
    name = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:32]
    return f"{directory()}/{name}{suffix}"


def _path(mountpoint: str) -> str:
    return path_for(mountpoint, _SUFFIX)


def _records() -> Iterator[Record]:
    base = directory()
    for name in sorted(os.listdir(base)):
        record = _read(f"{base}/{name}") if name.endswith(_SUFFIX) else None
        if record is not None:
            yield record


def _read(path: str) -> Record | None:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            value = json.load(file)
        for who in ("server", "supervisor"):
            value.pop(f"{who}_pid", None)
            value[who] = Owner(**value[who]) if value.get(who) else None
        value["features"] = tuple(value.get("features", ()))
        return Record(**value)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
