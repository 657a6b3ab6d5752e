"""What a dead server has left behind in the kernel: requests that it had taken, and not answered.

One of them may be what it died of. The kernel is asked to send them again while no server reads, so
that the supervisor gets them and no successor does.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field

from fsmount.mount.kernel.protocol import (
    IN_HEADER,
    RESENT,
    SILENT,
    Notify,
    Opcode,
    pack_notify,
)

BUFFER = 64 << 10  # bytes; requests are small, since nobody writes
# What is for the process that serves, and does nothing that could kill it.
_NOT_TRIED = frozenset({Opcode.RELEASE, Opcode.RELEASEDIR, Opcode.DESTROY, Opcode.INTERRUPT})
_NO_MORE = (errno.EAGAIN, errno.ENODEV, errno.ECONNABORTED, errno.ENOTCONN)


@dataclass(slots=True)
class Left:
    """Whole requests, as they came."""

    suspects: list[bytes] = field(default_factory=list)  # the dead server had taken them
    fresh: list[bytes] = field(default_factory=list)  # for its successor: they had to be read too


def collect(device: int) -> Left:
    """Get what a dead server has left. Nobody else may read from `device` meanwhile."""
    left = Left()
    os.set_blocking(device, False)  # a request may be withdrawn before it is read
    try:
        os.write(device, pack_notify(Notify.RESEND))
        while not _is_last(left, _read(device)):
            pass
    except OSError as error:
        if error.errno not in _NO_MORE:
            raise
    finally:
        os.set_blocking(device, True)
    return left


def _read(device: int) -> bytes | None:
    """A request; None for one that was withdrawn."""
    try:
        return os.read(device, BUFFER)
    except FileNotFoundError:
        return None


def _is_last(left: Left, message: bytes | None) -> bool:
    """Put a request where it belongs; whether it was the first that no server has seen.

    What is sent again comes before that.
    """
    if message is None:
        return False
    _, opcode, unique, *_ = IN_HEADER.unpack_from(message)
    if opcode in SILENT:
        return False
    if unique & RESENT and opcode not in _NOT_TRIED:
        left.suspects.append(message)
        return False
    left.fresh.append(message)
    return not unique & RESENT and opcode != Opcode.INTERRUPT
