"""Which processes keep a mount busy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

_NAMED = 5  # so many are named in an error


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
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6:
            yield os.fsdecode(fields[5])


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"
