"""Where a server in the background writes its log, and what to tell of it."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
from typing import Any

from fsmount.errors import MountError, one_line

_REASONS = ("fuse: ", "fusermount", "mount: ")  # how libfuse's lines begin


def default_path(mountpoint: str) -> str:
    """The log of a mountpoint, in the user's state directory, which is made; MountError."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if not os.path.isabs(base):  # a user without a home
        base = f"{tempfile.gettempdir()}/fsmount-log-{os.geteuid()}"
    try:
        os.makedirs(f"{base}/fsmount", mode=0o700, exist_ok=True)
    except OSError as error:
        raise MountError(f"can't make a directory for the log ({error}); use --log FILE") from error
    name = os.path.basename(mountpoint)
    name = "".join(char if char.isalnum() or char in "._-" else "_" for char in name)[:60]
    digest = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()
    return f"{base}/fsmount/{name}-{digest[:8]}.log"


class _Lines(logging.Formatter):
    """One printable line a record, whatever names are in it; a bug's traceback follows it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name is logging's
        return "\n".join(map(one_line, super().formatException(ei).split("\n")))


def log_to_stderr() -> None:
    """Write this process's log to stderr, which in the background is the log's file."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def open_log(path: str) -> int:
    """A descriptor that appends to the log `path`, private to the user; MountError."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MountError(f"can't write the log {path}: {error.strerror}") from error


def reason(path: str, begin: int, error: str | None) -> str:
    """One line on why a server did not serve: its `error` and what libfuse wrote from `begin` on.

    Without an `error` the server died: the log's last line has to do.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        file.seek(begin)
        lines = [line.strip() for line in file if line.strip()]
    if error is None:
        return f"the server died before it served ({''.join(lines[-1:])}); its log is {path}"
    return ": ".join([error, *[line for line in lines if line.startswith(_REASONS)][-1:]])
