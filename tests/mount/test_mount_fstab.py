"""mount(8) and fstab, as a boot uses them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from mounting import wait_for

from fsmount.mount import records
from fsmount.mount.mountinfo import all_mounts, mount_at
from fsmount.store import Store
from fsmount_cli.fstab import HELPER, from_mount8

AT_BOOT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
PLACES = ["/usr/local/bin/fsmount", f"/sbin/{HELPER}"]  # as docs/semantics.md has them

at_boot = [
    pytest.mark.mounted,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can install the command"),
    pytest.mark.usefixtures("version", "installed"),
]


def test_the_helper_of_mount8() -> None:
    call = [
        "/s@v1",
        "/m",
        "-n",
        "-o",
        "rw,xattrs,no_passthrough,driver=kernel",
        "-t",
        "fuse.fsmount",
    ]
    words = from_mount8(call, f"/sbin/{HELPER}")
    assert words == [
        "mount",
        "--xattrs",
        "--no-passthrough",
        "--driver",
        "kernel",
        "--",
        "/s@v1",
        "/m",
    ]
    assert from_mount8(["/s", "/m", "-s", "-o", "odd"], HELPER) == ["mount", "--", "/s", "/m"]
    for wrong in (["/s"], ["/s", "/m", "-N", "1"], ["/s", "/m", "-o", "odd"], ["/s", "/m", "-x"]):
        with pytest.raises(click.UsageError):
            from_mount8(wrong, HELPER)
    with pytest.raises(SystemExit):
        from_mount8(["/s", "/m", "-f"], HELPER)
    assert from_mount8(["show", "st@v1", "-o", "x"]) == ["show", "st@v1", "-o", "x"]


@pytest.fixture(params=PLACES)
def installed(request: pytest.FixtureRequest) -> Iterator[str]:
    """The program where mount(8), or its helper mount.fuse3, finds it; nowhere else."""
    place = str(request.param)
    if any(map(os.path.lexists, PLACES)):
        pytest.skip("somebody has installed it")
    if place == PLACES[0] and shutil.which("mount.fuse3") is None:
        pytest.skip("no fuse3")
    program = f"{os.path.dirname(sys.executable)}/fsmount"
    if not os.path.exists(program):
        pytest.skip("the command is not installed")
    os.symlink(program, place)
    try:
        yield place
    finally:
        os.unlink(place)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the environment of a boot, and the tests' own directories."""
    ours = {name: os.environ[name] for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME")}
    env = {**AT_BOOT, **ours}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=60)


@pytest.fixture
def taken_off(mountpoint: str) -> Iterator[None]:
    """Nothing is left mounted, whatever fails."""
    yield
    while mount_at(mountpoint) is not None:
        assert run("umount", "--lazy", mountpoint).returncode == 0


def umount(mountpoint: str, what: str) -> None:
    """Have umount(8) take `what` off, with which all that served it ends."""
    record = records.read(mountpoint)
    assert record is not None
    done = run("umount", what)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert mount_at(mountpoint) is None
    wait_for(lambda: record.is_over and records.read(mountpoint) is None)


def options_of(mountpoint: str) -> set[str]:
    """What the kernel says of the mount."""
    found = run("findmnt", "--noheadings", "--output", "OPTIONS", mountpoint).stdout
    return set(found.strip().split(","))


@pytest.mark.usefixtures("taken_off")
class TestAtBoot:
    """Of the real mount(8)."""

    pytestmark = at_boot

    def test_mount_and_umount(self, store: Store, mountpoint: str) -> None:
        options = "ro,_netdev,nofail,allow_other,umask=027,xattrs"
        done = run("mount", "-t", "fuse.fsmount", f"{store.path}@v1", mountpoint, "-o", options)
        assert (done.returncode, done.stderr) == (0, "")
        assert {"ro", "nosuid", "nodev", "allow_other"} <= options_of(mountpoint)
        assert os.stat(f"{mountpoint}/VERSION.json").st_mode & 0o777 == 0o440
        assert os.listxattr(f"{mountpoint}/VERSION.json")
        umount(mountpoint, mountpoint)

    @pytest.mark.parametrize("ref", ["@v1", "@latest", ""])
    def test_a_line_of_fstab(self, store: Store, mountpoint: str, tmp_path: Path, ref: str) -> None:
        source, fstab = f"{store.path}{ref}", tmp_path / "fstab"
        line = f"{source} {mountpoint} fuse.fsmount ro,_netdev,nofail,allow_other 0 0\n"
        fstab.write_text(line)
        for command in (
            ["mount", "--fstab", str(fstab), mountpoint],
            ["mount", "--fstab", str(fstab), "--all"],
            ["mount", "--fstab", str(fstab), source],
        ):
            assert run(*command).returncode == 0
            again = run("mount", "--fstab", str(fstab), "--all")  # mounts what is not
            assert (again.returncode, again.stderr) == (0, "")
            assert [one.mountpoint for one in all_mounts()].count(mountpoint) == 1
            assert "allow_other" in options_of(mountpoint)
            assert ("VERSION.json" if ref else "versions") in os.listdir(mountpoint)
            umount(mountpoint, source if ref else mountpoint)  # a store is a directory, no mount

    def test_what_can_not_be_mounted_says_why(self, store: Store, mountpoint: str) -> None:
        done = run("mount", "-t", "fuse.fsmount", f"{store.path}@v9", mountpoint, "-o", "ro,nofail")
        assert done.returncode != 0
        assert done.stderr == f"error: no version 'v9' in {store.path}: it has v1\n"
        done = run("mount", "-t", "fuse.fsmount", f"{store.path}@v1", mountpoint, "-o", "fast")
        assert done.returncode != 0
        assert "unknown mount option 'fast'" in done.stderr
        assert mount_at(mountpoint) is None
