"""The kernel driver without root: through fusermount3, and without passthrough."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

NOBODY = 65534
SUITE = os.path.join(os.path.dirname(__file__), "test_kernel_conformance.py")

# In a mount namespace of its own, /dev/fuse is one that everybody may open.
AS_NOBODY = """
set -e
mknod -m 666 "$1/fuse" c 10 229
mount --bind "$1/fuse" /dev/fuse
shift
exec setpriv --reuid=65534 --regid=65534 --clear-groups \
    --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search -- "$@"
"""


@pytest.fixture
def base() -> Iterator[str]:
    """A directory that everybody may reach and write to."""
    path = tempfile.mkdtemp(dir="/tmp")
    os.chmod(path, 0o1777)  # noqa: S103
    yield path
    shutil.rmtree(path)


@pytest.mark.mounted
@pytest.mark.skipif(os.geteuid() != 0, reason="the suite itself runs without root")
@pytest.mark.skipif(
    not all(map(shutil.which, ("unshare", "setpriv", "fusermount3"))), reason="no fusermount3"
)
def test_conformance_as_another_user(base: str) -> None:
    """The user may search the interpreter's directories, which may lie in root's home, no more."""
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", SUITE]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", AS_NOBODY, "sh", base, *pytest_command,
         "--basetemp", f"{base}/pytest", "-k", "passthrough or copy"],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=base,
        env={**os.environ, "HOME": base, "XDG_CACHE_HOME": f"{base}/cache",
             "PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_STORAGE_DIRECTORY": f"{base}/hypothesis"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    log = f"{base}/pytest/conformance0/log"
    assert os.stat(log).st_uid == NOBODY
    with open(log, encoding="utf-8") as file:
        text = file.read()
    assert "reads ahead 128 KiB only" in text
    assert "no passthrough: Operation not permitted" in text
