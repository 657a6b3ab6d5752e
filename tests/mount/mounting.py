"""Mounting and sweeping for tests."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from fsmount.mount import records
from fsmount.mount.mountinfo import FSTYPE, all_mounts
from fsmount.mount.request import MountRequest
from fsmount.mount.unmount import unmount
from fsmount.store import Store

Mounter = Callable[[MountRequest], str]


def sweep(base: str, *, only_dead: bool) -> None:
    """Take off the mounts below `base`."""
    for mount in reversed(all_mounts()):
        below = mount.fstype == FSTYPE and mount.mountpoint.startswith(f"{base}/")
        if below and (not only_dead or records.describe(mount).dead):
            unmount(mount.mountpoint, lazy=True)


def request_for(store: Store, ref: str | None = "v1", **more: object) -> MountRequest:
    """A request to mount `ref`; the mountpoint is filled in by whoever mounts."""
    return replace(MountRequest(store.path, ref, ""), **more)  # type: ignore[arg-type]


def fsmount(*args: str, **more: object) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    command = [sys.executable, "-m", "fsmount_cli.main", *args]
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, check=False, capture_output=True, text=True, timeout=60, **more
    )


def wait_for(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Ask again until it is true: what a mount shows may be a second old."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
