"""Mounts in environments that lack what one takes for granted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mounting import Mounter, fsmount, request_for, wait_for
from serving import both_drivers

from fsmount.model import Version
from fsmount.mount import lifecycle, records
from fsmount.mount.ending import umount
from fsmount.mount.mountinfo import mount_at, parse
from fsmount.store import Store
from fsmount.store.owner import Owner

pytestmark = pytest.mark.mounted
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
FSMOUNT = [sys.executable, "-m", "fsmount_cli.main"]


def shell(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a script of bash; `fs` is the command, `$1` and so on are `args`."""
    text = f'fs() {{ "{sys.executable}" -m fsmount_cli.main "$@"; }}\n{script}'
    return subprocess.run(
        ["bash", "-c", text, "bash", *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_line_of_mountinfo_ends_at_its_newline() -> None:
    odd = b"/mnt/a\r\x0b\x0c\x1c\x1d\x85\xe2\x80\xa8b"
    line = b"36 35 98:0 / %s rw,noatime - tmpfs none\r rw\n"
    found = parse(line % odd + line % b"/mnt/c")
    assert [os.fsencode(one.mountpoint) for one in found] == [odd, b"/mnt/c"]
    assert found[0].source == "none\r"


def test_a_carriage_return_in_a_mountpoint_is_a_byte_like_others(
    store: Store, version: Version, tmp_path: Path
) -> None:
    del version
    root = tmp_path / "mnt\r"
    root.mkdir()
    mounted = fsmount("mount", f"{store.path}@v1", str(root))
    assert (mounted.returncode, mounted.stderr) == (0, "")
    assert str(root) in [one.record.mountpoint for one in records.mounted()]
    assert fsmount("umount", str(root)).returncode == 0
    assert mount_at(str(root)) is None


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_descriptors_may_be_closed(
    store: Store, version: Version, mountpoint: str, closed: str
) -> None:
    del version
    done = shell(f'fs mount "$1" "$2" {closed}', f"{store.path}@v1", mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert mount_at(mountpoint) is not None
    umount(mountpoint)


def test_a_program_without_standard_descriptors_mounts(
    store: Store, version: Version, mountpoint: str
) -> None:
    del version
    program = """
import sys
from fsmount.mount import lifecycle
from fsmount.mount.request import MountRequest
lifecycle.mount(MountRequest(sys.argv[1], "v1", sys.argv[2]))
"""
    command = [sys.executable, "-c", program, store.path, mountpoint]
    script = 'exec "$@" <&- >&- 2>&-'
    done = subprocess.run(["bash", "-c", script, "bash", *command], check=False, timeout=60)
    assert done.returncode == 0
    assert mount_at(mountpoint) is not None
    umount(mountpoint)


@pytest.mark.parametrize("full", [">/dev/full", "| true"])
def test_what_can_not_be_told_is_not_mounted(
    store: Store, version: Version, mountpoint: str, full: str
) -> None:
    del version
    script = f'set -o pipefail; fs mount "$1" "$2" {full}'
    done = shell(script, f"{store.path}@v1", mountpoint)
    if full.startswith(">"):
        assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")
    assert (mount_at(mountpoint) is not None) == (done.returncode == 0)
    if done.returncode == 0:
        umount(mountpoint)


def test_an_interrupt_after_the_start_leaves_nothing_mounted(
    store: Store, version: Version, mountpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del version
    probe = records.probe

    def interrupted(path: str) -> int | None:
        assert mount_at(path) is not None
        monkeypatch.setattr(records, "probe", probe)
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "probe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lifecycle.mount(request_for(store, mountpoint=mountpoint))
    assert mount_at(mountpoint) is None
    assert records.read(mountpoint) is None


def test_a_foreground_without_stderr_serves(
    store: Store, version: Version, mountpoint: str
) -> None:
    del version
    command = [*FSMOUNT, "mount", "--foreground", f"{store.path}@v1", mountpoint]
    script = 'exec "$@" <&- >&- 2>&-'
    served = subprocess.Popen(["bash", "-c", script, "bash", *command])
    try:
        wait_for(lambda: Path(mountpoint, "VERSION.json").exists(), 60)
    finally:
        served.terminate()
    assert served.wait(60) == 0
    assert mount_at(mountpoint) is None


@both_drivers
@pytest.mark.parametrize("ignored", [True, False])
def test_nohup_keeps_a_foreground(
    store: Store, version: Version, mountpoint: str, driver: str, ignored: bool
) -> None:
    del version
    command = [*FSMOUNT, "mount", "--foreground", "--driver", driver]
    command += [f"{store.path}@v1", mountpoint]
    log = Path(f"{mountpoint}.log")
    with open(log, "wb") as file:
        served = subprocess.Popen(
            ["nohup", *command] if ignored else command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509
        )
    try:
        wait_for(lambda: b"serving v1" in log.read_bytes(), 60)
        served.send_signal(signal.SIGHUP)
        if ignored:
            with pytest.raises(subprocess.TimeoutExpired):
                served.wait(1)
            assert Path(mountpoint, "VERSION.json").exists()
    finally:
        served.send_signal(signal.SIGTERM if ignored else 0)
    assert served.wait(60) == 0
    assert mount_at(mountpoint) is None


def test_a_host_may_get_another_name() -> None:
    me = Owner.current()
    renamed = Owner("renamed", me.boot_id, me.pid_namespace, me.pid, me.start_time)
    assert renamed == me
    assert not renamed.is_gone()
    assert Owner("renamed", me.boot_id, me.pid_namespace, me.pid, me.start_time + 1).is_gone()
    assert not Owner(me.host, "other", me.pid_namespace, me.pid, me.start_time + 1).is_gone()


@needs_root
def test_a_dead_mount_is_cleared_on_a_host_that_was_renamed(
    store: Store, version: Version, mounter: Mounter
) -> None:
    del version
    root = mounter(request_for(store))
    record = records.read(root) or pytest.fail("no record")
    for one in record.processes:
        os.kill(one.pid, signal.SIGKILL)
    wait_for(lambda: record.is_over)
    script = 'hostname renamed; fs mount "$1" "$2"'
    text = f'fs() {{ "{sys.executable}" -m fsmount_cli.main "$@"; }}\n{script}'
    done = subprocess.run(
        ["unshare", "-u", "bash", "-c", text, "bash", f"{store.path}@v1", root],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, f"note: cleared a dead mount from {root}\n")
    umount(root)


@pytest.mark.parametrize(
    "command",
    [
        "mount ds@v1 mnt", "mount --foreground ds@v1 mnt", "umount mnt", "versions ds",
        "show ds@v1",
    ],
)  # fmt: skip
def test_a_relative_path_in_a_directory_that_is_gone_is_one_line(
    tmp_path: Path, command: str
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = shell(f'cd "$1" && rmdir "$1" && fs {command}', str(gone))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


def test_absolute_paths_do_without_a_working_directory(
    store: Store, version: Version, mountpoint: str, tmp_path: Path
) -> None:
    del version
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'cd "$1" && rmdir "$1" && fs mount "$2" "$3" && fs umount "$3"'
    done = shell(script, str(gone), f"{store.path}@v1", mountpoint)
    assert (done.returncode, done.stderr) == (0, "")


@needs_root
@pytest.mark.parametrize("where", ["", "/shards"])
def test_what_lies_on_a_mount_is_named_and_both_come_off(
    store: Store, version: Version, mounter: Mounter, where: str
) -> None:
    del version
    root = mounter(request_for(store))
    subprocess.run(["mount", "-t", "tmpfs", "over", f"{root}{where}"], check=True)
    try:
        refused = fsmount("umount", root)
        assert refused.returncode == 1
        assert "tmpfs (over)" in refused.stderr
        assert "unmount that first" in refused.stderr
        assert root in [one.record.mountpoint for one in records.mounted()]
    finally:
        subprocess.run(["umount", f"{root}{where}"], check=True)
    assert fsmount("umount", root).returncode == 0
    assert mount_at(root) is None
