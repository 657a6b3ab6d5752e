"""What processes inherit of a mount: nothing keeps it that should not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from mounting import Mounter, fsmount, request_for
from serving import both_drivers, has_ended, processes_of

from fsmount.mount import records
from fsmount.mount.ending import umount
from fsmount.mount.kernel.device import FUSE_DEVICE
from fsmount.mount.mountinfo import mount_at
from fsmount.store import Store

pytestmark = [pytest.mark.mounted, pytest.mark.usefixtures("version")]

O_CLOEXEC_IN_FDINFO = 0o2000000

MOUNTS_AMONG_CHILDREN = """
import os, subprocess, sys, time
from fsmount.mount import lifecycle
from fsmount.mount.request import MountRequest

def children():
    run = subprocess.Popen(["sleep", "600"], close_fds=False)
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return [run.pid, pid]

before = children()
lifecycle.mount(MountRequest.from_json(sys.argv[1]))
print(*before, *children(), flush=True)
os._exit(0)
"""

OPENS_AND_FORKS = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
first = os.read(fd, 600)
pid = os.fork()
if pid:
    print(pid, flush=True)
    os._exit(0)
sys.stdin.readline()
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
os.lseek(fd, 0, os.SEEK_SET)
print(os.read(fd, 600) == first, flush=True)
"""


def open_devices(pid: int) -> Iterator[int]:
    """The descriptors of the FUSE device that a process has, by number."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/{pid}/fd/{name}") == FUSE_DEVICE:
                yield int(name)


def is_closed_on_exec(pid: int, fd: int) -> bool:
    with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii") as file:
        [flags] = [line.split()[1] for line in file if line.startswith("flags:")]
    return bool(int(flags, 8) & O_CLOEXEC_IN_FDINFO)


@contextmanager
def ended(pids: list[int]) -> Iterator[None]:
    """End processes that nobody waits for."""
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@both_drivers
def test_who_mounts_leaves_nothing_to_its_children(
    store: Store, mountpoint: str, driver: str
) -> None:
    request = request_for(store, driver=driver, mountpoint=mountpoint).to_json()
    program = [sys.executable, "-c", MOUNTS_AMONG_CHILDREN, request]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        children = list(map(int, running.stdout.readline().split()))
        with ended(children):
            assert len(children) == 4
            running.wait()
            assert not [fd for pid in children for fd in open_devices(pid)]
            serving = processes_of(mountpoint)
            for pid in serving:
                assert [is_closed_on_exec(pid, fd) for fd in open_devices(pid)] == [True]
            assert umount(mountpoint) is None
            assert all(has_ended(pid, 0) for pid in serving)
            assert not any(has_ended(pid, 0) for pid in children)


@both_drivers
def test_a_file_that_a_child_has_inherited_is_served(
    store: Store, mounter: Mounter, driver: str
) -> None:
    root = mounter(request_for(store, driver=driver, passthrough=False))
    serving = processes_of(root)
    command = [sys.executable, "-c", OPENS_AND_FORKS, f"{root}/shards/root_/000000.tar"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        with ended([child]):
            assert parent.wait() == 0
            said = fsmount("umount", root).stderr
            assert f"({child}: shards/root_/000000.tar)" in said
            assert umount(root, lazy=True) is not None
            assert mount_at(root) is None
            assert not has_ended(serving[0], 0)
            parent.stdin.write("\n")
            parent.stdin.flush()
            assert parent.stdout.readline() == "True\n"
            assert all(map(has_ended, serving))
            assert records.read(root) is None
