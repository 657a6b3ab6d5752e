"""A server's process: from its arguments to its exit code."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Protocol, cast

from fsmount.errors import FsmountError, MountError
from fsmount.mount.request import Answer, MountRequest

log = logging.getLogger("fsmount.mount")

_NO_LIBFUSE = (
    "libfuse 2 is not installed: install the package libfuse2 (Debian, Ubuntu), fuse-libs (Fedora, "
    "RHEL) or macFUSE (macOS)"
)


class _Server(Protocol):
    def serve(self, request: MountRequest, answer: Callable[[Answer], None]) -> None: ...


def main(request_text: str, descriptor: str | None = None) -> int:
    """Serve what `request_text` asks for and return the process's exit code."""
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stderr
    )
    request = MountRequest.from_json(request_text)
    tell = _tell_people(request) if descriptor is None else _tell_parent(int(descriptor))
    try:
        _server().serve(request, tell)
    except FsmountError as error:
        tell(Answer(error=str(error)))
        return error.exit_code
    log.info("%s: unmounted", request.mountpoint)
    return 0


def _server() -> _Server:
    try:
        return cast(_Server, importlib.import_module("fsmount.mount.server"))
    except OSError as error:  # fusepy looks for libfuse when it is imported
        raise MountError(f"{_NO_LIBFUSE} ({error})") from error


def _tell_parent(descriptor: int) -> Callable[[Answer], None]:
    def tell(answer: Answer) -> None:
        try:
            os.write(descriptor, answer.to_json().encode() + b"\n")
            if answer.error is None:  # else the parent waits until this process has ended
                os.close(descriptor)
        except OSError:
            log.error("nobody waits for the answer: %s", answer.error or "serving")

    return tell


def _tell_people(request: MountRequest) -> Callable[[Answer], None]:
    def tell(answer: Answer) -> None:
        for note in answer.notes:
            sys.stderr.write(f"note: {note}\n")
        if answer.error is not None:
            sys.stderr.write(f"error: {answer.error}\n")
        else:
            log.info("%s: serving %s of %s", request.mountpoint, answer.shown, request.store)

    return tell
