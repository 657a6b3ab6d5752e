"""Threads that must be there for a mount to be served."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fsmount.errors import MountError


def start(target: Callable[..., object], *args: object) -> threading.Thread:
    """Run `target` in a thread that ends with the process; MountError where there can be none."""
    thread = threading.Thread(target=target, args=args, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise MountError(
            f"the server can't run ({error}): raise its limit of memory (ulimit -v) or of "
            "processes (ulimit -u)"
        ) from error
    return thread
