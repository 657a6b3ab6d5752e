"""Standard streams that a caller has closed, or that take nothing any more."""

from __future__ import annotations

import os
import sys


def open_closed() -> None:
    """Open /dev/null as those of the descriptors 0 to 2 that are closed.

    Otherwise the next file that is opened would become stdin, stdout or stderr of all that is
    started from here. Python has None for such a stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null == number:
                os.set_inheritable(number, True)
            else:
                os.dup2(null, number)
                os.close(null)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False, encoding="utf-8")
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False, encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False, encoding="utf-8")


def drop_stdout() -> None:
    """Let the interpreter's own flush at exit go nowhere, since stdout takes nothing any more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def drop_stdout_if_full() -> None:
    """The same, if stdout does not take what is still to be written."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_stdout()
