"""Which processes keep a mount busy."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_NAMED = 5  # so many are named in an error
_MOMENT = 0.1  # seconds
_WAITING = frozenset({"request_wait_answer", "__fuse_request_send", "__fuse_simple_request"})


@dataclass(frozen=True, slots=True)
class Holder:
    """A process and one thing of the mount that it holds."""

    pid: int
    command: str
    holds: str  # "working directory", "root directory", or a path below the mountpoint

    def __str__(self) -> str:
        return f"{self.command} ({self.pid}: {self.holds})"


def holders(mountpoint: str) -> list[Holder]:
    """The processes that hold something of the mount, as far as /proc shows them to this user."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = ((pid, next(_held(pid, mountpoint), None)) for pid in pids)
    return [Holder(pid, _command(pid), what) for pid, what in found if what is not None]


def waiting(others: Collection[int]) -> list[Holder]:
    """The processes that wait for an answer of some FUSE mount, as who hangs in `open` does.

    They hold nothing yet that /proc would show; which mount they wait for is not known. Who waits
    for a moment only is left out, and `others`, which do not count.
    """
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    found = list(filter(_waits, sorted(pids - {os.getpid(), *others})))
    time.sleep(_MOMENT)
    what = "waits for a FUSE mount, perhaps this one"
    return [Holder(pid, _command(pid), what) for pid in filter(_waits, found)]


def describe(found: list[Holder]) -> str:
    """The first few of `found` as text."""
    if not found:
        return "processes of other users, or other mounts"
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(map(str, found[:_NAMED])) + more


def _held(pid: int, mountpoint: str) -> Iterator[str]:
    for link, what in (("cwd", "working directory"), ("root", "root directory")):
        if _below(_target(f"/proc/{pid}/{link}"), mountpoint) is not None:
            yield what
    for descriptor in _names(f"/proc/{pid}/fd"):
        path = _below(_target(f"/proc/{pid}/fd/{descriptor}"), mountpoint)
        if path is not None:
            yield path
    for mapped in _mapped(pid):
        path = _below(mapped, mountpoint)
        if path is not None:
            yield path


def _waits(pid: int) -> bool:
    """Whether one of its threads sleeps where the kernel awaits answers (proc_pid_wchan(5))."""
    return any(
        _text(f"/proc/{pid}/task/{task}/wchan") in _WAITING for task in _names(f"/proc/{pid}/task")
    )


def _below(path: str, mountpoint: str) -> str | None:
    if path == mountpoint:
        return "."
    return path.removeprefix(f"{mountpoint}/") if path.startswith(f"{mountpoint}/") else None


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _mapped(pid: int) -> Iterator[str]:
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6:
            yield os.fsdecode(fields[5])


def _command(pid: int) -> str:
    return _text(f"/proc/{pid}/comm") or "?"


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
