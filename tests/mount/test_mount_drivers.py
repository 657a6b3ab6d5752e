"""Which driver serves, what it survives, and who may mount what where."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from mounting import Mounter, fsmount, request_for, wait_for

from fsmount.errors import MountError
from fsmount.model import Version
from fsmount.mount import drivers, lifecycle, records
from fsmount.mount.ending import umount
from fsmount.mount.kernel import device
from fsmount.mount.locks import starting
from fsmount.mount.mountinfo import all_mounts, mount_at
from fsmount.mount.records import Record
from fsmount.mount.request import AUTO, FUSEPY, KERNEL, MountRequest
from fsmount.store import Store

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can")


def record_of(root: str) -> Record:
    return records.read(root) or pytest.fail("no record")


def test_what_is_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(driver: str, mountpoint: str = "/m", *, xattrs: bool = False) -> tuple[str, int]:
        request = MountRequest("/s", "v1", mountpoint, driver=driver, xattrs=xattrs)
        name, notes = drivers.choose(request)
        return name, len(notes)

    monkeypatch.setattr(device, "unavailable", lambda: None)
    assert choose(AUTO) == choose(KERNEL, xattrs=True) == choose(AUTO, "/dev/fd/3") == (KERNEL, 0)
    assert choose(FUSEPY) == (FUSEPY, 0)
    monkeypatch.setattr(device, "unavailable", lambda: "no such kernel")
    assert choose(AUTO) == (FUSEPY, 1)
    with pytest.raises(MountError, match="no such kernel"):
        choose(KERNEL)
    for driver in (AUTO, FUSEPY):
        with pytest.raises(MountError, match="--xattrs needs the kernel driver"):
            choose(driver, xattrs=True)
        with pytest.raises(MountError, match="only the kernel driver takes a descriptor"):
            choose(driver, "/dev/fd/3")


def test_mounts_on_one_mountpoint_begin_one_after_the_other() -> None:
    with starting("/m") as first:
        with pytest.raises(MountError, match="another mount on /m has been"), starting("/m", 0.05):
            pass
        with starting("/other", 0.05):
            pass
        first.release()
        with starting("/m", 0.05):
            pass
    left = [name for base in records.directories() for name in os.listdir(base)]
    assert not [name for name in left if name.endswith(".lock")]


@pytest.mark.mounted
def test_of_two_mounts_at_once_one_is_told_of_the_other(
    store: Store, version: Version, mountpoint: str
) -> None:
    del version
    failures = []

    def mount(driver: str) -> None:
        try:
            lifecycle.mount(request_for(store, driver=driver, mountpoint=mountpoint))
        except MountError as error:
            failures.append(str(error))

    rivals = [threading.Thread(target=mount, args=[one]) for one in (KERNEL, FUSEPY, KERNEL)]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join()
    try:
        assert len(failures) == 2
        for failure in failures:
            assert f"{mountpoint} has {store.path}@v1 mounted already" in failure
        assert [one.mountpoint for one in all_mounts()].count(mountpoint) == 1
    finally:
        umount(mountpoint)


@pytest.mark.mounted
@pytest.mark.usefixtures("version")
def test_readers_do_not_see_that_a_server_is_killed(store: Store, mounter: Mounter) -> None:
    root = mounter(request_for(store, passthrough=False))
    before = record_of(root)
    assert before.server_pid is not None
    with open(f"{root}/shards/root_/000000.tar", "rb", 0) as file:
        os.kill(before.server_pid, signal.SIGKILL)
        assert len(file.read()) == os.fstat(file.fileno()).st_size
    wait_for(lambda: record_of(root).server_pid != before.server_pid)
    after = record_of(root)
    assert (after.supervisor, after.since) == (before.supervisor, before.since)


@pytest.mark.mounted
@pytest.mark.usefixtures("version")
def test_a_mount_whose_supervisor_was_killed_serves_and_ends(
    store: Store, mounter: Mounter
) -> None:
    root = mounter(request_for(store))
    record = record_of(root)
    assert record.supervisor_pid is not None
    os.kill(record.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: record.supervisor is not None and record.supervisor.is_gone())
    [mine] = [one for one in records.mounted() if one.record.mountpoint == root]
    assert not mine.dead
    assert mine.to_json()["supervisor_pid"] is None
    assert mine.to_json()["server_pid"] == record.server_pid
    assert os.listdir(f"{root}/shards")
    assert umount(root) is None
    assert record.is_over
    assert records.read(root) is None


@pytest.mark.mounted
@pytest.mark.usefixtures("version")
def test_extended_attributes_and_passthrough(store: Store, mounter: Mounter) -> None:
    root = mounter(request_for(store, xattrs=True, passthrough=False))
    assert os.listxattr(f"{root}/shards/root_/000000.tar")
    assert "passthrough" not in record_of(root).features


@needs_root
@pytest.mark.mounted
@pytest.mark.usefixtures("version")
def test_what_is_bound_elsewhere_goes_on_there(
    store: Store, mounter: Mounter, tmp_path: Path
) -> None:
    root = mounter(request_for(store, passthrough=False))
    record = record_of(root)
    bound = tmp_path / "bound"
    bound.mkdir()
    subprocess.run(["mount", "--bind", root, str(bound)], check=True)
    try:
        assert "still mounted elsewhere" in (umount(root) or "")
        assert "VERSION.json" in os.listdir(bound)
        assert not record.is_over
    finally:
        subprocess.run(["umount", str(bound)], check=True)
    wait_for(lambda: all(one.is_gone() for one in record.processes))


@needs_root
@pytest.mark.mounted
def test_a_descriptor_that_somebody_else_mounts(
    store: Store, version: Version, mountpoint: str
) -> None:
    del version
    options = device.MountOptions("elsewhere", mountpoint, allow_other=False, max_read=1 << 20)
    descriptor = device.open_and_mount(options)
    os.set_inheritable(descriptor, True)
    try:
        done = fsmount("mount", f"{store.path}@v1", f"/dev/fd/{descriptor}", pass_fds=[descriptor])
    finally:
        os.close(descriptor)
    try:
        assert (done.returncode, done.stderr) == (0, "")
        assert "VERSION.json" in os.listdir(mountpoint)
        assert umount(mountpoint) is None
    finally:
        if mount_at(mountpoint) is not None:
            umount(mountpoint, lazy=True)
