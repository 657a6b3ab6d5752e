"""Where a server in the background writes its log, and what to tell of it."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any

from fsmount.errors import MountError, one_line
from fsmount.mount import places
from fsmount.private import home_directory, private_directory

_APPEND = (
    os.O_RDWR
    | os.O_APPEND
    | os.O_CREAT
    | os.O_NOFOLLOW
    | os.O_NONBLOCK
    | os.O_NOCTTY
    | os.O_CLOEXEC
)
_LOOKED_AT = 1 << 20  # bytes of the log that may say why
_REASONS = ("fuse: ", "fusermount", "mount: ")  # how libfuse's lines begin


def default_path(mountpoint: str) -> str | None:
    """The log of a mountpoint, in a directory of this user's alone; None where there is none."""
    directory = next(filter(None, map(private_directory, _places())), None)
    if directory is None:
        return None
    name = os.path.basename(mountpoint)
    name = "".join(char if char.isalnum() or char in "._-" else "_" for char in name)[:60]
    digest = hashlib.sha256(os.fsencode(mountpoint)).hexdigest()
    return f"{directory}/{name}-{digest[:8]}.log"


def _places() -> Iterator[str]:
    named, home = os.environ.get("XDG_STATE_HOME"), home_directory()
    if named:
        yield f"{named}/fsmount"
    if home is not None:
        yield f"{home}/.local/state/fsmount"
    if os.path.isdir("/tmp"):  # noqa: S108
        yield f"/tmp/fsmount-log-{os.geteuid()}"  # noqa: S108 - it is checked


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
    """A descriptor to read and to append to the log `path`, made private to the user; MountError.

    It must be a regular file. A link is not followed, since who can make one where the log is to
    be would choose what is written to.
    """
    try:
        if os.geteuid() != 0:
            descriptor = os.open(path, _APPEND, 0o600)
        else:
            above, name = os.path.split(path)
            with places.opened(places.resolve(above)) as directory:
                descriptor = os.open(name, _APPEND, 0o600, dir_fd=directory)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise MountError(f"can't write the log {path}: {why}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise MountError(f"can't write the log {path}: it is not a regular file")
    return descriptor


def reason(log: int, path: str | None, begin: int, error: str | None) -> str:
    """One line on why a server did not serve: its `error` and what libfuse wrote from `begin` on.

    `log` is the descriptor of the log `path`, which is None where none is kept. Without an `error`
    the server died: the log's last line has to do.
    """
    text = os.pread(log, _LOOKED_AT, begin).decode(errors="replace")
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if error is None:
        last = "".join(lines[-1:]) or "it said nothing"
        where = "no log is kept, --log FILE keeps one" if path is None else f"its log is {path}"
        return f"the server died before it served ({last}); {where}"
    return ": ".join([error, *[line for line in lines if line.startswith(_REASONS)][-1:]])
