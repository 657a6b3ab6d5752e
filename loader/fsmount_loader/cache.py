"""Plans that are kept on this node's disk, each made once, by one process, under a lock.

A plan decides which samples are delivered. So plans lie where this user alone can write, and where
there is no such directory none is kept.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from fsmount.errors import FormatError
from fsmount.private import cache_directory
from fsmount_loader.selected import Selected

_log = logging.getLogger("fsmount_loader")

_BYTES_MAX = 8 << 30  # of all plans
_COUNT_MAX = 4096
_RECENT = 3600.0  # seconds since its last use in which a plan is never removed
_PLAN, _LOCK, _NEW = ".plan", ".lock", ".new"


def cached(name: str, make: Callable[[str | None], Selected]) -> Selected:
    """The plan `name` from the cache, or made by `make` in the file it is given.

    While one process makes it, others of the node wait. Where nothing can be cached, `make` is
    given no file. Its errors pass.
    """
    folder = cache_directory("plans")
    if folder is None:
        _tell_once("there is no directory that this user alone can write")
        return make(None)
    path = os.path.join(folder, name + _PLAN)
    found = _load(path)
    if found is not None:
        return found
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        lock = os.open(os.path.join(folder, name[:2] + _LOCK), flags, 0o600)
    except OSError as error:
        _tell_once(str(error))
        return make(None)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _load(path) or _made(path, make)
    finally:
        os.close(lock)


@cache
def _tell_once(why: str) -> None:
    _log.info("plans are not cached: %s", why)


def _load(path: str) -> Selected | None:
    try:
        found = Selected.load(path)
        os.utime(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, FormatError) as error:  # it is made again
        _log.info("a cached plan is not used: %s", error)
        return None
    return found


def _made(path: str, make: Callable[[str | None], Selected]) -> Selected:
    """Called under the lock of `path`, so what lies at its temporary name is a dead process's."""
    fresh = path + _NEW
    try:
        with suppress(FileNotFoundError):
            os.unlink(fresh)
        made = make(fresh)
        made.seal()
        os.replace(fresh, path)
    except OSError as error:
        _log.info("a plan is not cached: %s", error)
        with suppress(OSError):
            os.unlink(fresh)
        return make(None)
    except BaseException:
        with suppress(OSError):
            os.unlink(fresh)
        raise
    _remove_old(os.path.dirname(path))
    return made.at(path)


def _remove_old(folder: str) -> None:
    """Remove plans, the longest unused first, until the rest are few enough; never fails."""
    with suppress(OSError):
        plans = [
            (entry.stat().st_mtime, entry.stat().st_size, entry.path)
            for entry in os.scandir(folder)
            if entry.name.endswith(_PLAN)
        ]
        total, count = sum(size for _, size, _ in plans), len(plans)
        for used, size, path in sorted(plans):
            few = total <= _BYTES_MAX and count <= _COUNT_MAX
            if few or used > time.time() - _RECENT:
                break
            os.unlink(path)  # who has it mapped keeps it
            total, count = total - size, count - 1
