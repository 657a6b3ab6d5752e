"""Which process holds something, told so that another one can find out whether it still runs.

What tells two systems apart is the id of the boot, and the namespace that process numbers belong
to. The host's name is for people: it may change at any moment, and two hosts may share one.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, so that another one can tell whether it still runs."""

    host: str = field(compare=False)  # its name when this was written
    boot_id: str  # "" where the system has none
    pid_namespace: str  # containers of one host may share its name and boot, but not its pids
    pid: int
    start_time: int  # clock ticks after boot; 0 where unknown

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Owner:
        """The process that has the number `pid` here and now."""
        state = _process(pid)
        return cls(
            host=socket.gethostname(),
            boot_id=_text("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_pid_namespace(),
            pid=pid,
            start_time=state[1] if state else 0,
        )

    def is_gone(self) -> bool:
        """Whether the process is known to have ended; False where that can't be told from here."""
        here = Owner.current()
        if not self.boot_id or not self.pid_namespace or self._place() != here._place():
            return False
        state = _process(self.pid)
        if state is None:
            return not _answers(self.pid)
        return state[0] in "ZX" or state[1] != self.start_time

    def _place(self) -> tuple[str, str]:
        return self.boot_id, self.pid_namespace


def _process(pid: int) -> tuple[str, int] | None:
    """State and start time of a process as /proc/<pid>/stat has them (proc(5)), else None."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], int(fields[19])) if len(fields) > 19 else None


def _answers(pid: int) -> bool:
    """Whether a process exists; /proc may hide those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
