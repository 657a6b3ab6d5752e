"""Process 1 of a container, which the system expects to wait for everybody's orphans."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import NoReturn

_HANDED_ON = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_OF_TERMINAL = 0x80  # SI_KERNEL: the whole process group has got it


def go_on_in_child() -> None:
    """Where this is process 1, return in a child only. Process 1 hands on signals to that, waits
    for all that ends, and ends with it. To be called before there are threads.
    """
    if os.getpid() != 1:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_HANDED_ON, signal.SIGCHLD})
    child = os.fork()
    if child:
        _wait_for_all(child)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_all(child: int) -> NoReturn:
    ignored = {number for number in _HANDED_ON if signal.getsignal(number) == signal.SIG_IGN}
    while True:
        found = signal.sigwaitinfo({*_HANDED_ON - ignored, signal.SIGCHLD})
        if found.si_signo == signal.SIGCHLD:
            _reap(child)
        elif found.si_code != _OF_TERMINAL:
            with suppress(ProcessLookupError):
                os.kill(child, found.si_signo)


def _reap(child: int) -> None:
    """Wait for what has ended, and end with `child`, with its exit code or as a shell tells it."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                code = os.waitstatus_to_exitcode(found[1])
                os._exit(code if code >= 0 else 128 - code)
