"""Mounts of one user, seen by another."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from mounting import sweep, wait_for
from serving import both_drivers, has_ended

from fsmount.model import Version
from fsmount.mount import lifecycle
from fsmount.mount.ending import umount
from fsmount.mount.mountinfo import all_mounts, mount_at
from fsmount.mount.request import FUSEPY, KERNEL, MountRequest
from fsmount.store import Store
from fsmount.testing import tiny

pytestmark = pytest.mark.mounted


NOBODY = 65534


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
@both_drivers
def test_others_look_in_only_when_allowed(
    store: Store, version: Version, public: Path, driver: str
) -> None:
    del version
    root = public / "mnt"
    root.mkdir()
    request = MountRequest(store.path, "v1", str(root), driver=driver)
    looks: list[tuple[dict[str, Any], str]] = [
        ({}, "Permission denied"),
        ({"allow_other": True}, ""),
        ({"allow_other": True, "umask": 0o077}, "Permission denied"),
        ({"allow_other": True, "umask": 0o077, "uid": NOBODY}, ""),
    ]
    for options, expected in looks:
        lifecycle.mount(replace(request, **options))
        done = as_nobody("cat", f"{root}/VERSION.json")
        umount(str(root))
        assert (expected in done.stderr, bool(done.returncode)) == (True, bool(expected)), options


@pytest.fixture
def fuse_for_all() -> Iterator[None]:
    """/dev/fuse as distributions ship it."""
    mode = os.stat("/dev/fuse").st_mode
    os.chmod("/dev/fuse", 0o666)  # noqa: S103
    yield
    os.chmod("/dev/fuse", stat.S_IMODE(mode))


@dataclass(frozen=True, slots=True)
class Ordinary:
    """An ordinary user's store and directories, and the command line as this user has it."""

    store: Store
    root: str
    home: str

    @property
    def env(self) -> dict[str, str]:
        return dict.fromkeys(("HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"), self.home)

    def fsmount(self, *args: str) -> subprocess.CompletedProcess[str]:
        return as_nobody(sys.executable, "-m", "fsmount_cli.main", *args, env=self.env)

    def mount(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.fsmount("mount", *options, f"{self.store.path}@v1", self.root)

    def listed(self) -> dict[str, Any]:
        """What `fsmount mounts` tells of the mount."""
        found = json.loads(self.fsmount("mounts", "--json").stdout)
        [mine] = [one for one in found if one["mountpoint"] == self.root]
        return dict(mine)

    def records(self) -> list[Path]:
        return list(Path(self.home, "fsmount").glob("*.json"))


@pytest.fixture
def ordinary(public: Path, fuse_for_all: None) -> Ordinary:
    del fuse_for_all
    store = Store.create(str(public / "store"))
    tiny.publish(store, "v1", {"p": [tiny.numbered("p/x", 1)]})
    root, home = public / "mnt", public / "home"
    for path in (root, home):
        path.mkdir()
        os.chown(path, NOBODY, NOBODY)
    return Ordinary(store, str(root), str(home))


@needs_root
def test_an_ordinary_user_is_told_what_is_missing(ordinary: Ordinary) -> None:
    os.chmod("/dev/fuse", 0o600)
    assert ordinary.mount().stderr == (
        "error: /dev/fuse is closed to this user; root opens it to all: chmod 666 /dev/fuse\n"
    )
    os.chmod("/dev/fuse", 0o666)  # noqa: S103
    done = ordinary.mount("--allow-other")
    assert done.returncode == 1
    assert "user_allow_other in /etc/fuse.conf" in done.stderr
    os.chown(ordinary.root, 0, 0)
    for driver in (FUSEPY, KERNEL):
        done = ordinary.mount("--driver", driver)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert done.stderr.endswith(f"user has no write access to mountpoint {ordinary.root}\n")
    assert os.listdir(ordinary.root) == []
    assert not list(Path(ordinary.home, "fsmount").glob("*.lock"))


@needs_root
@both_drivers
def test_an_ordinary_user_mounts(ordinary: Ordinary, driver: str) -> None:
    root = ordinary.root
    done = ordinary.mount("--driver", driver)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("note: the store can't be leased")
    try:
        mine = ordinary.listed()
        assert (mine["driver"], mine["dead"]) == (driver, False)
        assert os.stat(f"/proc/{mine['server_pid']}").st_uid == NOBODY
        check = as_nobody("sh", "-c", f"cd {root} && sha256sum -c --quiet SHA256SUMS")
        assert (check.returncode, check.stdout, check.stderr) == (0, "", "")
        with pytest.raises(PermissionError):
            os.listdir(root)  # not even root
        user = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
        script = ["sh", "-c", f"cd {root}; echo held; read line"]
        with subprocess.Popen(
            [*user, *script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            busy = ordinary.fsmount("umount", root)
            assert f"{root} is busy: sh ({holder.pid}: working directory)" in busy.stderr
    finally:
        done = ordinary.fsmount("umount", root)
    assert (done.returncode, done.stderr) == (0, "")
    assert ordinary.records() == []
    assert all(has_ended(mine[who]) for who in ("server_pid", "supervisor_pid") if mine[who])


@needs_root
def test_an_ordinary_users_mount_survives_and_is_cleared(ordinary: Ordinary) -> None:
    assert ordinary.mount("--driver", "kernel").returncode == 0
    before = ordinary.listed()
    os.kill(before["server_pid"], signal.SIGKILL)
    read = as_nobody("sha256sum", f"{ordinary.root}/shards/p/000000.tar")
    assert (read.returncode, read.stderr) == (0, "")
    wait_for(lambda: ordinary.listed()["server_pid"] != before["server_pid"])
    after = ordinary.listed()
    assert after["supervisor_pid"] == before["supervisor_pid"]
    for who in ("supervisor_pid", "server_pid"):
        os.kill(after[who], signal.SIGKILL)
        assert has_ended(after[who])
    assert ordinary.listed()["dead"]
    again = ordinary.mount()
    assert again.returncode == 0
    assert f"note: cleared a dead mount from {ordinary.root}\n" in again.stderr
    assert [one.mountpoint for one in all_mounts()].count(ordinary.root) == 1
    assert ordinary.fsmount("umount", "--lazy", ordinary.root).returncode == 0
    assert mount_at(ordinary.root) is None
    assert ordinary.records() == []


LETS_OTHERS_IN = """
set -e
conf=$1 python=$2 store=$3 root=$4
as() {
    user=$1
    shift
    setpriv --reuid="$user" --regid="$user" --clear-groups \\
        --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search -- "$@"
}
mount --bind "$conf" /etc/fuse.conf
as 65534 "$python" -m fsmount_cli.main mount --allow-other "$store@v1" "$root"
trap 'umount -l "$root" 2> /dev/null || true' EXIT
(cd "$root" && sha256sum -c --quiet SHA256SUMS)
as 65533 cat "$root/VERSION.json"
as 65534 "$python" -m fsmount_cli.main umount "$root"
"""


@needs_root
def test_an_ordinary_user_lets_others_in_where_the_administrator_does(
    ordinary: Ordinary, tmp_path: Path
) -> None:
    conf = tmp_path / "fuse.conf"
    conf.write_text("user_allow_other\n")
    given = [str(conf), sys.executable, ordinary.store.path, ordinary.root]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", LETS_OTHERS_IN, "sh", *given],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **ordinary.env},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert '"tag": "v1"' in done.stdout
    assert ordinary.records() == []
