"""Processes of the machine, as tests look at them."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress


def children_of(pid: int) -> list[int]:
    """The children of a process, whichever of its threads started them."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def descendants_of(pid: int) -> list[int]:
    """Its children, and theirs."""
    direct = children_of(pid)
    return [*direct, *(other for child in direct for other in descendants_of(child))]


def kill_whoever_reads(above: int, path: str, ended: threading.Event) -> None:
    """SIGKILL each descendant of `above` that has `path` open, until `ended` is set."""
    while not ended.wait(0.001):
        for pid in descendants_of(above):
            with suppress(OSError):
                held = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
                if path in held:
                    os.kill(pid, signal.SIGKILL)
