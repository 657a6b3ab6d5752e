"""The processes that a supervisor forks: servers, and those that try a server's last requests."""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from fsmount.errors import FsmountError
from fsmount.mount.kernel import link
from fsmount.mount.kernel.link import Message

log = logging.getLogger("fsmount.mount")

# What a child does: with its end of a socket to the supervisor, and what it calls when it takes
# the supervisor for gone, before it opens anything that the supervisor is not told of.
Run = Callable[[socket.socket, Callable[[], None]], None]


@dataclass(slots=True)
class Child:
    """A process that was forked, and the supervisor's end of a socket to it."""

    pid: int
    pidfd: int
    socket: socket.socket
    alone: mmap.mmap  # one byte that it shares: 1 when it has given up its supervisor
    born: float = field(default_factory=time.monotonic)
    listening: bool = True
    answered: bool = False  # a request of the kernel

    @property
    def descriptors(self) -> list[int]:
        """What becomes readable when it says something, or ends."""
        return [self.pidfd, *([self.socket.fileno()] if self.listening else [])]

    def reap(self) -> str:
        """Wait for its end; how it ended, for people."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.socket.close()
        code = os.waitstatus_to_exitcode(status)
        return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"


def fork(name: str, run: Run, closed: Iterable[int]) -> Child:
    """A child that does `run` and ends; OSError.

    `name` stands before its errors in the log. `closed` are descriptors that it must not keep: who
    reads from their other ends waits for them to be closed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    alone = mmap.mmap(-1, 1)
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        for descriptor in (*closed, ours.detach()):
            os.close(descriptor)
        _be(name, run, theirs, alone)
    theirs.close()
    return Child(pid, os.pidfd_open(pid), ours, alone)


def _be(name: str, run: Run, supervisor: socket.socket, alone: mmap.mmap) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run(supervisor, lambda: alone.__setitem__(0, 1))
        code = 0
    except FsmountError as error:
        log.error("%s: %s", name, error)
        link.say(supervisor, Message.FAILED, str(error))
    except BaseException as error:
        log.exception("%s: the server failed", name)
        link.say(supervisor, Message.FAILED, f"{type(error).__name__}: {error}")
    finally:
        sys.stderr.flush()
        os._exit(code)
