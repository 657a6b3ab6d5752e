"""Saying that a mount serves, or why it does not: once, to a parent that waits or to people."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from fsmount.errors import one_line
from fsmount.mount.request import Answer

log = logging.getLogger("fsmount.mount")


def tell_parent(descriptor: int) -> Callable[[Answer], None]:
    """Writes the answer to `descriptor`, which is not handed on to other programs."""
    os.set_inheritable(descriptor, False)
    told = False

    def tell(answer: Answer) -> None:
        nonlocal told
        if told:  # it served, and fails now
            return
        told = True
        try:
            os.write(descriptor, answer.to_json().encode() + b"\n")
            if answer.error is None:  # else the parent waits until this process has ended
                os.close(descriptor)
        except OSError:
            log.error("nobody waits for the answer: %s", answer.error or "serving")

    return tell


def tell_people(mountpoint: str, store: str) -> Callable[[Answer], None]:
    """Writes to stderr, the good news as a line of the log."""

    def tell(answer: Answer) -> None:
        with suppress(
            OSError
        ):  # a terminal that is gone, a full disk: the mount serves all the same
            for note in answer.notes:
                sys.stderr.write(f"note: {one_line(note)}\n")
            if answer.error is not None:
                sys.stderr.write(f"error: {one_line(answer.error)}\n")
        if answer.error is None:
            log.info("%s: serving %s of %s", mountpoint, answer.shown or "all versions", store)

    return tell
