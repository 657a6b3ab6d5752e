"""`fsmount pack` in a process of its own that is slow enough to be disturbed."""

from __future__ import annotations

import glob
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
from npz_tree import write_sample

from fsmount_cli.bench.scratch import children

PATIENCE = 60.0  # seconds after which a wait has failed


def write_slow(source: Path, partition: str, samples: int = 40) -> None:
    """A partition that takes seconds to compress at level 22, sample by sample."""
    for i in range(samples):
        values = np.random.default_rng(i).standard_normal(1 << 18).astype("<f4")
        write_sample(source, f"{partition}/{i}", {"values": values})


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class Packing:
    """A running command; a context manager that leaves no process behind."""

    def __init__(self, source: Path, store: Path, tag: str, *options: str) -> None:
        self._store = store
        command = [sys.executable, "-m", "fsmount_cli.main", "pack", str(source), str(store)]
        self.process = subprocess.Popen(
            [*command, "--tag", tag, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group of its own, as a shell gives a command
        )

    def building(self) -> set[int]:
        """The places in the plan of the partitions that are being built."""
        names = map(os.path.basename, self._there("staging/*/*"))
        return {int(name) for name in names if name.isdigit()}

    def remembered(self) -> int:
        """How many partitions are finished."""
        return len(glob.glob(f"{os.environ['XDG_CACHE_HOME']}/fsmount/builds/*/*.parquet"))

    def _there(self, pattern: str) -> list[str]:
        """Paths in the store. What vanishes meanwhile is an error of Path.glob, but not of this."""
        return glob.glob(f"{glob.escape(str(self._store))}/{pattern}")

    def wait_for_building(self, *places: int, remembered: int = 0) -> None:
        wait_until(
            lambda: self.building() >= set(places) and self.remembered() >= remembered,
            f"{places} are never built",
        )

    def children(self) -> list[int]:
        """The process ids of our children: workers, and multiprocessing's tracker."""
        return children(self.process.pid)

    def workers(self) -> list[int]:
        spawned = [p for p in self.children() if b"spawn_main" in _command_line(p)]
        return sorted(spawned)

    def interrupt(self) -> None:
        """What Ctrl-C does: a signal to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self) -> tuple[int, str, str]:
        """Wait for the command and for all it started: exit code, stdout, stderr."""
        with Ended(self.children()):
            out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err

    def __enter__(self) -> Packing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


class Ended:
    """Waits, on leaving, until the processes are gone; fails if they don't go."""

    def __init__(self, pids: list[int]) -> None:
        self._descriptors = []
        for pid in pids:
            try:
                self._descriptors.append(os.pidfd_open(pid))
            except ProcessLookupError:
                continue

    def __enter__(self) -> Ended:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:
            for descriptor in self._descriptors:
                stack.callback(os.close, descriptor)
            alive = [d for d in self._descriptors if not _ends(d, 0.0 if error else PATIENCE)]
            for descriptor in alive:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            assert error or not alive, "a process outlives the pack that started it"


def _ends(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
