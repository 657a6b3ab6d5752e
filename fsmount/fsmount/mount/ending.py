"""Ending mounts, whatever state their processes are in; nothing here waits for ever."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable

from fsmount.errors import MountError
from fsmount.mount import checks, holders, places, records
from fsmount.mount.kernel.device import abort, passed_descriptor
from fsmount.mount.mountinfo import (
    FSTYPE,
    KernelMount,
    all_mounts,
    is_mounted_anywhere,
    lying_on,
    mount_at,
)
from fsmount.mount.records import Record
from fsmount.mount.unmount import BusyError, StuckError, unmount
from fsmount.store.owner import Owner

END_SECONDS = 20.0  # that supervisor and server get to end after it was unmounted
_LAZY_SECONDS = 1.0
_KILL_SECONDS = 2.0
_ATTEMPTS, _PAUSE = 4, 0.1
_NAMED = 5  # so many mounts are named in an error


def umount(mountpoint: str, *, lazy: bool = False) -> str | None:
    """Unmount and wait until all who served have ended; a note if there is more to say.

    Raises MountError: nothing is mounted, it is busy (says who holds it), a process doesn't end.
    `lazy` detaches the mount whoever uses it; it is served until they are done. Where nobody
    answers them any more, they get errors instead of waiting for ever.
    """
    mountpoint = as_listed(mountpoint)
    mount = mount_at(mountpoint)
    if mount is None:
        raise MountError(f"nothing is mounted on {mountpoint}")
    if mount.fstype != FSTYPE:
        raise MountError(f"{mountpoint} has {_not_ours(mount)}")
    if checks.clear_dead_mount(mountpoint):
        return f"the server of {mountpoint} was dead; the mount is cleared"
    record = records.describe(mount).record
    note = _detach(mount, record) if lazy else _take_off(mount, record)
    records.clear_ended()
    return note


def as_listed(mountpoint: str) -> str:
    """The absolute path of a mountpoint, as the kernel lists it.

    A mount whose server hangs is not touched, unless there is a `..` or a link.
    """
    if passed_descriptor(mountpoint) is not None:
        return mountpoint
    path = os.path.abspath(mountpoint)
    above, name = os.path.split(path)
    if ".." not in mountpoint.split("/") and name:
        path = os.path.join(places.resolve(above), name)
        if mount_at(path) is not None:
            return path
    return places.resolve(
        mountpoint if path == mountpoint else os.path.join(os.getcwd(), mountpoint)
    )


def readable(descriptor: int, seconds: float) -> bool:
    """Wait until there is something to read, or its end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _take_off(mount: KernelMount, record: Record) -> str | None:
    """Unmount what nobody uses. Then it harms nobody to kill who served it."""
    try:
        _unmount_idle(mount.mountpoint)
    except BusyError:
        above = lying_on(mount)
        if above:
            raise MountError(
                f"{mount.mountpoint} is busy: {_listed(above)}; unmount that first, or detach "
                "both at once with --lazy"
            ) from None
        serving = [one.pid for one in record.processes]
        found = holders.holders(mount.mountpoint) or holders.waiting(serving)
        who = holders.describe(found)
        who += "" if _answers(mount) else "; nobody answers them"
        raise MountError(
            f"{mount.mountpoint} is busy: {who}; close them, or detach it at once with --lazy"
        ) from None
    except StuckError:
        _end_connection(mount, record)
        unmount(mount.mountpoint, lazy=True)
    if _have_ended(record.processes, _LAZY_SECONDS):
        return None
    if is_mounted_anywhere(mount.device):
        return (
            f"it is still mounted elsewhere, as by a container; process {record.processes[0].pid} "
            "serves it until it is not"
        )
    return None if _have_ended(record.processes, END_SECONDS) else _kill(mount, record)


def _not_ours(mount: KernelMount) -> str:
    """What lies there instead, and what to do about it."""
    ours = [one for one in all_mounts() if mount.parent == one.number and one.fstype == FSTYPE]
    if not ours:
        return f"{mount.fstype} mounted, which fsmount did not"
    return f"{_named(mount)} mounted on top of fsmount's {ours[0].source}; unmount that first"


def _listed(mounts: list[KernelMount]) -> str:
    more = f" and {len(mounts) - _NAMED} more" if len(mounts) > _NAMED else ""
    return (
        ", ".join(f"{_named(one)} is mounted on {one.mountpoint}" for one in mounts[:_NAMED]) + more
    )


def _named(mount: KernelMount) -> str:
    return f"{mount.fstype} ({mount.source})"


def _unmount_idle(mountpoint: str) -> None:
    """Unmount; BusyError if it is busy for longer than a look at it takes."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return unmount(mountpoint, lazy=False)
        except BusyError:
            if holders.holders(mountpoint):
                raise
            time.sleep(_PAUSE)
    return unmount(mountpoint, lazy=False)


def _detach(mount: KernelMount, record: Record) -> str | None:
    silent = not _answers(mount)
    if silent:
        _end_connection(mount, record)
    unmount(mount.mountpoint, lazy=True)
    if silent:
        _have_ended(record.processes, _KILL_SECONDS)
        killed = _kill(mount, record)
        return f"nobody answered on {mount.mountpoint}, so its connection was ended" + (
            f"; {killed}" if killed else ""
        )
    if _have_ended(record.processes, _LAZY_SECONDS):
        return None
    return f"detached; process {record.processes[0].pid} serves it until the last file is closed"


def _answers(mount: KernelMount) -> bool:
    return records.probe(mount.mountpoint) is not None


def _end_connection(mount: KernelMount, record: Record) -> None:
    """What hangs in it gets an error. Only while it is mounted: then its number is its own."""
    if mount.device and not abort(mount.device):
        _signal_all(record.processes)


def _kill(mount: KernelMount, record: Record) -> str | None:
    """Kill what has not ended: the server first, whose end its supervisor waits for."""
    names = ", ".join(str(one.pid) for one in record.processes if _runs(one))
    if not names:
        return None
    for one in reversed(record.processes):
        _signal_all([one])
        if _have_ended(record.processes, _KILL_SECONDS):
            return f"process {names} did not end by itself and was killed"
    raise MountError(f"{mount.mountpoint} is unmounted, but process {names} does not end")


def _signal_all(processes: Iterable[Owner]) -> None:
    for one in processes:
        if _runs(one):
            os.kill(one.pid, signal.SIGKILL)


def _runs(process: Owner) -> bool:
    """Whether it is this very process that has its number here."""
    return Owner.of(process.pid) == process and not process.is_gone()


def _have_ended(processes: Iterable[Owner], seconds: float) -> bool:
    """Wait for processes that need not be ours; whether all have ended."""
    deadline = time.monotonic() + seconds
    return all(_has_ended(one, deadline - time.monotonic()) for one in processes)


def _has_ended(process: Owner, seconds: float) -> bool:
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        # of several threads the first may have ended and the process not yet
        return Owner.of(process.pid) != process or readable(descriptor, seconds)
    finally:
        os.close(descriptor)
