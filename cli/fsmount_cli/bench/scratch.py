"""A directory for a measurement, and the end of all that was started in it, come what may."""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import signal
import subprocess
import sys
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
_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)


class BenchError(FsmountError):
    """What was to be measured did not work."""


class UnavailableError(BenchError):
    """What was to be measured can't be had on this machine, or for these data."""


@contextmanager
def scratch_directory(parent: str | None, seconds: float) -> Iterator[str]:
    """A new directory below `parent` (default: that for temporary files).

    On leaving, whatever is mounted below it is taken off, all processes that this one has started,
    and theirs, are ended, and it is removed. SIGINT waits until that is done. Those processes are
    also killed after `seconds`, so that whoever waits for one of their mounts gets an error. What
    the system refuses is a BenchError.
    """
    path = os.path.realpath(tempfile.mkdtemp(prefix="fsmount-bench-", dir=parent))
    over, late = threading.Event(), threading.Event()
    guard = threading.Thread(target=_guard, args=(seconds, over, late), daemon=True)
    _adopt(True)
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
            _adopt(False)
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


def _adopt(wanted: bool) -> None:
    """Whose parent has ended, as that of a server in the background, becomes a child of ours.

    So all that was started is found from here, in whichever moment of its start an interrupt came.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def _guard(seconds: float, over: threading.Event, late: threading.Event) -> None:
    """Kill all that was started, and what follows, when it takes too long."""
    if over.wait(seconds):
        return
    late.set()
    while not over.wait(_POLL_SECONDS):
        _kill_below(os.getpid())


def _sweep(path: str) -> None:
    for pid in children(os.getpid()):
        _send(pid, signal.SIGTERM)
    _take_off(path)
    with suppress(BenchError):  # whose mount is gone ends by itself, and gives back its lease
        wait_for(_childless, _END_SECONDS, "servers to end")
    with suppress(BenchError):  # what can't be killed, as in the middle of a disk's error, stays
        wait_for(_killed, _END_SECONDS, "servers to be killed")
    _take_off(path)  # what a server that was just starting had mounted
    shutil.rmtree(path, ignore_errors=True)


def _take_off(path: str) -> None:
    for mount in reversed(all_mounts()):
        if mount.mountpoint.startswith(f"{path}/"):
            with suppress(MountError, BusyError):
                unmount(mount.mountpoint, lazy=True)


def _childless() -> bool:
    """Whether we have no children, after waiting for those that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return not children(os.getpid())


def _killed() -> bool:
    """Kill all below us once more, and whether that was all: who is killed may be replaced."""
    _kill_below(os.getpid())
    return _childless()


def _kill_below(pid: int) -> None:
    """Kill all that descends from a process."""
    for child in children(pid):
        _kill_below(child)
        _send(child, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
