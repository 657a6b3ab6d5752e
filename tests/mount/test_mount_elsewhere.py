"""Mounts that can't be taken off: they are covered, or alive in another mount namespace only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mounting import Mounter, request_for, wait_for
from serving import has_ended, processes_of

from fsmount.model import Version
from fsmount.mount.ending import umount
from fsmount.mount.mountinfo import mount_at
from fsmount.mount.request import KERNEL
from fsmount.store import Store

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="no namespace of its own"
    ),
]


@contextmanager
def container() -> Iterator[str]:
    """A mount namespace with a copy of all mounts, and the path of its root directory."""
    command = ["unshare", "--mount", "sh", "-c", "echo ready; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield f"/proc/{process.pid}/root"
        process.stdin.close()


@pytest.mark.parametrize("alone", [False, True])
def test_a_mount_that_is_served_elsewhere_ends_when_it_is_asked_twice(
    store: Store, version: Version, mounter: Mounter, tmp_path: Path, alone: bool
) -> None:
    del version
    log = tmp_path / "log"
    root = mounter(request_for(store, driver=KERNEL, log=str(log)))
    supervisor, server = processes_of(root)
    if alone:
        os.kill(supervisor, signal.SIGKILL)
        assert has_ended(supervisor)
    last = server if alone else supervisor
    with container() as there:
        assert "still mounted elsewhere" in (umount(root) or "")
        assert mount_at(root) is None
        os.kill(last, signal.SIGTERM)
        wait_for(lambda: f"{root} is not mounted here any more" in log.read_text())
        os.statvfs(f"{there}{root}")
        os.kill(last, signal.SIGTERM)
        assert has_ended(last)
        assert has_ended(server)
        with pytest.raises(OSError, match="not connected"):
            os.statvfs(f"{there}{root}")
    assert "can't unmount" not in log.read_text()


def test_a_mount_that_is_covered_ends_when_it_is_asked_twice(
    store: Store, version: Version, mounter: Mounter, tmp_path: Path
) -> None:
    del version
    log = tmp_path / "log"
    root = mounter(request_for(store, driver=KERNEL, log=str(log)))
    supervisor, server = processes_of(root)
    subprocess.run(["mount", "-t", "tmpfs", "none", root], check=True)
    try:
        os.kill(supervisor, signal.SIGTERM)
        wait_for(lambda: f"can't unmount {root}: its path does not lead to it" in log.read_text())
        os.kill(supervisor, signal.SIGTERM)
        assert has_ended(supervisor)
        assert has_ended(server)
    finally:
        subprocess.run(["umount", root], check=True)
    assert "the mount is cleared" in (umount(root) or "")
