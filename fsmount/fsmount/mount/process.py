"""A server's process: from its arguments to its exit code."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn, Protocol, cast

from fsmount.errors import FsmountError, MountError
from fsmount.model import parse_ref
from fsmount.mount import checks, drivers, records
from fsmount.mount.kernel import prepare
from fsmount.mount.kernel.config import Config
from fsmount.mount.locks import StartLock, starting
from fsmount.mount.logs import log_to_stderr
from fsmount.mount.request import KERNEL, Answer, MountRequest
from fsmount.mount.telling import tell_parent, tell_people
from fsmount.store import Store

log = logging.getLogger("fsmount.mount")

_NO_LIBFUSE = (
    "libfuse 2 is not installed: install the package libfuse2 (Debian, Ubuntu), fuse-libs (Fedora, "
    "RHEL) or macFUSE (macOS)"
)


class _Server(Protocol):
    def serve(
        self, request: MountRequest, notes: tuple[str, ...], answer: Callable[[Answer], None]
    ) -> None: ...


def main(request_text: str, descriptor: str | None = None) -> int:
    """Serve what `request_text` asks for and return the process's exit code.

    With the kernel driver it does not return: the process becomes the mount's supervisor.
    """
    log_to_stderr()
    request = MountRequest.from_json(request_text)
    told = None if descriptor is None else int(descriptor)
    tell = tell_people(request.mountpoint, request.store) if told is None else tell_parent(told)
    try:
        _serve(request, tell, told)
    except FsmountError as error:
        tell(Answer(error=str(error)))
        return error.exit_code
    log.info("%s: unmounted", request.mountpoint)
    return 0


def _serve(request: MountRequest, tell: Callable[[Answer], None], told: int | None) -> None:
    driver, notes = drivers.choose(request)
    with starting(request.mountpoint) as lock:

        def answer(answer: Answer) -> None:
            lock.release()
            tell(answer)

        notes += checks.make_ready(request.mountpoint, request.store)
        if driver == KERNEL:
            _become_supervisor(request, notes, lock, told)
        _server().serve(request, notes, answer)


def _become_supervisor(
    request: MountRequest, notes: tuple[str, ...], lock: StartLock, told: int | None
) -> NoReturn:
    config = replace(
        _prepare(request),
        verify=request.verify,
        allow_other=request.allow_other,
        passthrough=request.passthrough,
        xattrs=request.xattrs,
        ref=request.ref,
        log=request.log,
        notes=notes,
        lock=lock.keep_over_exec(),
    )
    command = prepare.command(config, told)
    if told is not None:
        os.set_inheritable(told, True)
    if isinstance(config.paths, int):
        os.set_inheritable(config.paths, True)
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606


def _prepare(request: MountRequest) -> Config:
    """What the kernel driver is to serve; FsmountError where there is no such thing."""
    store = Store.open(request.store)
    source = records.source_of(store.path, request.ref)
    if request.ref is None:
        return prepare.prepare_store(store, request.mountpoint, source, request.look)
    document = store.resolve(parse_ref(request.ref))
    return prepare.prepare_version(store, document, request.mountpoint, source, request.look)


def _server() -> _Server:
    try:
        return cast(_Server, importlib.import_module("fsmount.mount.server"))
    except OSError as error:  # fusepy looks for libfuse when it is imported
        raise MountError(f"{_NO_LIBFUSE} ({error})") from error
