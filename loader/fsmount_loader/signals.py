"""Signals in workers: what the trainer handles, its handler does in the trainer alone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection

# Terminals and schedulers send these to all processes of a job, and mean the trainer. If it ends,
# its workers do.
_SENT_TO_ALL = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_TORCH_HANDLES = (signal.SIGTERM, signal.SIGBUS, signal.SIGSEGV, signal.SIGFPE)


def begin_worker() -> None:
    """Take the trainer's handlers off, in a worker of ours; SIGTERM ends it, whoever sends it."""
    _take_off()
    for number in _SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # multiprocessing's, when the trainer exits


def begin_torch_worker() -> None:
    """The same in a DataLoader's worker, which has handlers of torch's own."""
    if threading.current_thread() is threading.main_thread():
        _take_off(besides=_TORCH_HANDLES)


def _take_off(besides: Collection[signal.Signals] = ()) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {*besides}:
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(number, signal.SIG_IGN if number in _SENT_TO_ALL else signal.SIG_DFL)
