"""The one place where a failure becomes an errno."""

from __future__ import annotations

import errno
import logging

from fsmount.errors import FsmountError

log = logging.getLogger("fsmount.vfs")

# Limits of the process that serves. To a program they would look like its own.
_LIMITS = {errno.EMFILE: "ulimit -n", errno.ENFILE: "fs.file-max", errno.ENOMEM: "memory"}


def errno_of(error: BaseException, doing: str) -> int:
    """The errno that a file operation answers for `error`; never 0, never negative.

    Faults (EIO) are logged as one line, with what was being done; so are limits that the serving
    process meets, which are EIO too. An error that nobody foresaw is logged with its traceback.
    """
    if not isinstance(error, FsmountError | OSError):
        log.error("%s: unforeseen %s", doing, type(error).__name__, exc_info=error)
        return errno.EIO
    code = error.errno
    if not code or code < 0:
        code = errno.EIO
    if code in _LIMITS:
        log.error("%s: %s: a limit of the serving process (%s)", doing, error, _LIMITS[code])
        return errno.EIO
    if code == errno.EIO:
        log.error("%s: %s", doing, error)
    return code
