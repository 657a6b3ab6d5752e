"""What a process keeps of root's rights: a mount reads stores that strangers have written.

Linux divides root's rights into capabilities (capabilities(7)). A mount needs three of them: to
mount and to have the kernel read objects itself, and to read and lease stores of any owner. Who
decodes samples for it is handed descriptors, and needs none. What is given up before anything is
read can't be had back, nor by what the process starts.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

DAC_OVERRIDE, DAC_READ_SEARCH, SYS_ADMIN = 1, 2, 21
KEPT = 1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH | 1 << SYS_ADMIN
_NO_NEW_PRIVS, _DROP_BOUNDING, _AMBIENT, _CLEAR_ALL = 38, 24, 47, 4  # of prctl(2)
_HEADER = struct.Struct("=Ii")  # version, pid (0: this thread)
_VERSION = 0x20080522
_SETS = struct.Struct("=6I")  # effective, permitted, inheritable: low bits, then high bits


def give_up_all_but_mounting() -> None:
    """Keep, as root, what its mount needs; nothing for others, who unmount by a setuid program."""
    if os.geteuid() == 0:
        give_up(all_but=KEPT)


def give_up(all_but: int = 0) -> None:
    """Give up the capabilities that are not in the set `all_but`, and gaining any by a program.

    Must be called before any thread is started, since each thread has rights of its own. What a
    container has taken from root, and what it does not let a process give up, stays as it is.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    for number in range(64):
        if not all_but >> number & 1:
            libc.prctl(_DROP_BOUNDING, number, 0, 0, 0)  # EINVAL where the kernel has no such one
    header = ctypes.create_string_buffer(_HEADER.pack(_VERSION, 0), _HEADER.size)
    sets = ctypes.create_string_buffer(_SETS.size)
    if libc.capget(header, sets) == 0:
        _, permitted, _, _, permitted_high, _ = _SETS.unpack(sets.raw)
        kept = (permitted | permitted_high << 32) & all_but
        low, high = kept & 0xFFFFFFFF, kept >> 32
        sets.raw = _SETS.pack(low, low, 0, high, high, 0)
        libc.capset(header, sets)
