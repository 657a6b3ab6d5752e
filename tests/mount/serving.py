"""The processes behind a mount, and who holds it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsmount.mount import records
from fsmount.mount.request import FUSEPY, KERNEL

both_drivers = pytest.mark.parametrize("driver", [KERNEL, FUSEPY])


def has_ended(pid: int, seconds: float = 10.0) -> bool:
    """Wait for the end of any process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(descriptor, "rb", buffering=0):
        return bool(select.select([descriptor], [], [], seconds)[0])


def processes_of(mountpoint: str) -> list[int]:
    """Who keeps it alive: its supervisor, if the driver has one, and its server."""
    record = records.read(mountpoint)
    assert record is not None
    assert record.server_pid is not None
    return [one.pid for one in record.processes]


def server_of(mountpoint: str) -> int:
    """The process that the mount ends with."""
    return processes_of(mountpoint)[0]


def processes_about(mountpoint: str, program: str = "fsmount.mount") -> list[int]:
    """The servers, starting or serving, of a mountpoint."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                command = Path("/proc", name, "cmdline").read_bytes()
            except OSError:
                continue
            if program.encode() in command and f'"{mountpoint}"'.encode() in command:
                found.append(int(name))
    return found


def children(pid: int) -> list[int]:
    """The children of a process, those that nobody has waited for too."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def kill_all(mountpoint: str) -> None:
    for pid in processes_of(mountpoint):
        os.kill(pid, signal.SIGKILL)
        assert has_ended(pid)


@contextmanager
def held(mountpoint: str, code: str) -> Iterator[int]:
    """A process that runs `code` in the mount and then waits."""
    program = f"{code}\nprint('held', flush=True)\ninput()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env={"M": mountpoint}
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process.pid
        process.stdin.close()
