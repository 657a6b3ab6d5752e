"""Root mounts on what was checked, whoever moves directories and plants links meanwhile."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import fsmount, sweep

from fsmount.errors import MountError
from fsmount.model import Version
from fsmount.mount import places
from fsmount.mount.kernel import device
from fsmount.mount.kernel.device import MountOptions
from fsmount.mount.mountinfo import all_mounts, mount_at
from fsmount.store import Store

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root acts in directories of others"),
]
SOMEBODY = 65534


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Path]:
    """A directory of another user, with an empty `a/mnt`; beside it root's own `root/mnt`."""
    path = tmp_path / "theirs"
    for one in (path, path / "a", path / "a/mnt"):
        one.mkdir()
        os.chown(one, SOMEBODY, SOMEBODY)
    (tmp_path / "root/mnt").mkdir(parents=True)
    yield path
    sweep(str(tmp_path), only_dead=False)


def plant(link: Path, target: Path) -> None:
    """What the user does: move a directory away and put a link in its place."""
    link.rename(f"{link}.was")
    link.symlink_to(target)
    os.lchown(link, SOMEBODY, SOMEBODY)


def options(mountpoint: Path) -> MountOptions:
    return MountOptions("somewhere", str(mountpoint), allow_other=False, max_read=1 << 20)


def mounts_below(path: Path) -> list[str]:
    return [one.mountpoint for one in all_mounts() if one.mountpoint.startswith(f"{path}/")]


@pytest.mark.parametrize("part", ["a/mnt", "a"])
def test_a_mountpoint_that_became_a_link_is_not_followed(theirs: Path, part: str) -> None:
    root = theirs.parent / "root"
    plant(theirs / part, root / "mnt" if part == "a/mnt" else root)
    with pytest.raises(MountError, match="moved or replaced meanwhile"):
        device.open_and_mount(options(theirs / "a/mnt"))
    assert mounts_below(theirs.parent) == []


def test_a_mountpoint_that_is_moved_at_the_last_moment_is_left(theirs: Path) -> None:
    wanted = theirs / "a/mnt"
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        with places.opened(str(wanted)) as directory:
            plant(theirs / "a", theirs.parent / "root")
            with pytest.raises(MountError, match="was moved while it was mounted on"):
                device._mount_on(directory, fd, options(wanted))
    finally:
        os.close(fd)
    assert mounts_below(theirs.parent) == []


def test_an_unmount_finds_its_own_mount_and_no_other(theirs: Path) -> None:
    wanted, other = theirs / "a/mnt", theirs.parent / "root/mnt"
    mine = device.open_and_mount(options(wanted))
    mounted = mount_at(str(wanted))
    assert mounted is not None
    others = device.open_and_mount(options(other))
    try:
        plant(theirs / "a", theirs.parent / "root")  # the same path leads to root's other mount
        assert device.unmount(str(wanted), detach=True, only=mounted) == 0
        assert mounts_below(theirs.parent) == [str(other)]
        assert device.unmount(str(wanted), detach=True, only=mounted) != 0
        assert mounts_below(theirs.parent) == [str(other)]
        assert device.unmount(str(other), detach=True) == 0
    finally:
        os.close(mine)
        os.close(others)


def test_a_bind_that_somebody_made_of_a_mount_stays(theirs: Path) -> None:
    wanted, bound = theirs / "a/mnt", theirs.parent / "root/mnt"
    fd = device.open_and_mount(options(wanted))
    mounted = mount_at(str(wanted))
    assert mounted is not None
    try:
        subprocess.run(["mount", "--bind", str(wanted), str(bound)], check=True)
        for code in (0, errno.EINVAL):
            assert device.unmount(str(wanted), detach=True, only=mounted) == code
            assert mounts_below(theirs.parent) == [str(bound)]
    finally:
        os.close(fd)


def test_root_follows_a_link_of_another_user_only_to_what_is_theirs(
    store: Store, version: Version, theirs: Path
) -> None:
    del version
    link = theirs / "link"
    link.symlink_to(theirs.parent / "root/mnt")
    os.lchown(link, SOMEBODY, SOMEBODY)
    done = fsmount("mount", f"{store.path}@v1", str(link))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {link} is a link of user {SOMEBODY}")
    assert mounts_below(theirs.parent) == []
    link.unlink()
    link.symlink_to("a/mnt")
    os.lchown(link, SOMEBODY, SOMEBODY)
    assert fsmount("mount", f"{store.path}@v1", str(link)).stdout == f"v1 on {link}\n"
    assert mount_at(str(theirs / "a/mnt")) is not None
    assert fsmount("umount", str(theirs / "a/mnt")).returncode == 0


def test_libfuse_gets_no_path_that_others_can_change(
    store: Store, version: Version, theirs: Path
) -> None:
    del version
    done = fsmount("mount", "--driver", "fusepy", f"{store.path}@v1", str(theirs / "a/mnt"))
    assert done.returncode == 1
    assert f"another user can move {theirs / 'a'}" in done.stderr
    assert mounts_below(theirs.parent) == []


@pytest.mark.parametrize("driver", ["kernel", "fusepy"])
def test_root_of_a_user_namespace_mounts_like_any_user(
    store: Store, version: Version, theirs: Path, driver: str
) -> None:
    """It has no rights that others could abuse, and can't tell most owners apart."""
    del version
    (theirs / "link").symlink_to(theirs.parent / "root")
    os.lchown(theirs / "link", SOMEBODY, SOMEBODY)
    root = theirs / "link/mnt"
    command = [sys.executable, "-m", "fsmount_cli.main"]
    script = f"set -e; {shlex.join(command)} mount --driver {driver} $1@v1 $2; cat $2/VERSION.json"
    script += f"; {shlex.join(command)} umount $2"
    done = subprocess.run(
        ["unshare", "-Urm", "bash", "-c", script, "bash", store.path, str(root)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert '"tag": "v1"' in done.stdout


def test_a_mount_whose_path_is_covered_is_not_taken_off_by_it(
    store: Store, version: Version, theirs: Path
) -> None:
    del version
    above = theirs.parent / "root"
    root = above / "mnt"
    assert fsmount("mount", f"{store.path}@v1", str(root)).returncode == 0
    subprocess.run(["mount", "-t", "tmpfs", "over", str(above)], check=True)
    try:
        root.mkdir()
        for lazy in ([], ["--lazy"]):
            done = fsmount("umount", *lazy, str(root))
            assert done.returncode == 1
            assert "its path does not lead to it" in done.stderr
    finally:
        subprocess.run(["umount", str(above)], check=True)
    assert fsmount("umount", str(root)).returncode == 0
    assert mounts_below(above) == []


def test_links_are_resolved_as_the_system_does(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "l").symlink_to("a/../a/b")
    (tmp_path / "m").symlink_to(tmp_path / "l/.")
    for path in ("l", "m", "m/../b", "missing/x", "a/./b//", "l/missing/../x"):
        text = f"{tmp_path}/{path}"
        assert places.resolve(text) == os.path.realpath(text)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(MountError, match="Too many levels"):
        places.resolve(str(tmp_path / "loop"))
