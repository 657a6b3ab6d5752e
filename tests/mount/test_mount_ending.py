"""How mounts end: asked, busy, lazy, killed, stuck."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress

import pytest
from mounting import Mounter, fsmount, request_for, wait_for
from processes import stop
from serving import (
    both_drivers,
    has_ended,
    held,
    kill_all,
    processes_about,
    processes_of,
    server_of,
)

from fsmount.errors import MountError
from fsmount.model import Version
from fsmount.mount import ending, lifecycle, records
from fsmount.mount.ending import umount
from fsmount.mount.mountinfo import all_mounts, mount_at
from fsmount.mount.request import FUSEPY, KERNEL, MountRequest
from fsmount.store import Store

pytestmark = pytest.mark.mounted


def test_umount_of_nothing(mountpoint: str) -> None:
    for path, message in {mountpoint: "nothing is mounted on", "/proc": "has proc mounted"}.items():
        done = fsmount("umount", path)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert message in done.stderr


MAP_SUMS = """
import mmap, os
with open(os.environ["M"] + "/SHA256SUMS") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
"""


@both_drivers
@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import os; os.chdir(os.environ['M'] + '/shards')", "working directory"),
        ("import os; f = open(os.environ['M'] + '/VERSION.json')", "VERSION.json"),
        (MAP_SUMS, "SHA256SUMS"),
    ],
)
@pytest.mark.usefixtures("version")
def test_a_busy_mount_says_who_holds_it(
    store: Store, mounter: Mounter, code: str, what: str, driver: str
) -> None:
    root = mounter(request_for(store, driver=driver))
    with held(root, code) as pid:
        done = fsmount("umount", root)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {root} is busy: ")
        assert re.search(rf"\w+ \({pid}: {re.escape(what)}\)", done.stderr)
        assert "--lazy" in done.stderr
        assert os.listdir(root)
    assert umount(root) is None


@both_drivers
def test_lazy_umount_lets_its_readers_finish(
    store: Store, version: Version, mounter: Mounter, driver: str
) -> None:
    del version
    root = mounter(request_for(store, driver=driver))
    pid = server_of(root)
    with open(f"{root}/shards/root_/000000.tar", "rb", 0) as file:
        done = fsmount("umount", "--lazy", root)
        assert done.returncode == 0
        assert (
            done.stderr
            == f"note: detached; process {pid} serves it until the last file is closed\n"
        )
        assert os.listdir(root) == []
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert len(file.read()) == os.fstat(file.fileno()).st_size
        assert root not in fsmount("mounts").stdout
    assert has_ended(pid)


@both_drivers
@pytest.mark.parametrize("ended_by", ["mount", "umount", "nobody"])
def test_a_killed_server_leaves_a_mount_that_is_cleared(
    store: Store, version: Version, mounter: Mounter, ended_by: str, driver: str
) -> None:
    del version
    root = mounter(request_for(store, driver=driver))
    with held(root, "import os; os.chdir(os.environ['M'])"):
        kill_all(root)
        with suppress(OSError):  # asked while the connection was being ended
            os.listdir(root)
        with pytest.raises(OSError, match="not connected"):
            os.listdir(root)
        assert re.search(rf"{root} .* dead\n", fsmount("mounts").stdout)
        if ended_by == "mount":
            done = fsmount("mount", f"{store.path}@v1", root)
            assert (done.returncode, done.stderr) == (
                0,
                f"note: cleared a dead mount from {root}\n",
            )
            assert os.listdir(root)
        else:
            if ended_by == "nobody":  # but somebody removed the record
                os.unlink(records.write(records.read(root) or pytest.fail("no record")))
            done = fsmount("umount", root)
            assert done.returncode == 0
            assert done.stderr == f"note: the server of {root} was dead; the mount is cleared\n"
            assert os.listdir(root) == []
    if ended_by == "mount":
        umount(root)
    assert records.read(root) is None
    assert mount_at(root) is None


@pytest.mark.parametrize("first", ["supervisor", "server"])
def test_killed_in_any_order_and_mounted_again(
    store: Store, version: Version, mountpoint: str, first: str
) -> None:
    """A successor that the supervisor has begun just before it was killed serves on."""
    del version
    for _ in range(2):
        lifecycle.mount(MountRequest(store.path, "v1", mountpoint, driver=KERNEL))
        supervisor, server = processes_of(mountpoint)
        pids = [supervisor, server] if first == "supervisor" else [server, supervisor]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert all(map(has_ended, pids))
        done = fsmount("mount", f"{store.path}@v1", mountpoint)
        assert done.returncode == 0 or "mounted already" in done.stderr
        assert [one.mountpoint for one in all_mounts()].count(mountpoint) == 1
        assert os.listdir(mountpoint)
        umount(mountpoint)
        assert mount_at(mountpoint) is None
        wait_for(lambda: not processes_about(mountpoint))


@both_drivers
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_is_asked_to_end_unmounts(
    store: Store, version: Version, mounter: Mounter, number: signal.Signals, driver: str
) -> None:
    del version
    earlier = signal.signal(number, signal.SIG_DFL)  # what nohup ignores is ignored by all below it
    try:
        root = mounter(request_for(store, driver=driver))
    finally:
        signal.signal(number, earlier)
    pid = server_of(root)
    os.kill(pid, number)
    assert has_ended(pid)
    assert mount_at(root) is None
    assert records.read(root) is None


@both_drivers
@pytest.mark.parametrize("lazy", [False, True])
def test_an_umount_ends_within_its_time(
    store: Store, version: Version, mounter: Mounter, driver: str, lazy: bool
) -> None:
    """A server that does not answer does not make umount hang, nor those who ask it."""
    del version
    root = mounter(request_for(store, driver=driver))
    *_, pid = processes = processes_of(root)
    stop(pid)
    reader = subprocess.Popen(["cat", f"{root}/VERSION.json"], stderr=subprocess.DEVNULL)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ending, "END_SECONDS", 0.2)
            patch.setattr(records, "PROBE_SECONDS", 0.2)
            if lazy:
                note = umount(root, lazy=True)
                assert reader.wait(60) == 1
                assert note is not None
                assert note.startswith(f"nobody answered on {root}, so its connection was ended")
            else:
                if driver == KERNEL:  # whose own question ends with the command
                    assert "; nobody answers them; close" in fsmount("umount", root).stderr
                reader.kill()
                reader.wait(60)
                assert re.search(rf"process .*{pid} did not end .* killed", umount(root) or "")
        assert mount_at(root) is None
        assert records.read(root) is None
        assert all(has_ended(one, 0) for one in processes)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)  # or a reader whose request was taken could not end
        reader.kill()
        reader.wait(60)


def test_a_server_that_does_not_come_up_is_ended(
    store: Store, version: Version, mountpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del version
    monkeypatch.setattr(lifecycle, "START_SECONDS", 0.0)
    monkeypatch.setattr(lifecycle, "_KILL_SECONDS", 0.1)
    with pytest.raises(MountError, match="the server did not serve in 0 s; it was stopped"):
        lifecycle.mount(MountRequest(store.path, "v1", mountpoint))
    assert mount_at(mountpoint) is None
    assert not processes_about(mountpoint)


def test_a_server_that_dies_is_an_error(
    store: Store, version: Version, mountpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del version
    monkeypatch.setenv("FUSE_LIBRARY_PATH", "/nowhere/libfuse.so")
    with pytest.raises(MountError, match=r"libfuse 2 is not installed: .*nowhere/libfuse.so"):
        lifecycle.mount(MountRequest(store.path, "v1", mountpoint, driver=FUSEPY))
    monkeypatch.delenv("FUSE_LIBRARY_PATH")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(MountError, match=r"the server died before it served \(.*\); its log is"):
        lifecycle.mount(MountRequest(store.path, "v1", mountpoint))
    assert mount_at(mountpoint) is None
    assert not processes_about(mountpoint)
