"""The contestants of `fsmount bench mount`: one version's shards, shown in several ways."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fsmount.model import Version, VersionDocument
from fsmount.mount.mountinfo import mount_at
from fsmount.paths import shard_path
from fsmount.store import Store
from fsmount_cli.bench.scratch import (
    BenchError,
    UnavailableError,
    children,
    end,
    environment,
    wait_for,
)

OBJECT, PASSTHROUGH, COPIED, FUSEPY, LOOPBACK = (
    "object",
    "passthrough",
    "no passthrough",
    "fusepy",
    "loopback",
)
MOUNTS = (PASSTHROUGH, COPIED, FUSEPY, LOOPBACK)
FSMOUNT = (sys.executable, "-P", "-m", "fsmount_cli.main")
START_SECONDS = 120.0
_DRIVERS = {
    PASSTHROUGH: ("--driver", "kernel"),
    COPIED: ("--driver", "kernel", "--no-passthrough"),
    FUSEPY: ("--driver", "fusepy"),
}


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard that is read: its object, its path in the version, and how many bytes of it."""

    object: str
    shown: str
    read: int


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured."""

    store: Store
    version: Version
    shards: tuple[Shard, ...]

    @property
    def document(self) -> VersionDocument:
        """The version's document."""
        return self.version.document

    @property
    def ref(self) -> str:
        """The version as the command line takes it."""
        return f"{self.store.path}@{self.document.tag or f'sha256:{self.document.table.digest}'}"

    @property
    def size(self) -> int:
        """Bytes that are read in one run."""
        return sum(shard.read for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Served:
    """A mount that serves; `process` is its server, or its supervisor if it has one."""

    name: str
    mountpoint: str
    process: subprocess.Popen[bytes]

    @property
    def server(self) -> int:
        """The process that answers the kernel now."""
        return next(iter(children(self.process.pid)), self.process.pid)


def largest(store: Store, version: Version, limit: int) -> Target:
    """The largest shards of a version, which are at most `limit` bytes; or the first of the only
    one that is. BenchError if there is no shard.
    """
    sized = sorted(
        (
            (shard.size, shard_path(partition.id, index), shard.digest)
            for partition in version.partitions
            for index, shard in enumerate(partition.shards)
        ),
        key=lambda one: (-one[0], one[1]),
    )
    found: list[Shard] = []
    for size, shown, digest in sized:
        if found and size > limit:
            break
        found.append(Shard(store.objects.path(digest), shown, min(size, limit)))
        limit -= found[-1].read
    if not found:
        raise BenchError("the version has no shards")
    return Target(store, version, tuple(found))


def paths_of(target: Target, served: Served | None) -> list[str]:
    """Where the shards are to be read; without a mount, the objects."""
    if served is None:
        return [shard.object for shard in target.shards]
    if served.name == LOOPBACK:
        return [f"{served.mountpoint}/{number}" for number in range(len(target.shards))]
    return [f"{served.mountpoint}/{shard.shown}" for shard in target.shards]


@contextmanager
def serving(name: str, target: Target, scratch: str) -> Iterator[Served]:
    """Mount the contestant `name` below `scratch` for a while; UnavailableError if it can't be."""
    mountpoint = f"{scratch}/{name.replace(' ', '-')}"
    os.makedirs(mountpoint)
    log = f"{mountpoint}.log"
    with open(log, "ab") as file:
        process = subprocess.Popen(
            _command(name, target, mountpoint),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd="/",
            env=environment(scratch),
            start_new_session=True,
        )
    try:
        wait_for(
            lambda: process.poll() is not None or mount_at(mountpoint) is not None,
            START_SECONDS,
            f"{name} to mount",
        )
        if process.poll() is not None:
            raise UnavailableError(f"{name}: {_last_line(log)}")
        os.statvfs(mountpoint)
        yield Served(name, mountpoint, process)
    finally:
        end(process)
    os.rmdir(mountpoint)


def _command(name: str, target: Target, mountpoint: str) -> Sequence[str]:
    if name == LOOPBACK:
        files = [shard.object for shard in target.shards]
        return [sys.executable, "-P", "-m", "fsmount_cli.bench.loopback", mountpoint, *files]
    return [*FSMOUNT, "mount", "--foreground", *_DRIVERS[name], "--", target.ref, mountpoint]


def _last_line(log: str) -> str:
    with open(log, encoding="utf-8", errors="replace") as file:
        return next((line.strip() for line in reversed([*file]) if line.strip()), "it ended")
