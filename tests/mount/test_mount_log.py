"""What names of a stranger's store may do to a mount's log: nothing."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mounting import fsmount, request_for, wait_for

from fsmount.mount import lifecycle, records
from fsmount.mount.ending import umount
from fsmount.mount.mountinfo import mount_at
from fsmount.store import Store
from fsmount.testing import tiny

pytestmark = pytest.mark.mounted

HOSTILE = "p\n2001-01-01 00:00:00,000 ERROR forged\x1b[31m\r\x07"
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR) .+")


@pytest.fixture
def hostile(tmp_path: Path) -> Store:
    """A version whose one partition has a hostile name and lost its shard."""
    store = Store.create(str(tmp_path / "store"))
    version = tiny.publish(store, "v1", {HOSTILE: [tiny.numbered(f"{HOSTILE}/a", 1)]})
    os.unlink(store.objects.path(version.partitions[0].shards[0].digest))
    return store


def read_lost_shard(mountpoint: str) -> None:
    with pytest.raises(OSError, match="Input/output") as caught:
        Path(mountpoint, "shards", HOSTILE, "000000.tar").read_bytes()
    assert caught.value.errno == errno.EIO


def check_lines(text: str) -> None:
    lines = text.split("\n")
    assert lines.pop() == ""
    assert all(map(str.isprintable, lines))
    assert all(LINE.fullmatch(line) for line in lines)
    assert not any(line.startswith("2001") for line in lines)
    assert sum(r"\x1b[31m\r\x07" in line and " ERROR " in line for line in lines) >= 1


@pytest.mark.parametrize("driver", ["kernel", "fusepy"])
def test_hostile_names_can_not_forge_lines_of_the_log(
    hostile: Store, mountpoint: str, driver: str
) -> None:
    lifecycle.mount(request_for(hostile, mountpoint=mountpoint, driver=driver))
    record = records.read(mountpoint)
    try:
        read_lost_shard(mountpoint)
    finally:
        umount(mountpoint)
    assert record is not None
    assert record.log is not None
    check_lines(Path(record.log).read_text("utf-8", errors="surrogateescape"))


def test_nor_lines_on_stderr_of_a_server_in_the_foreground(
    hostile: Store, mountpoint: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "fsmount_cli.main", "mount", "--foreground"]
    with open(tmp_path / "stderr", "wb") as stderr:
        process = subprocess.Popen([*command, f"{hostile.path}@v1", mountpoint], stderr=stderr)
    try:
        wait_for(lambda: mount_at(mountpoint) is not None, 30)
        read_lost_shard(mountpoint)
        process.send_signal(signal.SIGINT)
        process.wait(30)
    finally:
        process.kill()
    check_lines((tmp_path / "stderr").read_text("utf-8", errors="surrogateescape"))


def test_an_error_of_the_command_line_is_one_printable_line(tmp_path: Path) -> None:
    done = fsmount("versions", str(tmp_path / "no\nERROR \x1b[31mstore"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr[:-1].isprintable()
