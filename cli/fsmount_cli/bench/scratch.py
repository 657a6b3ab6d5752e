"""A directory for a measurement, and the end of all that was started in it, come what may."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from fsmount.errors import FsmountError, MountError
from fsmount.mount.mountinfo import all_mounts
from fsmount.mount.unmount import BusyError, unmount

_POLL_SECONDS = 0.002
_END_SECONDS = 10.0


class BenchError(FsmountError):
    """What was to be measured did not work."""


class UnavailableError(BenchError):
    """What was to be measured can't be had on this machine, or for these data."""


@contextmanager
def scratch_directory(parent: str | None, seconds: float) -> Iterator[str]:
    """A new directory below `parent` (default: that for temporary files).

    On leaving, whatever is mounted below it is taken off, processes of fsmount that were told its
    path are ended, and it is removed. SIGINT waits until that is done. Those processes are also
    ended after `seconds`, so that whoever waits for one of their mounts gets an error. What the
    system refuses is a BenchError.
    """
    path = os.path.realpath(tempfile.mkdtemp(prefix="fsmount-bench-", dir=parent))
    over, late = threading.Event(), threading.Event()
    guard = threading.Thread(target=_guard, args=(path, seconds, over, late), daemon=True)
    guard.start()
    try:
        yield path
    except (BenchError, OSError) as error:
        if not late.is_set():
            raise BenchError(str(error)) from error
    finally:
        with _uninterrupted():
            over.set()
            guard.join()
            _sweep(path)
    if late.is_set():
        raise BenchError(f"not done in {seconds:.0f} s")


def environment(scratch: str) -> dict[str, str]:
    """That of processes which keep their records of mounts in `scratch`, not among the user's."""
    return {**os.environ, "XDG_RUNTIME_DIR": scratch}


def run(
    command: Sequence[str],
    seconds: float,
    *,
    env: Mapping[str, str] | None = None,
    began: Callable[[int], None] = lambda pid: None,
) -> str:
    """The stdout of a command; BenchError if it fails or takes longer than `seconds`.

    It has its own session, and is ended in an orderly way when this process is interrupted.
    `began` is told its process.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
    )
    try:
        began(process.pid)
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{command[0]}: not done in {seconds:.0f} s") from None
    finally:
        end(process)
    if process.returncode:
        said = err.strip().rpartition("\n")[2].removeprefix("error: ")
        raise BenchError(said or f"{command[0]} ended with {process.returncode}")
    return out


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill it if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def wait_for(probe: Callable[[], bool], seconds: float, what: str) -> None:
    """Return when `probe` holds; BenchError, which says `what`, after `seconds`."""
    until = time.monotonic() + seconds
    while not probe():
        if time.monotonic() > until:
            raise BenchError(f"{what}: waited for {seconds:.0f} s")
        time.sleep(_POLL_SECONDS)


def children(pid: int) -> list[int]:
    """The live children of a process, whichever of its threads started them."""
    found: list[int] = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError), open(path, encoding="ascii") as file:
            found += map(int, file.read().split())
    return found


def rss(pid: int) -> int:
    """Resident memory of a process in bytes; 0 if it is gone."""
    with suppress(OSError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@contextmanager
def _uninterrupted() -> Iterator[None]:
    kept = [(n, signal.signal(n, signal.SIG_IGN)) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in kept:
            signal.signal(number, handler)


def _guard(path: str, seconds: float, over: threading.Event, late: threading.Event) -> None:
    """End all processes that were told of `path`, and those that follow, when it takes too long."""
    if over.wait(seconds):
        return
    late.set()
    while not over.wait(_POLL_SECONDS):
        _kill_told_of(path)


def _sweep(path: str) -> None:
    _take_off(path)
    with suppress(BenchError):  # whose mount is gone ends by itself, and gives back its lease
        wait_for(lambda: not _told_of(path), _END_SECONDS, "servers to end")
    _kill_told_of(path)
    _take_off(path)  # what a server that was just starting had mounted
    shutil.rmtree(path, ignore_errors=True)


def _take_off(path: str) -> None:
    for mount in reversed(all_mounts()):
        if mount.mountpoint.startswith(f"{path}/"):
            with suppress(MountError, BusyError):
                unmount(mount.mountpoint, lazy=True)


def _kill_told_of(path: str) -> None:
    while pids := _told_of(path):  # a supervisor may just have started another server
        for pid in pids:
            _kill(pid)
        time.sleep(_POLL_SECONDS)


def _told_of(path: str) -> list[int]:
    """Processes of ours that have `path` in their arguments; nothing else has such a name.

    One that has ended has no arguments any more, whether it was waited for or not.
    """
    name_of_it = os.path.basename(path).encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
            words = file.read()
            ours = b"\0-m\0fsmount" in words and name_of_it in words
            if ours and int(name) != os.getpid():
                found.append(int(name))
    return found


def _kill(pid: int) -> None:
    with suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
