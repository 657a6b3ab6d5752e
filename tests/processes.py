"""Processes of the machine, as tests look at them."""

from __future__ import annotations

import os
import signal
import threading
import time
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


def stop(pid: int, seconds: float = 10.0) -> None:
    """SIGSTOP a process and wait until no thread of it runs any more.

    Until then one of them may take a request of the kernel, whose reader can't be killed.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + seconds
    while any(state not in {"T", "Z"} for state in _states(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    """The states of its threads (proc_pid_stat(5))."""
    found = []
    with suppress(FileNotFoundError):  # a thread has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat", encoding="utf-8") as file:
                found.append(file.read().rpartition(")")[2].split()[0])
    return found


def kill_whoever_reads(above: int, path: str, ended: threading.Event) -> None:
    """SIGKILL each descendant of `above` that has `path` open, until `ended` is set."""
    while not ended.wait(0.001):
        for pid in descendants_of(above):
            with suppress(OSError):
                held = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
                if path in held:
                    os.kill(pid, signal.SIGKILL)
