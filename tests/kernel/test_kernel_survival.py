"""A mount outlives its server, and who uses it does not notice."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from kernel_mounts import (
    HERE,
    KernelMount,
    Mounter,
    NotServedError,
    end,
    read,
    strange,
    wait_for,
)
from readers import objects_of
from strange import HUNG

from fsmount.mount import records
from fsmount.mount.kernel.device import unmount
from fsmount.mount.kernel.supervisor import GIVE_UP
from fsmount.mount.mountinfo import mount_at
from fsmount.store import Store
from fsmount.store.leases import Leases

pytestmark = pytest.mark.mounted

KILLING_SECONDS = 30.0 if os.environ.get("FSMOUNT_SOAK") else 3.0
KILL_EVERY = 0.3
SECONDS = 20


def kill_server(mount: KernelMount, number: int = signal.SIGKILL) -> None:
    """Kill it and wait until another one has begun."""
    server = mount.server
    os.kill(server, number)
    wait_for(lambda: mount.server != server)


def is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("passthrough", [True, False])
def test_killed_again_and_again_under_load(mount: Mounter, store: Store, passthrough: bool) -> None:
    served = mount(passthrough=passthrough)
    kinds = ["read"] * 4 + ["find", "map"]
    users = [
        subprocess.Popen(
            [sys.executable, f"{HERE}/readers.py", served.root, store.path,
             str(KILLING_SECONDS), str(seed), kind],
            stdout=subprocess.PIPE,
        )
        for seed, kind in enumerate(kinds)
    ]  # fmt: skip
    kills = 0
    while any(user.poll() is None for user in users):
        time.sleep(KILL_EVERY)
        os.kill(served.server, signal.SIGKILL)
        kills += 1
        assert kills < 10 * KILLING_SECONDS / KILL_EVERY, "a user hangs"
    results = [json.loads(user.communicate()[0]) for user in users]
    assert [result["failures"] for result in results] == [[]] * len(users)
    assert all(result["done"] for result in results)
    assert kills >= KILLING_SECONDS / KILL_EVERY / 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
@pytest.mark.parametrize("passthrough", [True, False])
def test_open_files_survive(mount: Mounter, store: Store, passthrough: bool, number: int) -> None:
    served = mount(passthrough=passthrough)
    for shown, real in objects_of(served.root, store.path)[:2]:
        expected = read(real)
        with open(shown, "rb", 0) as first:
            assert first.read(100) == expected[:100]
            kill_server(served, number)
            os.posix_fadvise(first.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert first.read() == expected[100:]
            with open(shown, "rb", 0) as second:  # of a node that another server opened
                assert second.read() == expected
            kill_server(served, number)
            assert os.pread(first.fileno(), 50, 7) == expected[7:57]
        with open(shown, "rb", 0) as third:
            assert third.read() == expected
    assert "unforeseen" not in served.log_text()


def test_a_question_asked_while_nobody_serves_is_answered(mount: Mounter) -> None:
    served = mount()
    for number in range(5):
        os.kill(served.server, signal.SIGKILL)
        assert os.path.getsize(f"{served.root}/VERSION.json") > 0
        assert not os.path.exists(f"{served.root}/none{number}")


def test_sigterm_unmounts(mount: Mounter, store: Store) -> None:
    served = mount()
    server = served.server
    assert len(Leases(store.path).live()) == 1
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(SECONDS) == 0
    assert mount_at(served.root) is None
    assert is_gone(server)
    assert not Leases(store.path).live()


def test_sigterm_in_use_serves_until_it_is_not(mount: Mounter, store: Store) -> None:
    served = mount(passthrough=False)
    shown, real = objects_of(served.root, store.path)[0]
    expected = read(real)
    with open(shown, "rb", 0) as file:
        served.process.send_signal(signal.SIGTERM)
        wait_for(lambda: mount_at(served.root) is None)
        assert file.read(1000) == expected[:1000]
        os.kill(served.server, signal.SIGKILL)
        assert file.read() == expected[1000:]
        assert served.process.poll() is None
    assert served.process.wait(SECONDS) == 0
    assert "is in use: detached" in served.log_text()


def test_a_second_sigterm_ends_it(mount: Mounter, store: Store) -> None:
    served = mount(passthrough=False)
    shown, _ = objects_of(served.root, store.path)[0]
    with open(shown, "rb", 0) as file:
        served.process.send_signal(signal.SIGTERM)
        wait_for(lambda: mount_at(served.root) is None)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(SECONDS) == 0
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with pytest.raises(OSError, match="not connected") as caught:
            file.read()
        assert caught.value.errno == errno.ENOTCONN


def test_an_unmount_ends_everything(mount: Mounter) -> None:
    served = mount()
    server = served.server
    assert unmount(served.root, detach=False) == 0
    assert served.process.wait(SECONDS) == 0
    assert is_gone(server)


def test_a_mount_goes_on_without_its_supervisor(mount: Mounter, store: Store) -> None:
    served = mount()
    pairs = objects_of(served.root, store.path)
    server = served.server
    with open(pairs[0][0], "rb", 0) as before:
        os.kill(served.supervisor, signal.SIGKILL)
        served.process.wait(SECONDS)
        with open(pairs[0][0], "rb", 0) as same:  # the node keeps its backing id
            assert same.read() == before.read() == read(pairs[0][1])
    for shown, real in pairs:
        assert read(shown) == read(real)
    wait_for(lambda: len(Leases(store.path).live()) == 1)
    os.kill(server, signal.SIGTERM)  # the last process takes the mount off
    wait_for(lambda: mount_at(served.root) is None and is_gone(server))


@pytest.mark.parametrize("passthrough", [True, False])
def test_a_server_notices_at_once_that_it_is_alone(
    mount: Mounter, store: Store, passthrough: bool
) -> None:
    """Nobody opens anything."""
    served = mount(passthrough=passthrough)
    server = served.server
    wait_for(lambda: records.read(served.root))
    os.kill(served.supervisor, signal.SIGKILL)
    served.process.wait(SECONDS)
    wait_for(lambda: len(Leases(store.path).live()) == 1)
    assert served.log_text().count("the supervisor is gone; this server goes on") == 1
    leases = os.listdir(f"{store.path}/leases")
    os.kill(server, signal.SIGTERM)
    wait_for(lambda: is_gone(server))
    assert mount_at(served.root) is None
    assert records.read(served.root) is None
    assert len(os.listdir(f"{store.path}/leases")) == len(leases) - 1


def test_a_server_that_is_told_to_end_just_after_its_supervisor_unmounts(mount: Mounter) -> None:
    served = mount()
    server = served.server
    os.kill(served.supervisor, signal.SIGKILL)
    served.process.wait(SECONDS)
    os.kill(server, signal.SIGTERM)
    wait_for(lambda: is_gone(server))
    assert mount_at(served.root) is None


def test_a_supervisor_that_is_stopped_holds_nobody_up_for_long(
    store: Store, tmp_path: Path
) -> None:
    served = strange("impatient", store, tmp_path)
    pairs = objects_of(served.root, store.path)
    try:
        with open(pairs[0][0], "rb", 0) as before:
            os.kill(served.supervisor, signal.SIGSTOP)
            for shown, real in pairs:
                assert read(shown) == read(real)
            with open(pairs[1][0], "rb", 0) as meanwhile:
                os.kill(served.supervisor, signal.SIGCONT)
                assert before.read() == read(pairs[0][1])
                assert meanwhile.read() == read(pairs[1][1])
        for shown, real in pairs:
            assert read(shown) == read(real)
        kill_server(served)
        for shown, real in pairs:
            assert read(shown) == read(real)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(SECONDS) == 0
        assert mount_at(served.root) is None
    finally:
        served.process.send_signal(signal.SIGCONT)
        end(served)
    if "passthrough" in served.features:
        assert served.log_text().count("the supervisor is gone; this server goes on") == 1


def test_with_both_dead_the_mount_is_dead(mount: Mounter) -> None:
    served = mount()
    server = served.server
    os.kill(served.supervisor, signal.SIGKILL)
    served.process.wait(SECONDS)
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: is_gone(server))
    with suppress(OSError):  # asked while the connection was being ended
        os.listdir(served.root)
    with pytest.raises(OSError, match="not connected") as caught:
        os.listdir(served.root)
    assert caught.value.errno == errno.ENOTCONN


def test_a_server_that_never_serves_is_an_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotServedError, match="3 servers in a row ended before they served"):
        strange("dying", store, tmp_path)
    assert mount_at(str(tmp_path / "strange")) is None
    last = (tmp_path / "strange.log").read_text(encoding="utf-8").splitlines()[-1]
    assert "CRITICAL" in last
    assert "the last one was killed by signal 9); the mount is taken off" in last


def test_what_cannot_be_served_is_an_error_at_once(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotServedError, match="no such thing here"):
        strange("failing", store, tmp_path)
    assert mount_at(str(tmp_path / "strange")) is None
    log = (tmp_path / "strange.log").read_text(encoding="utf-8")
    assert log.count("served by process") == 1


def test_a_mount_that_has_served_is_never_given_up(store: Store, tmp_path: Path) -> None:
    """Who reads waits until servers live again."""
    served = strange("dying-later", store, tmp_path)
    fatal = Path(served.root + ".die")
    try:
        expected = len(os.listdir(f"{served.root}/keysets"))
        fatal.touch()
        wait_for(lambda: served.log_text().count("replacing it") > GIVE_UP + 1)
        with subprocess.Popen(["ls", f"{served.root}/keysets"], stdout=subprocess.PIPE) as waiting:
            assert served.process.poll() is None
            fatal.unlink()
            found, _ = waiting.communicate(timeout=SECONDS)
        assert (waiting.returncode, len(found.splitlines())) == (0, expected)
    finally:
        end(served)


def test_a_mount_whose_servers_die_can_be_ended(store: Store, tmp_path: Path) -> None:
    served = strange("dying-later", store, tmp_path)
    try:
        Path(served.root + ".die").touch()
        wait_for(lambda: served.log_text().count("replacing it") > GIVE_UP + 1)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(SECONDS) == 0
        assert mount_at(served.root) is None
    finally:
        end(served)


@pytest.mark.parametrize("case", ["hanging", "hanging-open"])
def test_a_hanging_object_hangs_nothing_else(case: str, store: Store, tmp_path: Path) -> None:
    """More users hang than there are threads."""
    served = strange(case, store, tmp_path, passthrough=False)
    others = [p for p in objects_of(served.root, store.path) if not p[0].endswith(HUNG)]
    hung = [
        subprocess.Popen(["cat", f"{served.root}/{HUNG}"], stdout=subprocess.DEVNULL)
        for _ in range(20)
    ]
    try:
        for shown, real in others * 2:
            assert read(shown) == read(real)
        assert all(user.poll() is None for user in hung)
        for user in hung:
            user.kill()
        for user in hung:
            assert user.wait(SECONDS) == -signal.SIGKILL
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(SECONDS) == 0
        assert mount_at(served.root) is None
    finally:
        for user in hung:
            user.kill()
        end(served)


OPEN_UNDER_SIGNALS = """
import ctypes, os, signal, sys
signal.signal(signal.SIGALRM, lambda number, frame: None)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.open(os.fsencode(sys.argv[1]), os.O_RDONLY)
print(ctypes.get_errno() if fd < 0 else len(os.read(fd, 100)))
signal.setitimer(signal.ITIMER_REAL, 0)  # it would end an interpreter that is ending
"""


@pytest.mark.parametrize(("case", "said"), [("slow-open", 100), ("hanging-open", errno.EINTR)])
def test_signals_interrupt_only_what_hangs(
    case: str, said: int, store: Store, tmp_path: Path
) -> None:
    served = strange(case, store, tmp_path)
    try:
        command = [sys.executable, "-c", OPEN_UNDER_SIGNALS, f"{served.root}/{HUNG}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
        assert int(done.stdout) == said
    finally:
        end(served)
