"""Records and logs lie where nobody else can plant anything, and mounts do without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import Mounter, fsmount, request_for, sweep

from fsmount.errors import MountError
from fsmount.model import Version
from fsmount.mount import lifecycle, logs, records
from fsmount.mount.ending import umount
from fsmount.mount.mountinfo import mount_at
from fsmount.private import private_directory
from fsmount.store import Store
from fsmount.testing import tiny

pytestmark = pytest.mark.mounted
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
SOMEBODY = 1  # a user that has a name, as fusermount3 needs


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="fsmount-test-") as path:
        os.chmod(path, 0o755)  # noqa: S103
        try:
            yield Path(path)
        finally:
            sweep(path, only_dead=False)


@needs_root
def test_a_user_mounts_where_others_hold_the_directories_of_records(public: Path) -> None:
    """XDG_RUNTIME_DIR is root's, as after su; /tmp/fsmount-UID was made by somebody before."""
    store = Store.create(str(public / "store"))
    tiny.publish(store, "v1", {"p": [tiny.numbered("p/x", 1)]})
    for name in ("mnt", "home", "run"):
        (public / name).mkdir(mode=0o700)
    for path in (public, public / "mnt", public / "home"):
        os.chown(path, SOMEBODY, SOMEBODY)
    script = """
    set -e
    mknod "$1/fuse" c 10 229; chmod 666 "$1/fuse"; mount --bind "$1/fuse" /dev/fuse
    for base in /tmp /dev/shm; do
        install -d -o 0 -g 0 -m 755 "$base/fsmount-1"
    done
    trap 'rm -r /tmp/fsmount-1 /dev/shm/fsmount-1' EXIT
    as() {
        setpriv --reuid=1 --regid=1 --clear-groups --inh-caps=-all,+dac_read_search \
            --ambient-caps=-all,+dac_read_search env -u XDG_STATE_HOME -u XDG_CACHE_HOME \
            HOME="$1/home" XDG_RUNTIME_DIR="$1/run" "$2" -m fsmount_cli.main "${@:3}"
    }
    for lazy in "" --lazy; do
        as "$1" "$2" mount "$1/store@v1" "$1/mnt"
        as "$1" "$2" mounts --json
        as "$1" "$2" umount $lazy "$1/mnt"
        grep -c "$1/mnt" /proc/self/mountinfo || true
    done
    """
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, "bash", str(public), sys.executable],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("note: no record of the mount is kept") == 2
    assert done.stdout.endswith("\n0\n")
    listed = done.stdout.partition("[\n")[2].partition("\n]\n")[0]
    assert '"dead": false' in listed
    assert '"tag": "v1"' in listed


def test_a_mount_without_record_is_listed_and_taken_off(
    store: Store, version: Version, mounter: Mounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that another environment does not find."""
    del version
    root = mounter(request_for(store))
    with monkeypatch.context() as patch:
        patch.setattr(records, "_places", lambda: iter(["/proc/none"]))
        [mine] = [one for one in records.mounted() if one.record.mountpoint == root]
        assert (mine.dead, mine.record.tag, mine.record.server) == (False, "v1", None)
        with pytest.raises(MountError, match="mounted already"):
            lifecycle.mount(request_for(store, mountpoint=root))
        umount(root)
    assert mount_at(root) is None


@needs_root
def test_a_read_only_root_file_system_is_enough(
    store: Store, version: Version, mountpoint: str
) -> None:
    del version
    script = """
    set -e
    mount --make-rprivate /
    base=$(dirname "$1"); mount --bind "$base" "$base"
    unset XDG_RUNTIME_DIR XDG_STATE_HOME XDG_CACHE_HOME TMPDIR
    export HOME=/root
    for place in $(awk '$4 ~ /^rw/ && $3 != "proc" {print $2}' /proc/mounts | sort -r); do
        [ "$place" = "$base" ] || mount -o remount,bind,ro "$place" || true
    done
    ! touch /tmp/x /dev/shm/x /run/x 2> /dev/null
    for ref in @v1 ""; do
        "$3" -m fsmount_cli.main mount "$2$ref" "$1"
        "$3" -m fsmount_cli.main mounts --json
        cat "$1/VERSION.json" "$1/versions/v1/VERSION.json" 2> /dev/null || true
        "$3" -m fsmount_cli.main umount "$1"
        grep -c "$1" /proc/self/mountinfo || true
    done
    """
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, "bash", mountpoint, store.path, sys.executable],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("note: no record of the mount is kept") == 2
    assert done.stderr.count("note: no log is kept") == 2
    assert done.stdout.count('"dead": false') >= 2
    assert done.stdout.count('"tag": "v1"') >= 2


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "directory"])
def test_a_log_is_a_regular_file(
    store: Store, version: Version, mountpoint: str, tmp_path: Path, kind: str
) -> None:
    del version
    log, other = tmp_path / "log", tmp_path / "other"
    if kind == "link":
        other.write_text("mine\n")
    match kind:
        case "fifo":
            os.mkfifo(log)
        case "directory":
            log.mkdir()
        case _:
            log.symlink_to(other)
    done = fsmount("mount", "--log", str(log), f"{store.path}@v1", mountpoint)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: can't write the log {log}: ")
    assert mount_at(mountpoint) is None
    assert other.exists() == (kind == "link")
    assert not other.exists() or other.read_text() == "mine\n"


@needs_root
def test_root_takes_its_own_directories_whoevers_home_is_set(
    store: Store, version: Version, mountpoint: str, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `sudo -E`: what lies in a user's directories, that user may have made a link."""
    del version
    secret = public / "secret"
    secret.mkdir()
    for name in ("home/.local/state", "run", "state"):
        (public / name).mkdir(parents=True)
    for link in ("home/.local/state/fsmount", "run/fsmount", "state/fsmount"):
        (public / link).symlink_to(secret)
    for path in public.rglob("*"):
        if path != secret:
            os.lchown(path, SOMEBODY, SOMEBODY)
    secret.chmod(0o777)
    for name, value in (("HOME", "home"), ("XDG_RUNTIME_DIR", "run"), ("XDG_STATE_HOME", "state")):
        monkeypatch.setenv(name, str(public / value))
    done = fsmount("mount", f"{store.path}@v1", mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    [mine] = [
        one
        for one in json.loads(fsmount("mounts", "--json").stdout)
        if one["mountpoint"] == mountpoint
    ]
    assert mine["server_pid"] is not None
    assert fsmount("umount", mountpoint).returncode == 0
    assert os.path.exists(mine["log"])
    os.unlink(mine["log"])
    assert list(secret.iterdir()) == []


@needs_root
def test_a_log_is_not_reached_through_links_of_others(public: Path) -> None:
    (public / "theirs").mkdir()
    (public / "roots").mkdir()
    (public / "theirs/logs").symlink_to(public / "roots")
    for path in (public / "theirs", public / "theirs/logs"):
        os.lchown(path, SOMEBODY, SOMEBODY)
    with pytest.raises(MountError, match=f"is a link of user {SOMEBODY}"):
        logs.open_log(f"{public}/theirs/logs/x")
    assert os.listdir(public / "roots") == []


@needs_root
def test_nothing_is_made_through_directories_of_others(public: Path) -> None:
    (public / "theirs").mkdir()
    (public / "theirs/state").symlink_to(public)
    os.chown(public / "theirs", SOMEBODY, SOMEBODY)
    assert private_directory(f"{public}/theirs/state/fsmount") == f"{public}/fsmount"
    os.lchown(public / "theirs/state", SOMEBODY, SOMEBODY)
    assert private_directory(f"{public}/theirs/new/fsmount") is None
    assert not (public / "theirs/new").exists()
