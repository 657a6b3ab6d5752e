"""Mounts of one user, seen by another."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import sweep

from fsmount.model import Version
from fsmount.mount import lifecycle
from fsmount.mount.ending import umount
from fsmount.mount.request import MountRequest
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
