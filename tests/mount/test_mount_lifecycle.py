"""Mounts begin, end and die as promised."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from mounting import Mounter, fsmount, request_for, sweep, wait_for

from fsmount.errors import MountError
from fsmount.model import Version
from fsmount.mount import ending, lifecycle, records
from fsmount.mount.ending import umount
from fsmount.mount.mountinfo import mount_at
from fsmount.mount.request import FUSEPY, KERNEL, MountRequest
from fsmount.store import Store
from fsmount.testing import tiny

pytestmark = pytest.mark.mounted

NOBODY = 65534
both_drivers = pytest.mark.parametrize("driver", [KERNEL, FUSEPY])


def has_ended(pid: int, seconds: float = 10.0) -> bool:
    """Wait for the end of any process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(descriptor, "rb", buffering=0):
        return bool(select.select([descriptor], [], [], seconds)[0])


def processes_of(mountpoint: str) -> list[int]:
    """Who keeps it alive: its supervisor, if the driver has one, and its server."""
    record = records.read(mountpoint)
    assert record is not None
    assert record.server_pid is not None
    return [one.pid for one in record.processes]


def server_of(mountpoint: str) -> int:
    """The process that the mount ends with."""
    return processes_of(mountpoint)[0]


def kill_all(mountpoint: str) -> None:
    for pid in processes_of(mountpoint):
        os.kill(pid, signal.SIGKILL)
        assert has_ended(pid)


@contextmanager
def held(mountpoint: str, code: str) -> Iterator[int]:
    """A process that runs `code` in the mount and then waits."""
    program = f"{code}\nprint('held', flush=True)\ninput()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/", env={"M": mountpoint}
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process.pid
        process.stdin.close()


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
    assert mount.source == f"fsmount:{store.path}@v1"
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
    with pytest.raises(MountError, match=r"has fsmount:.*@v1 mounted already.*fsmount umount"):
        lifecycle.mount(MountRequest(store.path, "v1", root))
    umount(root)
    mounter(request_for(store))


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
    with open(f"{root}/shards/_root/000000.tar", "rb", 0) as file:
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


@both_drivers
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_is_asked_to_end_unmounts(
    store: Store, version: Version, mounter: Mounter, number: signal.Signals, driver: str
) -> None:
    del version
    root = mounter(request_for(store, driver=driver))
    pid = server_of(root)
    os.kill(pid, number)
    assert has_ended(pid)
    assert mount_at(root) is None
    assert records.read(root) is None


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


def as_nobody(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `command` as another user, who may look at every file of this installation.

    That right does not reach into mounts of others, nor to writing.
    """
    rights = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    user = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    return subprocess.run(
        ["setpriv", *user, *(rights if env else []), *command],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        timeout=60,
    )


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="fsmount-test-") as path:
        os.chmod(path, 0o755)  # noqa: S103
        try:
            yield Path(path)
        finally:
            sweep(path, only_dead=False)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")


@needs_root
def test_others_look_in_only_when_allowed(store: Store, version: Version, public: Path) -> None:
    del version
    root = public / "mnt"
    root.mkdir()
    for allowed in (False, True):
        lifecycle.mount(MountRequest(store.path, "v1", str(root), allow_other=allowed))
        done = as_nobody("cat", f"{root}/VERSION.json")
        assert (done.returncode == 0) is allowed
        assert ("Permission denied" in done.stderr) is not allowed
        umount(str(root))
    lifecycle.mount(MountRequest(store.path, "v1", str(root), allow_other=True, umask=0o077))
    assert as_nobody("cat", f"{root}/VERSION.json").returncode == 1
    umount(str(root))
    lifecycle.mount(
        MountRequest(store.path, "v1", str(root), allow_other=True, umask=0o077, uid=NOBODY)
    )
    assert as_nobody("cat", f"{root}/VERSION.json").returncode == 0
    umount(str(root))


@pytest.fixture
def fuse_for_all() -> Iterator[None]:
    """/dev/fuse as distributions ship it."""
    mode = os.stat("/dev/fuse").st_mode
    os.chmod("/dev/fuse", 0o666)  # noqa: S103
    yield
    os.chmod("/dev/fuse", stat.S_IMODE(mode))


@needs_root
@pytest.mark.usefixtures("fuse_for_all")
def test_an_ordinary_user_mounts(public: Path) -> None:
    store = Store.create(str(public / "store"))
    tiny.publish(store, "v1", {"p": [tiny.numbered("p/x", 1)]})
    root, home = public / "mnt", public / "home"
    for path in (root, home):
        path.mkdir()
        os.chown(path, NOBODY, NOBODY)
    env = {"XDG_RUNTIME_DIR": str(home), "XDG_STATE_HOME": str(home), "HOME": str(home)}
    command = (sys.executable, "-m", "fsmount_cli.main")
    os.chmod("/dev/fuse", 0o600)
    done = as_nobody(*command, "mount", f"{store.path}@v1", str(root), env=env)
    assert done.stderr == (
        "error: /dev/fuse is closed to this user; root opens it to all: chmod 666 /dev/fuse\n"
    )
    os.chmod("/dev/fuse", 0o666)  # noqa: S103
    done = as_nobody(*command, "mount", "--allow-other", f"{store.path}@v1", str(root), env=env)
    assert done.returncode == 1
    assert "user_allow_other in /etc/fuse.conf" in done.stderr
    done = as_nobody(*command, "mount", f"{store.path}@v1", str(root), env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("note: the store can't be leased")
    try:
        check = as_nobody("sh", "-c", f"cd {root} && sha256sum -c --quiet SHA256SUMS")
        assert (check.returncode, check.stdout, check.stderr) == (0, "", "")
        with pytest.raises(PermissionError):
            os.listdir(root)  # not even root
    finally:
        done = as_nobody(*command, "umount", str(root), env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(Path(home, "fsmount").glob("*.json")) == []


@both_drivers
@pytest.mark.parametrize("lazy", [False, True])
def test_an_umount_ends_within_its_time(
    store: Store, version: Version, mounter: Mounter, driver: str, lazy: bool
) -> None:
    """A server that does not answer does not make umount hang, nor those who ask it."""
    del version
    root = mounter(request_for(store, driver=driver))
    *_, pid = processes = processes_of(root)
    os.kill(pid, signal.SIGSTOP)
    reader = subprocess.Popen(["cat", f"{root}/VERSION.json"], stderr=subprocess.DEVNULL)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ending, "END_SECONDS", 0.2)
            patch.setattr(records, "PROBE_SECONDS", 0.2)
            if lazy:
                note = umount(root, lazy=True)
                assert reader.wait(10) == 1
                assert note is not None
                assert note.startswith(f"nobody answered on {root}, so its connection was ended")
            else:
                if driver == KERNEL:  # whose own question ends with the command
                    assert "; nobody answers them; close" in fsmount("umount", root).stderr
                reader.kill()
                reader.wait(10)
                assert re.search(rf"process .*{pid} did not end .* killed", umount(root) or "")
        assert mount_at(root) is None
        assert records.read(root) is None
        assert all(has_ended(one, 0) for one in processes)
    finally:
        reader.kill()
        reader.wait()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


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


def processes_about(mountpoint: str) -> list[int]:
    """The servers, starting or serving, of a mountpoint."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                command = Path("/proc", name, "cmdline").read_bytes()
            except OSError:
                continue
            if b"fsmount.mount" in command and f'"{mountpoint}"'.encode() in command:
                found.append(int(name))
    return found


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
