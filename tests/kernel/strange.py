"""`python strange.py CASE CONFIG DESCRIPTOR`: a mount whose server behaves in a strange way."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsmount.errors import FormatError
from fsmount.mount.kernel import crew, link, server, start, supervisor, turns
from fsmount.mount.kernel.backing import BackingIds
from fsmount.mount.kernel.config import Config
from fsmount.mount.kernel.session import GRACE
from fsmount.vfs.filesystem import Entry, FileSystem, Handle
from fsmount.vfs.helpers import Helpers
from fsmount.vfs.pathlist import PathList

HUNG = "shards/large/000000.tar"
DEADLY_NAME = "deadly"
IMPATIENCE = 0.3  # seconds
SLOW = 1.5  # seconds


@dataclass(slots=True)
class HangingHandle:
    """Reads nothing, for ever."""

    node: int
    keep_cache: bool = True

    @property
    def descriptor(self) -> int | None:
        return None

    @property
    def ready(self) -> bool:
        return False

    def read(self, size: int, offset: int) -> bytes:
        threading.Event().wait()
        return b""

    def close(self) -> None:
        pass


class Hanging:
    """A file system one file of which hangs when it is read, or opened."""

    def __init__(
        self, real: FileSystem, *, when_opened: bool, seconds: float | None = None
    ) -> None:
        """`seconds`: for so long it hangs; for ever if None."""
        self._real = real
        self._when_opened = when_opened
        self._seconds = seconds
        node = 1
        for name in HUNG.split("/"):
            node = real.lookup(node, name).node
        self._hung = node

    def open(self, node: int) -> Handle:
        if node != self._hung:
            return self._real.open(node)
        if self._when_opened:
            threading.Event().wait(self._seconds)
            return self._real.open(node)
        return HangingHandle(node)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Deadly:
    """A file system whose large files kill who opens them."""

    def __init__(self, real: FileSystem, kill: Callable[[], None]) -> None:
        self._real = real
        directory = real.lookup(real.lookup(1, "shards").node, "large").node
        self._deadly = {entry.node for entry in real.readdir(directory)}
        self._kill = kill

    def open(self, node: int) -> Handle:
        if node in self._deadly:
            self._kill()
        return self._real.open(node)

    def lookup(self, parent: int, name: str) -> Entry:
        if name == DEADLY_NAME:
            self._kill()
        return self._real.lookup(parent, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


Make = Callable[[Config, PathList | None, Helpers], FileSystem]
REAL = server.file_system


def _dying(config: Config, paths: PathList | None, helpers: Helpers) -> FileSystem:
    os.kill(os.getpid(), signal.SIGKILL)
    return REAL(config, paths, helpers)


def _dying_later(config: Config, paths: PathList | None, helpers: Helpers) -> FileSystem:
    """Once there is a file beside the mountpoint, every server dies."""

    def watch() -> None:
        while not os.path.exists(f"{config.mountpoint}.die"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.path.exists(f"{config.mountpoint}.die"):
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch, daemon=True).start()
    return REAL(config, paths, helpers)


def _failing(config: Config, paths: PathList | None, helpers: Helpers) -> FileSystem:
    raise FormatError("no such thing here")


def _hanging(*, when_opened: bool, seconds: float | None = None) -> Make:
    def make(config: Config, paths: PathList | None, helpers: Helpers) -> FileSystem:
        hanging: Any = Hanging(
            REAL(config, paths, helpers), when_opened=when_opened, seconds=seconds
        )
        return hanging  # type: ignore[no-any-return]

    return make


def _deadly(kill: Callable[[], None]) -> Make:
    def make(config: Config, paths: PathList | None, helpers: Helpers) -> FileSystem:
        deadly: Any = Deadly(REAL(config, paths, helpers), kill)
        return deadly  # type: ignore[no-any-return]

    return make


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _crash() -> None:
    ctypes.string_at(0)


class NotedIds(BackingIds):
    """Writes to the log which backing ids come and go."""

    def register(self, fd: int) -> int:
        made = super().register(fd)
        sys.stderr.write(f"backing +{made}\n")
        return made

    def close(self, backing_id: int) -> None:
        sys.stderr.write(f"backing -{backing_id}\n")
        super().close(backing_id)


CASES: dict[str, Make] = {
    "dying": _dying,
    "dying-later": _dying_later,
    "failing": _failing,
    "hanging": _hanging(when_opened=False),
    "hanging-open": _hanging(when_opened=True),
    "slow-open": _hanging(when_opened=True, seconds=GRACE / 3),
    "very-slow-open": _hanging(when_opened=True, seconds=SLOW),
    "deadly-kill": _deadly(_killed),
    "deadly-crash": _deadly(_crash),
    "deadly-exit": _deadly(lambda: os._exit(3)),
}

if __name__ == "__main__":
    match sys.argv[1]:
        case "impatient":
            link._SECONDS = IMPATIENCE
        case "mute":
            start.tell_parent = lambda descriptor: lambda answer: _killed()  # type: ignore[assignment]
        case "noted":
            supervisor.BackingIds = NotedIds  # type: ignore[attr-defined]
        case strange:
            crew.MOST, turns.MOST = 12, 4
            server.file_system = CASES[strange]
    sys.exit(start.main(sys.argv[2], sys.argv[3]))
