"""A store one object of which hangs: for real, since another mount serves it and is stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from kernel_mounts import (
    KernelMount,
    Mounter,
    config_for,
    mounted,
    publish_large,
    read,
    wait_for,
)
from processes import stop
from readers import objects_of

from fsmount.errors import MountError
from fsmount.mount import ending, holders, records
from fsmount.mount.ending import umount
from fsmount.mount.kernel import device
from fsmount.mount.mountinfo import mount_at
from fsmount.store import Store

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can bind a file"),
]

SECONDS = 20
passthrough = pytest.mark.parametrize("passthrough", [True, False])
hung_in = pytest.mark.parametrize("hung_in", ["open", "read"])


@dataclass(frozen=True, slots=True)
class Source:
    """A store, and who serves its object of the shard at `path`."""

    store: Store
    path: str
    inner: KernelMount

    def hang(self) -> None:
        stop(self.inner.server)

    def go_on(self) -> None:
        os.kill(self.inner.server, signal.SIGCONT)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    inner = Store.create(str(tmp_path / "inner"))
    publish_large(inner)
    outer = shutil.copytree(inner.path, tmp_path / "outer")
    root = tmp_path / "inner mnt"
    root.mkdir()
    config = config_for(inner, str(root), passthrough=False)
    with mounted(config, str(tmp_path / "inner.log")) as served, ExitStack() as stack:
        shown, real = objects_of(served.root, str(outer))[0]
        subprocess.run(["mount", "--bind", shown, real], check=True)
        stack.callback(subprocess.run, ["umount", "-l", real], check=True)
        made = Source(Store.open(str(outer)), os.path.relpath(shown, root), served)
        stack.callback(made.go_on)
        yield made


@contextmanager
def hung_reader(
    source: Source, served: KernelMount, hung_in: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A `cat` that hangs in open, or in read."""
    path = f"{served.root}/{source.path}"
    with ExitStack() as stack:
        if hung_in == "read":
            file = stack.enter_context(open(path, "rb", 0))
        source.hang()
        reader = (
            subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
            if hung_in == "read"
            else subprocess.Popen(["cat", path], stdout=subprocess.PIPE)
        )
        stack.close()
    try:
        if hung_in == "open":
            wait_for(lambda: reader.pid in [one.pid for one in holders.waiting([])])
        yield reader
    finally:
        reader.kill()
        reader.communicate()


def fsmount_umount(root: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsmount_cli.main", "umount", root]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@passthrough
@hung_in
def test_who_hangs_can_be_killed_and_harms_nobody(
    source: Source, mount: Mounter, hung_in: str, passthrough: bool
) -> None:
    served = mount(source.store, passthrough=passthrough)
    with hung_reader(source, served, hung_in) as reader:
        for shown, real in objects_of(served.root, source.store.path)[1:]:
            assert read(shown) == read(real)
        said = fsmount_umount(served.root)
        holds = source.path if hung_in == "read" else "waits for a FUSE mount, perhaps this one"
        assert said.returncode == 1
        assert f"{served.root} is busy: " in said.stderr
        assert f"cat ({reader.pid}: {holds})" in said.stderr
        assert f"({served.server}: " not in said.stderr
        assert reader.poll() is None
        reader.kill()
        assert reader.wait(SECONDS) == -signal.SIGKILL
        assert umount(served.root) is None
        assert served.process.wait(SECONDS) == 0


@passthrough
@hung_in
def test_what_hangs_is_detached_and_goes_on_when_the_object_does(
    source: Source, mount: Mounter, hung_in: str, passthrough: bool
) -> None:
    served = mount(source.store, passthrough=passthrough)
    with hung_reader(source, served, hung_in) as reader:
        assert "serves it until the last file is closed" in (umount(served.root, lazy=True) or "")
        assert mount_at(served.root) is None
        assert os.listdir(served.root) == []
        assert reader.poll() is None
        source.go_on()
        assert reader.communicate(timeout=SECONDS)[0] == read(f"{source.inner.root}/{source.path}")
        assert reader.wait() == 0
    assert served.process.wait(SECONDS) == 0


@contextmanager
def control_files(directory: Path, *, there: bool) -> Iterator[str]:
    """Where the kernel's control files of FUSE connections are, or would be."""
    directory.mkdir()
    if there:
        subprocess.run(["mount", "-t", "fusectl", "fusectl", str(directory)], check=True)
    try:
        yield str(directory)
    finally:
        if there:
            subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.parametrize("there", [True, False])
def test_a_connection_that_is_stuck_is_ended(
    mount: Mounter, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """With the kernel's control files, or by killing who serves: who waits gets an error."""
    served = mount(passthrough=False)
    shown, _ = objects_of(served.root, store.path)[0]
    pids = (served.supervisor, served.server)
    aborted: list[bool] = []

    def abort(number: str, real: Callable[[str], bool] = device.abort) -> bool:
        aborted.append(real(number))
        return aborted[-1]

    monkeypatch.setattr(ending, "abort", abort)
    monkeypatch.setattr(records, "PROBE_SECONDS", 0.2)
    with control_files(tmp_path / "control", there=there) as directory, open(shown, "rb") as file:
        monkeypatch.setattr(device, "_CONNECTIONS", directory)
        for pid in pids:
            stop(pid)
        reader = subprocess.Popen(["cat"], stdin=file, stderr=subprocess.PIPE)
        try:
            with pytest.raises(MountError, match=rf"is busy: .*\({reader.pid}: .*nobody answers"):
                umount(served.root)
            assert "its connection was ended" in (umount(served.root, lazy=True) or "")
            assert b"cat: " in reader.communicate(timeout=SECONDS)[1]
        finally:
            reader.kill()
            reader.wait()
    assert aborted == [there]
    assert mount_at(served.root) is None
    assert served.process.wait(SECONDS) < 0
