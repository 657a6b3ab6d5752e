"""Starting mounts.

A mount is served by a process of its own. `mount` returns when that process serves, or raises with
the reason why it does not; nothing here waits for ever.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from fsmount.errors import MountError
from fsmount.mount import checks, drivers, logs, records
from fsmount.mount.ending import as_listed, readable, umount
from fsmount.mount.kernel.device import passed_descriptor
from fsmount.mount.locks import starting
from fsmount.mount.request import Answer, MountRequest
from fsmount.store.inside import store_path

START_SECONDS = 120.0  # that a server gets until it serves
END_SECONDS = 20.0  # that a server gets to end when it can't serve
_KILL_SECONDS = 1.0
_PAUSE = 0.01


@dataclass(frozen=True, slots=True)
class Started:
    """A mount that serves: the tag or table that it shows, and notes for the user."""

    shown: str | None
    notes: tuple[str, ...]


def absolute(request: MountRequest) -> MountRequest:
    """The same request with absolute paths, the mountpoint's as the kernel will list it."""
    return replace(
        request,
        store=store_path(request.store),
        mountpoint=as_listed(request.mountpoint),
        log=None if request.log is None else os.path.abspath(request.log),
    )


def mount(request: MountRequest) -> Started:
    """Mount in the background; returns when the mount serves. Raises MountError otherwise."""
    request = absolute(request)
    notes = _prepare(request)
    path = request.log or logs.default_path(request.mountpoint)
    if path is None:
        notes += ("no log is kept: there is no directory of this user's alone; use --log FILE",)
    log = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC) if path is None else logs.open_log(path)
    try:
        begin = os.fstat(log).st_size
        answer = _start(replace(request, log=path), log)
        if answer is None or answer.error is not None:
            error = None if answer is None else answer.error
            raise MountError(logs.reason(log, path, begin, error))
    finally:
        os.close(log)
    try:
        _check_that_it_answers(request.mountpoint)
    except KeyboardInterrupt:
        umount(request.mountpoint, lazy=True)
        raise
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


def _prepare(request: MountRequest) -> tuple[str, ...]:
    """Notes for the user; MountError where it is clear that it can't be mounted.

    The server does all that again, since somebody else may be quicker.
    """
    drivers.choose(request)
    if passed_descriptor(request.mountpoint) is not None:
        return ()
    checks.check_device()
    if request.allow_other:
        checks.check_allow_other()
    with starting(request.mountpoint):
        return checks.make_ready(request.mountpoint, request.store)


def _check_that_it_answers(mountpoint: str) -> None:
    """Ask through the kernel, which knows by then whom to ask."""
    if passed_descriptor(mountpoint) is not None:
        return
    code = records.probe(mountpoint)
    if code == 0:
        return
    with suppress(MountError):
        umount(mountpoint, lazy=True)
    why = "" if code is None else f": {os.strerror(code)}"
    raise MountError(f"the mount on {mountpoint} does not answer{why}; it was taken off")


def _command(request: MountRequest, *more: str) -> list[str]:
    return [sys.executable, "-P", "-m", "fsmount.mount", request.to_json(), *more]


def _start(request: MountRequest, log: int) -> Answer | None:
    """Start the server and wait for its answer; None if it ended without one."""
    passed = passed_descriptor(request.mountpoint)
    reader, writer = _pipe()
    try:
        try:
            server = subprocess.Popen(
                _command(request, str(writer)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                pass_fds=[writer, *([] if passed is None else [passed])],
                start_new_session=True,
            )
        finally:
            os.close(writer)
        server.wait()  # it goes on in a child of its own, in the same group
        answer = None
        try:
            answer = _read_answer(reader)
        finally:
            if answer is None:  # a process that outlived the one that was to answer may serve
                _end_group(server.pid)
                if passed is None:
                    checks.clear_dead_mount(request.mountpoint)
        if answer is not None and answer.error is not None:
            readable(reader, END_SECONDS)  # its end
        return answer
    finally:
        os.close(reader)


def _pipe() -> tuple[int, int]:
    """A pipe whose writing end is not one of the descriptors 0 to 2, which this process may have
    closed and which a server has for others.
    """
    reader, low = os.pipe()
    try:
        return reader, fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(low)


def _read_answer(reader: int) -> Answer | None:
    """The answer; None if the server ended without one. MountError after START_SECONDS."""
    text = b""
    deadline = time.monotonic() + START_SECONDS
    while not text.endswith(b"\n"):
        if not readable(reader, deadline - time.monotonic()):
            raise MountError(f"the server did not serve in {START_SECONDS:.0f} s; it was stopped")
        more = os.read(reader, 65536)
        if not more:
            return None
        text += more
    return Answer.from_json(text.decode())


def _end_group(group: int) -> None:
    """End a server that is still starting; SIGTERM unmounts, where it is that far."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _KILL_SECONDS
        there = _signal(group, number)
        while there and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            there = _signal(group, 0)
        if not there:
            return


def _signal(group: int, number: int) -> bool:
    """Signal a process group; whether there is one."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
