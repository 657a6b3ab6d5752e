"""Kernel mounts for tests: processes of their own that leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fsmount.model import TagRef, Version
from fsmount.mount.kernel.config import Config
from fsmount.mount.kernel.device import unmount
from fsmount.mount.kernel.prepare import command as command_of
from fsmount.mount.kernel.prepare import prepare_version
from fsmount.mount.kernel.trial import NAME
from fsmount.mount.mountinfo import mount_at
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs.filesystem import Owner
from fsmount.vfs.parted import Look

T = TypeVar("T")

SECONDS = 30
HERE = os.path.dirname(__file__)


class NotServedError(Exception):
    """A supervisor's answer."""


@dataclass(slots=True)
class KernelMount:
    """A mount that serves, and its supervisor."""

    root: str
    process: subprocess.Popen[bytes]
    features: list[str]
    log: str

    @property
    def supervisor(self) -> int:
        return self.process.pid

    @property
    def server(self) -> int:
        """The process that serves now."""
        return wait_for(lambda: next((p for p in self.children if p in self._servers()), None))

    @property
    def trials(self) -> list[int]:
        """The processes that try what servers may have died of."""
        return [pid for pid in self.children if name_of(pid) == NAME]

    def _servers(self) -> list[int]:
        return list(
            map(int, re.findall(r"served by process (\d+)$", self.log_text(), re.MULTILINE))
        )

    @property
    def children(self) -> list[int]:
        return children(self.process.pid)

    def log_text(self) -> str:
        with open(self.log, encoding="utf-8") as file:
            return file.read()


Mounter = Callable[..., KernelMount]


def wait_for(probe: Callable[[], T | None], seconds: float = SECONDS) -> T:
    """What `probe` gives once it is neither None nor False."""
    until = time.monotonic() + seconds
    while True:
        found = probe()
        if found is not None and found is not False:
            return found
        assert time.monotonic() < until, "waited for too long"
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    """The live children of a process."""
    with suppress(FileNotFoundError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]
    return []


def name_of(pid: int) -> str:
    """The name of a process in lists, "" if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/comm") as file:
        return file.read().strip()
    return ""


def config_for(store: Store, mountpoint: str, tag: str = "v1", **more: Any) -> Config:
    """The config that serves `tag`, shown as this user's."""
    document = store.resolve(TagRef(tag))
    look = Look(Owner.of_process())
    made = prepare_version(store, document, mountpoint, f"{store.path}@{tag}", look)
    return replace(made, **more)


def publish_large(store: Store) -> Version:
    """`large`: shards of a megabyte each; `small`: tiny ones."""
    noise = np.random.default_rng(3)
    large = [
        tiny.Sample(f"large/{n}", {"noise": noise.integers(0, 256, 1 << 20, np.uint8)})
        for n in range(8)
    ]
    small = [tiny.numbered(f"small/{n}", n) for n in range(20)]
    return tiny.publish(store, "v1", {"large": large, "small": small}, samples_a_shard=2)


@contextmanager
def mounted(config: Config, log: str, **popen: Any) -> Iterator[KernelMount]:
    """Mount by a supervisor of its own; on leaving everything is ended, come what may."""
    mount = start(
        command_of(config),
        config.mountpoint,
        log,
        **popen,
    )
    try:
        yield mount
    finally:
        end(mount)


def start(command: list[str], mountpoint: str, log: str, **popen: Any) -> KernelMount:
    """Run a supervisor until it says that it serves."""
    reader, writer = os.pipe()
    with open(log, "ab") as file:
        process = subprocess.Popen(
            [*command, str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=[writer, *popen.pop("pass_fds", [])],
            start_new_session=True,
            **popen,
        )
    os.close(writer)
    try:
        assert select.select([reader], [], [], SECONDS)[0], "it does not begin"
        answer = json.loads(os.read(reader, 65536) or b'{"error": "it died"}')
    finally:
        os.close(reader)
    mount = KernelMount(mountpoint, process, answer.get("features", []), log)
    assert answer.get("supervisor_pid", process.pid) == process.pid
    if answer["error"] is not None:
        end(mount)
        raise NotServedError(answer["error"])
    return mount


def strange(case: str, store: Store, directory: Path, **config: Any) -> KernelMount:
    """A mount that behaves as `strange.py` makes it, below `directory`; to be ended."""
    root = directory / "strange"
    root.mkdir()
    made = config_for(store, str(root), **config)
    command = [sys.executable, f"{HERE}/strange.py", case, made.to_json()]
    return start(command, str(root), str(directory / "strange.log"))


def end(mount: KernelMount) -> None:
    """Take it off, and end its processes."""
    process = mount.process
    servers = children(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
    while mount_at(mount.root) is not None and unmount(mount.root, detach=True) == 0:
        pass
    for pid in (process.pid, *servers):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def bytes_read(mount: KernelMount) -> int:
    """Bytes that the server has read, from wherever."""
    return _counted(mount, "rchar")


def reads(mount: KernelMount) -> int:
    """How often the server has read anything: more than the requests that it has taken."""
    return _counted(mount, "syscr")


def _counted(mount: KernelMount, what: str) -> int:
    with open(f"/proc/{mount.server}/io", encoding="ascii") as file:
        found = re.search(rf"{what}: (\d+)", file.read())
    assert found is not None
    return int(found[1])


def is_backed(mount: KernelMount, shown: str) -> bool:
    """Whether the kernel reads a file by itself: its pages are those of the object."""
    before = bytes_read(mount)
    with open(shown, "rb", 0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = len(file.read())
    return bytes_read(mount) - before < size
