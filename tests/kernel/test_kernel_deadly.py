"""Requests that kill who does them: they are EIO, and nobody else notices."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from kernel_mounts import KernelMount, end, read, strange, wait_for
from readers import objects_of
from strange import DEADLY_NAME, HUNG, SLOW

from fsmount.mount import holders
from fsmount.mount.kernel.answers import Request
from fsmount.mount.kernel.protocol import Opcode
from fsmount.mount.kernel.takeover import TakeOver, kind_of
from fsmount.mount.mountinfo import mount_at
from fsmount.store import Store

pytestmark = pytest.mark.mounted

KILL_EVERY = 0.3  # seconds
SECONDS = 20


def code_of_open(path: str) -> int:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        return error.errno or -1
    return 0


def waits(pid: int) -> bool:
    """Whether a process waits for an answer of a FUSE mount."""
    with open(f"/proc/{pid}/wchan", encoding="ascii") as file:
        return file.read() in holders._WAITING


def deaths(mount: KernelMount) -> int:
    return mount.log_text().count("replacing it")


@contextmanager
def others_read(mount: KernelMount, store: Store) -> Iterator[list[str]]:
    """Somebody reads small files all the time; what went wrong for them."""
    small = [p for p in objects_of(mount.root, store.path) if "/small/" in p[0]]
    failures: list[str] = []
    over = threading.Event()
    rounds = 0

    def reading() -> None:
        nonlocal rounds
        while not over.is_set():
            for shown, real in small:
                try:
                    if read(shown) != read(real):
                        failures.append(f"wrong bytes: {shown}")
                except OSError as error:
                    failures.append(repr(error))
            rounds += 1

    thread = threading.Thread(target=reading)
    thread.start()
    try:
        wait_for(lambda: rounds > 0)
        yield failures
        done = rounds
        wait_for(lambda: rounds > done + 1)
    finally:
        over.set()
        thread.join(SECONDS)


@pytest.mark.parametrize("passthrough", [True, False])
@pytest.mark.parametrize("how", ["kill", "crash", "exit"])
def test_a_deadly_request_is_an_error_of_its_own(
    how: str, passthrough: bool, store: Store, tmp_path: Path
) -> None:
    served = strange(f"deadly-{how}", store, tmp_path, passthrough=passthrough)
    try:
        with others_read(served, store) as failures:
            assert code_of_open(f"{served.root}/{HUNG}") == errno.EIO
            assert deaths(served) == 1
            # The server that was begun before that was known may die of it, no later one does.
            for _ in range(4):
                assert code_of_open(f"{served.root}/{HUNG}") == errno.EIO
        assert not failures
        assert deaths(served) == 2
        log = served.log_text()
        assert log.count("was in work when a server died, and done alone in process") == 1
        assert f"ERROR {served.root}/{HUNG}: open of node" in log
    finally:
        end(served)


def test_what_is_refused_is_of_one_kind_and_for_a_while() -> None:
    def lookup(name: bytes) -> Request:
        return Request(Opcode.LOOKUP, 1, 7, memoryview(name))

    def reading(unique: int, node: int) -> Request:
        return Request(Opcode.READ, unique, node, b"some offset")

    later = time.monotonic() + 60
    refused = {kind_of(lookup(b"bad\0")): later, kind_of(reading(1, 8)): later}
    taken_over = TakeOver(refused={**refused, kind_of(reading(1, 10)): time.monotonic()})
    assert taken_over.refuses(lookup(b"bad\0"))
    assert not taken_over.refuses(lookup(b"good\0"))
    assert taken_over.refuses(reading(2, 8))
    assert not taken_over.refuses(reading(2, 9))
    assert not taken_over.refuses(reading(2, 10))


def test_a_deadly_name_is_an_error_of_its_own(store: Store, tmp_path: Path) -> None:
    """What is mostly done in memory kills two servers before it is done alone."""
    served = strange("deadly-kill", store, tmp_path)
    try:
        with others_read(served, store) as failures:
            for _ in range(3):
                assert code_of_open(f"{served.root}/{DEADLY_NAME}") == errno.EIO
                assert code_of_open(f"{served.root}/other") == errno.ENOENT
        assert not failures
        assert deaths(served) <= 3
    finally:
        end(served)


def test_many_deadly_requests_at_once(store: Store, tmp_path: Path) -> None:
    served = strange("deadly-kill", store, tmp_path)
    paths = [p for p, _ in objects_of(served.root, store.path) if "/large/" in p] * 4
    try:
        with others_read(served, store) as failures, ThreadPoolExecutor(len(paths)) as pool:
            assert set(pool.map(code_of_open, paths)) == {errno.EIO}
        assert not failures
        assert deaths(served) <= len(paths) + 1
    finally:
        end(served)


def test_slow_is_not_dead(store: Store, tmp_path: Path) -> None:
    """Servers are killed long before one of them could have opened a file."""
    served = strange("very-slow-open", store, tmp_path)
    real = dict(objects_of(served.root, store.path))[f"{served.root}/{HUNG}"]
    expected = hashlib.sha256(read(real)).hexdigest()
    try:
        command = ["sha256sum", f"{served.root}/{HUNG}"]
        begun = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as slow:
            while slow.poll() is None:
                assert time.monotonic() < begun + SLOW * 10, "it is never done"
                time.sleep(KILL_EVERY)
                os.kill(served.server, signal.SIGKILL)
            assert slow.stdout is not None
            assert slow.stdout.read().startswith(expected)
        assert deaths(served) >= SLOW / KILL_EVERY / 2
        assert read(f"{served.root}/VERSION.json")
    finally:
        end(served)


def test_what_hangs_in_a_trial_hangs_nothing_else(store: Store, tmp_path: Path) -> None:
    served = strange("hanging-open", store, tmp_path)
    users = [
        subprocess.Popen(["cat", f"{served.root}/{HUNG}"], stdout=subprocess.DEVNULL)
        for _ in range(6)
    ]
    try:
        with others_read(served, store) as failures:
            wait_for(lambda: all(waits(user.pid) for user in users))
            for _ in range(2):  # the second server's death does not begin it anew
                os.kill(server := served.server, signal.SIGKILL)
                wait_for(lambda died=server: served.server != died)
            wait_for(lambda: len(served.trials) == len(users))
            for user in users:
                user.kill()
            for user in users:
                assert user.wait(SECONDS) == -signal.SIGKILL
        assert not failures
        assert len(served.trials) == len(users)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(SECONDS) == 0
        assert mount_at(served.root) is None
    finally:
        for user in users:
            user.kill()
        end(served)
