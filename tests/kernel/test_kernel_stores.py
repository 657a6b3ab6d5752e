"""Stores of all kinds under the kernel driver, and what is wrong with them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from kernel_mounts import (
    Mounter,
    NotServedError,
    config_for,
    end,
    is_backed,
    publish_large,
    read,
    start,
    wait_for,
)
from readers import objects_of

from fsmount.mount.kernel.prepare import command as command_of
from fsmount.mount.kernel.prepare import prepare_store
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs.filesystem import Owner
from fsmount.vfs.parted import Look

pytestmark = pytest.mark.mounted

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can")
passthrough = pytest.mark.parametrize("passthrough", [True, False])


def change_object(store: Store, shown: str, root: str, how: str) -> None:
    real = dict(objects_of(root, store.path))[shown]
    if how == "cut":
        os.chmod(real, 0o644)
        os.truncate(real, os.path.getsize(real) - 1)
        return
    os.unlink(real)
    if how == "fifo":
        os.mkfifo(real)
    elif how == "link":
        os.symlink("/etc/passwd", real)


@passthrough
@pytest.mark.parametrize("how", ["cut", "remove", "fifo", "link"])
def test_a_bad_object_is_an_error_of_that_file(
    mount: Mounter, tmp_path: Path, how: str, passthrough: bool
) -> None:
    store = Store.create(str(tmp_path / "store"))
    publish_large(store)
    served = mount(store, passthrough=passthrough)
    (bad, _), *good = objects_of(served.root, store.path)
    change_object(store, bad, served.root, how)
    with pytest.raises(OSError, match="Input/output") as caught:
        read(bad)
    assert caught.value.errno == errno.EIO
    for shown, real in good:
        assert read(shown) == read(real)
    assert Path(bad).name in served.log_text()


def test_a_file_that_is_cut_while_it_is_read(mount: Mounter, tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    publish_large(store)
    for splice in (True, False):
        served = mount(store, passthrough=False, splice=splice)
        shown, real = objects_of(served.root, store.path)[0]
        expected = read(real)
        with open(shown, "rb", 0) as file:
            os.chmod(real, 0o644)
            os.truncate(real, 700_000)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with pytest.raises(OSError, match="Input/output"):
                os.pread(file.fileno(), 1 << 20, 700_000)
            for _ in range(2):  # the kernel hands out what it has, and tells the next read
                begun = os.pread(file.fileno(), 1 << 20, 600_000)
                assert begun == expected[600_000 : 600_000 + len(begun)]
                assert 0 < len(begun) <= 100_000
                with pytest.raises(OSError, match="Input/output"):
                    os.pread(file.fileno(), 1 << 20, 600_000 + len(begun))
            Path(real).write_bytes(expected)
            assert file.read() == expected


@needs_root
def test_a_store_on_tmpfs_and_on_overlayfs(tmp_path: Path, mount: Mounter) -> None:
    with ExitStack() as stack:
        shm = tmp_path / "shm"
        shm.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", str(shm)], check=True)
        stack.callback(subprocess.run, ["umount", "-l", str(shm)], check=True)
        for name in ("upper", "work", "lower", "over"):
            (shm / name).mkdir()
        over = str(shm / "over")
        layers = f"lowerdir={shm}/lower,upperdir={shm}/upper,workdir={shm}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", layers, "none", over], check=True)
        stack.callback(subprocess.run, ["umount", "-l", over], check=True)
        for directory, backed in ((str(shm), True), (over, False)):
            store = Store.create(f"{directory}/store")
            publish_large(store)
            served = mount(store)
            pairs = objects_of(served.root, store.path)
            with open(pairs[0][0], "rb", 0) as held:  # what fell back stays so, also for others
                for shown, real in pairs * 2:
                    assert read(shown) == read(real)
                assert held.read() == read(pairs[0][1])
            if "passthrough" in served.features:
                assert is_backed(served, pairs[0][0]) is backed
            assert ("stacked itself" in served.log_text()) is not backed
            end(served)


def test_a_store_that_cannot_be_written(tmp_path: Path, mount: Mounter) -> None:
    """The path list goes elsewhere, and the lease can't be had."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount read-only")
    store = Store.create(str(tmp_path / "store"))
    publish_large(store)
    here = str(tmp_path / "here")
    os.mkdir(here)
    subprocess.run(["mount", "--bind", store.path, here], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", here], check=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            served = mount(Store.open(here))
        for shown, real in objects_of(served.root, here):
            assert read(shown) == read(real)
        assert len(list((tmp_path / "cache" / "fsmount" / "paths").iterdir())) == 1
        end(served)
    finally:
        subprocess.run(["umount", "-l", here], check=True)


def test_all_versions_of_a_store(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path / "store"))
    publish_large(store)
    root = str(tmp_path / "mnt")
    os.mkdir(root)
    look = Look(Owner.of_process())
    config = prepare_store(store, root, store.path, look)
    command = command_of(config)
    served = start(command, root, str(tmp_path / "log"))
    try:
        assert sorted(os.listdir(root)) == ["latest", "versions"]
        assert os.readlink(f"{root}/latest") == "versions/v1"
        for shown, real in objects_of(f"{root}/latest", store.path):
            assert read(shown) == read(real)
        tiny.publish(store, "v2", {"a": [tiny.numbered("a/1", 1)]})
        wait_for(lambda: sorted(os.listdir(f"{root}/versions")) == ["v1", "v2"])
        wait_for(lambda: os.readlink(f"{root}/latest") == "versions/v2")
        os.kill(served.server, signal.SIGKILL)
        for tag in ("v1", "v2"):
            for shown, real in objects_of(f"{root}/versions/{tag}", store.path):
                assert read(shown) == read(real)
    finally:
        end(served)


def test_a_mountpoint_that_is_none(store: Store, tmp_path: Path) -> None:
    config = config_for(store, str(tmp_path / "none"))
    command = command_of(config)
    with pytest.raises(NotServedError, match=r"can't mount on .*No such file"):
        start(command, config.mountpoint, str(tmp_path / "log"))
