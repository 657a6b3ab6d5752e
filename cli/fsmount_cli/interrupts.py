"""Interrupts that are not lost.

A signal's exception that is raised while an object is destroyed (in a `__del__`, such as that of
every ZipFile) is dropped by Python, and the command would go on as if nobody had asked it to end.
So an interrupt is remembered, and what works for long asks for it between two steps.
"""

from __future__ import annotations

import signal
from types import FrameType

_came: list[int] = []  # numbers of signals


def install() -> None:
    """Take SIGTERM as an interrupt, as SIGINT is unless it is ignored."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def check() -> None:
    """Raise KeyboardInterrupt if there was an interrupt."""
    if _came:
        raise KeyboardInterrupt


def _interrupt(number: int, _: FrameType | None) -> None:
    _came.append(number)
    raise KeyboardInterrupt
