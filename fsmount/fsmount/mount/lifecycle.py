"""Starting and ending mounts.

A mount is served by a process of its own. `mount` returns when that process serves, or raises with
the reason why it does not; nothing here waits for ever.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from fsmount.errors import MountError
from fsmount.mount import checks, holders, logs, records
from fsmount.mount.mountinfo import FSTYPE, mount_at
from fsmount.mount.request import Answer, MountRequest
from fsmount.mount.unmount import BusyError, unmount

START_SECONDS = 120.0  # that a server gets until it serves
END_SECONDS = 20.0  # that a server gets to end after it was unmounted
_LAZY_SECONDS = 1.0
_KILL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Started:
    """A mount that serves: the tag or table that it shows, and notes for the user."""

    shown: str | None
    notes: tuple[str, ...]


def absolute(request: MountRequest) -> MountRequest:
    """The same request with absolute paths, the mountpoint's as the kernel will list it."""
    return replace(
        request,
        store=os.path.abspath(request.store),
        mountpoint=os.path.realpath(request.mountpoint),
        log=None if request.log is None else os.path.abspath(request.log),
    )


def mount(request: MountRequest) -> Started:
    """Mount in the background; returns when the mount serves. Raises MountError otherwise."""
    request = absolute(request)
    notes = _prepare(request)
    path = request.log or logs.default_path(request.mountpoint)
    log = logs.open_log(path)
    try:
        begin = os.fstat(log).st_size
        answer = _start(replace(request, log=path), log)
    finally:
        os.close(log)
    if answer is None or answer.error is not None:
        raise MountError(logs.reason(path, begin, None if answer is None else answer.error))
    return Started(answer.shown, (*notes, *answer.notes))


def serve_in_foreground(request: MountRequest, tell: Callable[[str], None]) -> NoReturn:
    """Become the server: this process serves until unmounted, SIGTERM or SIGINT, and exits.

    Raises MountError where it is clear before that it can't. `tell` gets notes for the user.
    """
    request = absolute(request)
    for note in _prepare(request):
        tell(note)
    sys.stdout.flush()
    command = _command(request)
    os.execv(command[0], command)  # noqa: S606


def umount(mountpoint: str, *, lazy: bool = False) -> str | None:
    """Unmount and wait until the server has ended; a note if there is more to say.

    Raises MountError: nothing is mounted, it is busy (says who holds it), the server doesn't end.
    `lazy` detaches the mount whoever uses it; the server ends when they are done.
    """
    mountpoint = os.path.realpath(mountpoint)
    mount = mount_at(mountpoint)
    if mount is None:
        raise MountError(f"nothing is mounted on {mountpoint}")
    if mount.fstype != FSTYPE:
        raise MountError(f"{mountpoint} has {mount.fstype} mounted, which fsmount did not")
    if checks.clear_dead_mount(mountpoint):
        return f"the server of {mountpoint} was dead; the mount is cleared"
    server = records.describe(mount).record.server_pid
    try:
        unmount(mountpoint, lazy=lazy)
    except BusyError:
        who = holders.describe(holders.holders(mountpoint))
        raise MountError(
            f"{mountpoint} is busy: {who}; close them, or detach it at once with --lazy"
        ) from None
    if server is None or _has_ended(server, _LAZY_SECONDS if lazy else END_SECONDS):
        return None
    if lazy:
        return f"detached; process {server} serves it until the last file is closed"
    raise MountError(f"{mountpoint} is unmounted, but its server, process {server}, does not end")


def _prepare(request: MountRequest) -> tuple[str, ...]:
    checks.check_device()
    if request.allow_other:
        checks.check_allow_other()
    notes: tuple[str, ...] = ()
    if checks.clear_dead_mount(request.mountpoint):
        notes = (f"cleared a dead mount from {request.mountpoint}",)
    checks.check_mountpoint(request.mountpoint)
    checks.check_apart(request.mountpoint, request.store)
    return notes


def _command(request: MountRequest, *more: str) -> list[str]:
    return [sys.executable, "-P", "-m", "fsmount.mount", request.to_json(), *more]


def _start(request: MountRequest, log: int) -> Answer | None:
    """Start the server and wait for its answer; None if it ended without one."""
    reader, writer = os.pipe()
    try:
        try:
            server = subprocess.Popen(
                _command(request, str(writer)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                pass_fds=[writer],
                start_new_session=True,
            )
        finally:
            os.close(writer)
        server.wait()  # it goes on in a child of its own, in the same group
        try:
            answer = _read_answer(reader)
        except BaseException:
            _end_group(server.pid)
            raise
        if answer is not None and answer.error is not None:
            _readable(reader, END_SECONDS)  # its end
        return answer
    finally:
        os.close(reader)


def _read_answer(reader: int) -> Answer | None:
    """The answer; None if the server ended without one. MountError after START_SECONDS."""
    text = b""
    deadline = time.monotonic() + START_SECONDS
    while not text.endswith(b"\n"):
        if not _readable(reader, deadline - time.monotonic()):
            raise MountError(f"the server did not serve in {START_SECONDS:.0f} s; it was stopped")
        more = os.read(reader, 65536)
        if not more:
            return None
        text += more
    return Answer.from_json(text.decode())


def _end_group(group: int) -> None:
    """End a server that is still starting; SIGTERM unmounts, where it is that far."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        time.sleep(_KILL_SECONDS)


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _has_ended(pid: int, seconds: float) -> bool:
    """Wait for a process that need not be ours; whether it has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return _readable(descriptor, seconds)
    finally:
        os.close(descriptor)
