"""The one place where a failure becomes an errno."""

from __future__ import annotations

import errno
import logging

from fsmount.errors import FsmountError

log = logging.getLogger("fsmount.vfs")


def errno_of(error: BaseException, doing: str) -> int:
    """The errno that a file operation answers for `error`; never 0, never negative.

    Faults (EIO) are logged as one line, with what was being done; an error that nobody foresaw is
    logged with its traceback.
    """
    if not isinstance(error, FsmountError | OSError):
        log.error("%s: unforeseen %s", doing, type(error).__name__, exc_info=error)
        return errno.EIO
    code = error.errno
    if not code or code < 0:
        code = errno.EIO
    if code == errno.EIO:
        log.error("%s: %s", doing, error)
    return code
