"""What the kernel driver does beyond what every driver must."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_mounts import (
    Mounter,
    config_for,
    end,
    is_backed,
    read,
    start,
    strange,
    wait_for,
)
from readers import objects_of

from fsmount.errors import MountError
from fsmount.model import Digest
from fsmount.mount.kernel import device
from fsmount.mount.kernel.device import MountOptions, unmount
from fsmount.mount.kernel.prepare import command as command_of
from fsmount.store import Store
from fsmount.testing import tiny

pytestmark = pytest.mark.mounted

ROUNDS = 200_000 if os.environ.get("FSMOUNT_SOAK") else 4_000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can")
passthrough = pytest.mark.parametrize("passthrough", [True, False])


def resident(pid: int) -> int:
    """Memory of a process, bytes."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@needs_root
def test_passthrough_bypasses_the_server(mount: Mounter, store: Store) -> None:
    served = mount()
    if "passthrough" not in served.features:
        pytest.skip("this kernel has no passthrough")
    plain = mount(passthrough=False, splice=False)
    for backed, server in ((True, served), (False, plain)):
        shown, _ = objects_of(server.root, store.path)[0]
        assert is_backed(server, shown) is backed


@passthrough
def test_one_file_opened_by_many_and_again(mount: Mounter, store: Store, passthrough: bool) -> None:
    served = mount(passthrough=passthrough)
    shown, real = objects_of(served.root, store.path)[0]
    expected = read(real)
    for _ in range(3):
        with ExitStack() as stack:
            files = [stack.enter_context(open(shown, "rb", 0)) for _ in range(50)]
            assert all(file.read(1000) == expected[:1000] for file in files)
            for file in files[::2]:
                file.close()
            assert read(shown) == expected
            assert all(file.read() == expected[1000:] for file in files[1::2])


@needs_root
def test_a_file_has_one_backing_id_at_a_time(store: Store, tmp_path: Path) -> None:
    """Of many processes that open it at once, and of those that come when all have closed it."""
    served = strange("noted", store, tmp_path)
    try:
        if "passthrough" not in served.features:
            pytest.skip("this kernel has no passthrough")
        shown, real = objects_of(served.root, store.path)[0]
        expected = hashlib.sha256(read(real)).hexdigest()
        for so_far in (1, 2):
            users = [
                subprocess.Popen(["sha256sum", shown], stdout=subprocess.PIPE, text=True)
                for _ in range(20)
            ]
            assert [user.communicate()[0].split()[0] for user in users] == [expected] * 20
            noted = wait_for(lambda: all_given_back(served.log_text()))
            assert len(noted) >= 2 * so_far
            assert all(noted[at + 1] == -noted[at] < 0 for at in range(0, len(noted), 2))
            assert len(set(noted)) == len(noted)  # a number is not used again
    finally:
        end(served)


def all_given_back(log: str) -> list[int] | None:
    """Backing ids as they came, and negative as they went; None if one is still there."""
    noted = list(map(int, re.findall(r"^backing ([+-]\d+)$", log, re.MULTILINE)))
    return noted if noted and sum(noted) == 0 else None


@passthrough
def test_two_thousand_open_files(tmp_path: Path, mount: Mounter, passthrough: bool) -> None:
    store = Store.create(str(tmp_path / "store"))
    tiny.publish_crowded(store, "v1", shards=2000, samples=1)
    served = mount(store, passthrough=passthrough)
    pairs = objects_of(served.root, store.path)
    assert len(pairs) == 2001
    script = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 3000))\n"
        "paths = sys.stdin.read().split('\\n')\n"
        "fds = [os.open(path, os.O_RDONLY) for path in paths]\n"
        "for path, fd in zip(paths, fds):\n"
        "    assert len(os.read(fd, 1 << 20)) == os.path.getsize(path)\n"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        input="\n".join(shown for shown, _ in pairs),
        text=True,
    )


@passthrough
def test_memory_stays_flat(mount: Mounter, store: Store, passthrough: bool) -> None:
    served = mount(passthrough=passthrough)
    pairs = objects_of(served.root, store.path)
    pids = (served.supervisor, served.server)

    def use(rounds: int) -> list[int]:
        for number in range(rounds):
            with open(pairs[number % len(pairs)][0], "rb", 0) as file:
                assert len(file.read(4096)) == 4096
        return [resident(pid) for pid in pids]

    before = use(1000)
    after = use(ROUNDS)
    assert all(b - a < 4 << 20 for a, b in zip(before, after, strict=True)), (before, after)
    for pid in pids:
        wait_for(lambda pid=pid: len(os.listdir(f"/proc/{pid}/fd")) < 40)  # type: ignore[misc]


@needs_root
def test_a_descriptor_that_somebody_else_mounted(tmp_path: Path, store: Store) -> None:
    root = str(tmp_path / "mnt")
    os.mkdir(root)
    fd = device.open_and_mount(MountOptions("someone", root, allow_other=False, max_read=1 << 20))
    os.set_inheritable(fd, True)
    config = replace(config_for(store, root), mountpoint=f"/dev/fd/{fd}")
    command = command_of(config)
    try:
        served = start(command, root, str(tmp_path / "log"), pass_fds=[fd])
    finally:
        os.close(fd)
    try:
        for shown, real in objects_of(root, store.path):
            assert read(shown) == read(real)
        os.kill(served.server, signal.SIGKILL)
        assert os.path.getsize(f"{root}/VERSION.json")
        assert unmount(root, detach=False) == 0
        assert served.process.wait(20) == 0
    finally:
        end(served)


def test_descriptors_that_are_none() -> None:
    for fd in (999, 0):
        options = MountOptions("x", f"/dev/fd/{fd}", allow_other=False, max_read=4096)
        if fd == 0 and os.path.exists("/proc/self/fd/0") and os.isatty(0):
            continue
        with socket.socket() as other:
            wrong = replace(options, mountpoint=f"/dev/fd/{other.fileno()}")
            with pytest.raises(MountError):
                device.open_and_mount(wrong)
        with pytest.raises(MountError):
            device.open_and_mount(replace(options, mountpoint="/dev/fd/999"))


@needs_root
def test_read_ahead_is_raised(mount: Mounter) -> None:
    served = mount()
    number = os.stat(served.root).st_dev
    path = f"/sys/class/bdi/{os.major(number)}:{os.minor(number)}/read_ahead_kb"
    assert Path(path).read_text(encoding="ascii").strip() == "1024"


@pytest.fixture
def exported(mount: Mounter) -> str:
    return mount().root


@needs_root
@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_file_handles_survive_dropped_caches(exported: str, tmp_path: Path) -> None:
    """What an NFS server needs: `.` and `..` of any node can be looked up."""
    source = tmp_path / "handle.c"
    source.write_text(HANDLE_C)
    program = str(tmp_path / "handle")
    subprocess.run(["cc", "-D_GNU_SOURCE", "-o", program, str(source)], check=True)
    path = f"{exported}/shards/large/000000.tar"
    done = subprocess.run(
        [program, exported, path], check=False, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(os.stat(path).st_ino)


HANDLE_C = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
int main(int argc, char **argv) {
    struct file_handle *handle = malloc(sizeof *handle + 128);
    struct stat found;
    int mount_id, fd, root = open(argv[1], O_RDONLY);
    handle->handle_bytes = 128;
    if (name_to_handle_at(AT_FDCWD, argv[2], handle, &mount_id, 0)) return perror("name"), 1;
    FILE *control = fopen("/proc/sys/vm/drop_caches", "w");
    if (control) { fputs("2", control); fclose(control); }
    fd = open_by_handle_at(root, handle, O_RDONLY);
    if (fd < 0) return perror("open"), 1;
    if (fstat(fd, &found)) return perror("stat"), 1;
    printf("%lu\n", (unsigned long)found.st_ino);
    return 0;
}
"""


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
def test_other_users_are_let_in_only_if_asked(store: Store, mount: Mounter) -> None:
    def look(root: str) -> subprocess.CompletedProcess[str]:
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
                   "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search",
                   "cat", f"{root}/VERSION.json"]  # fmt: skip
        return subprocess.run(command, check=False, capture_output=True, text=True)

    closed, opened = mount(), mount(allow_other=True)
    assert "Permission denied" in look(closed.root).stderr
    assert look(opened.root).stdout == read(f"{opened.root}/VERSION.json").decode()


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_a_connection_can_be_aborted(mount: Mounter) -> None:
    served = mount()
    number = os.stat(served.root).st_dev
    code = (
        "import sys; from fsmount.mount.kernel.device import abort; "
        f"sys.exit(not abort('{os.major(number)}:{os.minor(number)}'))"
    )
    script = 'mount -t fusectl none /sys/fs/fuse/connections; exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", code]
    subprocess.run(command, check=True)
    assert served.process.wait(20) == 0
    with pytest.raises(OSError, match="not connected"):
        os.listdir(served.root)


def test_extended_attributes_if_asked_for(store: Store, mount: Mounter) -> None:
    root = mount(xattrs=True).root
    table = store.versions()[0].table.digest
    of_version = {
        "user.fsmount.version": b"v1",
        "user.fsmount.table": b"sha256:%s" % table.encode(),
    }
    for shown, real in objects_of(root, store.path):
        found = {name: os.getxattr(shown, name) for name in os.listxattr(shown)}
        partition = os.path.relpath(shown, f"{root}/shards").rpartition("/")[0]
        assert found == {
            **of_version,
            "user.fsmount.digest": f"sha256:{os.path.basename(real)}".encode(),
            "user.fsmount.partition": partition.encode(),
        }
    for path in (root, f"{root}/keysets", f"{root}/VERSION.json", f"{root}/samples/small/1.npz"):
        assert {name: os.getxattr(path, name) for name in os.listxattr(path)} == of_version
    with pytest.raises(OSError, match="No data"):
        os.getxattr(root, "user.other")


def test_only_digests_are_paths(store: Store, mount: Mounter) -> None:
    served = mount()
    for shown, real in objects_of(served.root, store.path):
        assert Digest(os.path.basename(real))
        assert os.path.getsize(shown) == os.path.getsize(real)
