"""Mounts begin, end and die as promised."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mounting import Mounter, fsmount, request_for, wait_for
from serving import both_drivers, has_ended, processes_of, server_of

from fsmount.errors import MountError
from fsmount.model import Version
from fsmount.mount import lifecycle, records
from fsmount.mount.ending import umount
from fsmount.mount.mountinfo import mount_at
from fsmount.mount.request import FUSEPY, KERNEL, MountRequest
from fsmount.store import Store
from fsmount.testing import tiny

pytestmark = pytest.mark.mounted


@both_drivers
def test_the_commands(store: Store, version: Version, mountpoint: str, driver: str) -> None:
    before = set(os.listdir(f"{store.path}/leases"))
    done = fsmount("mount", "--driver", driver, f"{store.path}@latest", mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"v1 on {mountpoint}\n"
    assert os.listdir(mountpoint)
    pid = server_of(mountpoint)
    server = processes_of(mountpoint)[-1]

    listed = json.loads(fsmount("mounts", "--json").stdout)
    [mine] = [one for one in listed if one["mountpoint"] == mountpoint]
    since = mine.pop("since")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", since)
    assert mine.pop("server")["pid"] == server
    supervisor = mine.pop("supervisor")
    assert mine["supervisor_pid"] == (supervisor["pid"] if driver == KERNEL else None)
    assert ("do_readdirplus" in mine.pop("features")) is (driver == KERNEL)
    assert mine == {
        "mountpoint": mountpoint,
        "store": store.path,
        "ref": "latest",
        "tag": "v1",
        "table": version.document.table.digest,
        "driver": driver,
        "server_pid": server,
        "supervisor_pid": pid if driver == KERNEL else None,
        "log": mine["log"],
        "device": mine["device"],
        "dead": False,
    }
    assert os.stat(mine["log"]).st_mode & 0o777 == 0o600
    table = fsmount("mounts").stdout
    assert re.search(rf"{mountpoint} +{store.path} +v1 +{driver} +{since} +{server}\n", table)
    [lease] = set(os.listdir(f"{store.path}/leases")) - before - {".clock"}
    lease_text = Path(store.path, "leases", lease).read_text()
    assert version.document.table.digest in lease_text
    assert json.loads(lease_text)["pid"] == pid

    done = fsmount("umount", mountpoint)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert os.listdir(mountpoint) == []
    assert has_ended(pid, 0)
    assert has_ended(server, 0)
    assert records.read(mountpoint) is None
    assert lease not in os.listdir(f"{store.path}/leases")
    assert mountpoint not in fsmount("mounts").stdout


def test_the_kernel_is_told_what_is_mounted(
    store: Store, version: Version, mounter: Mounter
) -> None:
    del version
    root = mounter(request_for(store))
    mount = mount_at(root)
    assert mount is not None
    assert mount.source == f"{store.path}@v1"
    info = os.stat(root)
    assert mount.device == f"{os.major(info.st_dev)}:{os.minor(info.st_dev)}"
    with open("/proc/mounts", encoding="utf-8") as file:
        [options] = [line.split()[3] for line in file if f" {root} " in line]
    assert {"ro", "nosuid", "nodev", "default_permissions"} <= set(options.split(","))
    assert "allow_other" not in options
    os.unlink(records.write(records.read(root) or pytest.fail("no record")))
    [unknown] = [one.record for one in records.mounted() if one.record.mountpoint == root]
    assert (unknown.store, unknown.tag, unknown.since) == (store.path, "v1", None)


def test_a_server_holds_nothing_of_its_parent(
    store: Store, version: Version, mounter: Mounter
) -> None:
    del version
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    root = mounter(request_for(store))
    pid = server_of(root)
    os.close(writer)
    assert os.read(reader, 1) == b""  # or it would wait for ever
    os.close(reader)
    assert os.getsid(pid) != os.getsid(0)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        assert file.read().rpartition(")")[2].split()[1] != str(os.getpid())


REFUSED = {
    "nowhere@v1": "no store at",
    "@v1": "no store before the '@'",
    "{store}@v9": "no version 'v9' in",
    "{store}@sha256:{zeros}": "no partition table sha256:",
    "{store}@no such tag": "not a tag",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_mounted_is_one_line(
    store: Store, version: Version, mountpoint: str, what: str
) -> None:
    del version
    done = fsmount("mount", what.format(store=store.path, zeros="0" * 12), mountpoint)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {REFUSED[what]}")
    assert mount_at(mountpoint) is None
    assert os.listdir(mountpoint) == []


def test_usage_errors(mountpoint: str) -> None:
    for wrong in (["--driver", "other"], ["--umask", "9"], ["--uid", "-1"], ["--verify", "all"]):
        assert fsmount("mount", "store@v1", mountpoint, *wrong).returncode == 2


def test_where_nothing_can_be_mounted(store: Store, version: Version, tmp_path: Path) -> None:
    del version
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for mountpoint, message in {
        tmp_path / "none": "no mountpoint",
        tmp_path / "full": "is not empty ('x')",
        tmp_path / "full" / "x": "is not a directory",
        Path(store.path, "staging"): "is inside the store",
    }.items():
        done = fsmount("mount", f"{store.path}@v1", str(mountpoint))
        assert done.returncode == 1
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


def test_nothing_is_stacked(store: Store, version: Version, mounter: Mounter) -> None:
    del version
    root = mounter(request_for(store))
    with pytest.raises(MountError, match=r"has .*@v1 mounted already.*fsmount umount"):
        lifecycle.mount(MountRequest(store.path, "v1", root))
    umount(root)
    mounter(request_for(store))


@both_drivers
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_foreground(
    store: Store, version: Version, mountpoint: str, number: signal.Signals, driver: str
) -> None:
    del version
    command = [
        sys.executable,
        "-m",
        "fsmount_cli.main",
        "mount",
        "--foreground",
        "--driver",
        driver,
    ]
    with subprocess.Popen(
        [*command, f"{store.path}@v1", mountpoint], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "serving v1 of" not in process.stderr.readline():
            assert process.poll() is None
        assert server_of(mountpoint) == process.pid
        assert os.listdir(mountpoint)
        process.send_signal(number)
        assert process.wait(20) == 0
        assert "unmounted" in process.stderr.read()
    assert mount_at(mountpoint) is None
    assert records.read(mountpoint) is None


def test_foreground_says_why_not(store: Store, version: Version, mountpoint: str) -> None:
    del version
    done = fsmount("mount", "--foreground", f"{store.path}@v9", mountpoint)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no version 'v9' in")
    done = fsmount("mount", "--foreground", f"{store.path}@v1", f"{mountpoint}/none")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no mountpoint")


def test_a_store_that_can_not_be_leased_is_mounted_all_the_same(
    tmp_path: Path, mountpoint: str
) -> None:
    store = Store.create(str(tmp_path / "store"))
    tiny.publish(store, "v1", {"p": [tiny.numbered("p/x", 1)]})
    os.rmdir(f"{store.path}/leases")
    Path(store.path, "leases").touch()  # root can write everything, but not below a file
    done = fsmount("mount", f"{store.path}@v1", mountpoint)
    assert done.returncode == 0
    assert done.stderr.startswith("note: the store can't be leased")
    assert done.stderr.count("\n") == 1
    run_sums = subprocess.run(
        ["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=mountpoint, check=False
    )
    assert run_sums.returncode == 0
    assert fsmount("umount", mountpoint).returncode == 0


def leases_of(store: Store) -> list[str]:
    return [name for name in os.listdir(f"{store.path}/leases") if name.endswith(".json")]


@both_drivers
def test_a_whole_store_leases_what_is_looked_into(
    tmp_path: Path, mounter: Mounter, driver: str
) -> None:
    store = Store.create(str(tmp_path / "store"))
    for number in (1, 2):
        tiny.publish(store, f"v{number}", {"p": [tiny.numbered("p/x", number)]})
    root = mounter(request_for(store, None, driver=driver))
    assert not leases_of(store)
    os.listdir(f"{root}/versions/v1/shards")
    wait_for(lambda: len(leases_of(store)) == 1)
    [lease] = leases_of(store)
    assert store.versions()[0].table.digest in Path(store.path, "leases", lease).read_text()
    umount(root)
    assert not leases_of(store)


def test_odd_mountpoints(store: Store, version: Version, tmp_path: Path) -> None:
    del version
    for name in ("with space", "new\nline", "tab\t", "back\\slash", "comma,opt=1", "ünï"):
        root = tmp_path / name
        root.mkdir()
        lifecycle.mount(MountRequest(store.path, "v1", str(root)))
        assert str(root) in [one.record.mountpoint for one in records.mounted()]
        assert os.listdir(root)
        umount(str(root))
        assert os.listdir(root) == []
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "ünï")
    lifecycle.mount(MountRequest(store.path, "v1", str(link)))
    umount(str(link))
    bad = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(bad)
    with pytest.raises(MountError, match="mountpoint is not UTF-8"):
        lifecycle.mount(MountRequest(store.path, "v1", bad, driver=FUSEPY))
    lifecycle.mount(MountRequest(store.path, "v1", bad))
    umount(bad)


def test_a_relative_store_and_mountpoint(store: Store, version: Version, tmp_path: Path) -> None:
    del version
    (tmp_path / "m").mkdir()
    link = tmp_path / "s"
    link.symlink_to(store.path)
    assert fsmount("mount", "s@v1", "m", cwd=tmp_path).returncode == 0
    assert fsmount("umount", "m", cwd=tmp_path).returncode == 0


def test_mount8_calls_us_with_its_own_arguments(
    store: Store, version: Version, mountpoint: str
) -> None:
    del version
    options = "ro,_netdev,nofail,x-systemd.automount,allow_other,umask=027,verify=open,dev,suid"
    done = fsmount(f"{store.path}@v1", mountpoint, "-o", options)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.stat(f"{mountpoint}/VERSION.json").st_mode & 0o777 == 0o440
    with open("/proc/mounts", encoding="utf-8") as file:
        assert any(f" {mountpoint} " in line and "allow_other" in line for line in file)
    assert fsmount("umount", mountpoint).returncode == 0
    done = fsmount(f"{store.path}@v1", mountpoint, "-o", "ro,fast")
    assert done.returncode == 2
    assert "unknown mount option 'fast'" in done.stderr
