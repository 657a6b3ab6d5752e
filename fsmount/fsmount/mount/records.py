"""What is mounted, from what, since when: one small file a mount, in a directory of the user's.

The process that a mount lives as long as (the supervisor, or the server of a driver that has none)
writes it before anybody learns that it serves, and removes it when it ends. A record whose
processes were killed is recognised by the kernel's list of mounts, and cleared.

A record is a convenience: without one, a mount is listed and taken off by what the kernel says of
it. So records lie only where nobody else can plant or change them, else nowhere.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from fsmount.errors import MountError
from fsmount.mount import mountinfo
from fsmount.mount.mountinfo import KernelMount
from fsmount.private import existing_private_directory, private_directory
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


def directories() -> list[str]:
    """Where records may lie: each there, this user's alone, and writable.

    All are looked into, since a cron job, a login and `su` have different environments.
    """
    found = map(existing_private_directory, _places())
    return list(dict.fromkeys(one for one in found if one is not None))


def _places() -> Iterator[str]:
    uid = os.geteuid()
    places = [
        (os.environ.get("XDG_RUNTIME_DIR", ""), "fsmount"),
        ("/run" if uid == 0 else f"/run/user/{uid}", "fsmount"),
        ("/tmp", f"fsmount-{uid}"),  # noqa: S108 - each is checked
        ("/dev/shm", f"fsmount-{uid}"),  # noqa: S108
    ]
    return (f"{base}/{name}" for base, name in places if os.path.isdir(base))


def source_of(store: str, ref: str | None) -> str:
    """What the kernel is told a mount comes from: what fstab says, which `mount -a` looks for."""
    return store if ref is None else f"{store}@{ref}"


def now() -> str:
    """This moment as records have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def write(record: Record) -> str:
    """Write `record` in one step and return its path; MountError if no record can be kept."""
    path = path_for(record.mountpoint, _SUFFIX)
    if path is None:
        tried = ", ".join(_places()) or "/run, /tmp and /dev/shm"
        raise MountError(
            f"no record of the mount is kept: this user alone can change none of {tried}"
        )
    try:
        with open(f"{path}.new", "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(record.to_json(), file, indent=2)
        os.replace(f"{path}.new", path)
    except OSError as error:
        raise MountError(f"no record of the mount is kept: {error}") from error
    return path


def read(mountpoint: str) -> Record | None:
    """The record of a mountpoint, None where there is none that can be read."""
    return next((record for _, record in _of(mountpoint)), None)


def remove(record: Record) -> None:
    """Remove `record`, unless another mount has taken its place."""
    for path, found in list(_of(record.mountpoint)):
        if found == record:
            with suppress(OSError):  # a disk that can't be written any more
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
    found = (one for _, one in _of(mount.mountpoint) if one.device == mount.device)
    record = next(found, None) or _from_kernel(mount)
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


def path_for(mountpoint: str, suffix: str) -> str | None:
    """The path of a new file about a mountpoint; None where none can be kept."""
    made = map(private_directory, _places())
    return next((_path(base, mountpoint, suffix) for base in made if base is not None), None)


def _path(base: str, mountpoint: str, suffix: str = _SUFFIX) -> str:
    return f"{base}/{hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:32]}{suffix}"


def _of(mountpoint: str) -> Iterator[tuple[str, Record]]:
    """The records of a mountpoint, with their paths."""
    for base in directories():
        path = _path(base, mountpoint)
        record = _read(path)
        if record is not None:
            yield path, record


def _records() -> Iterator[Record]:
    for base in directories():
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
