"""Which open files the kernel reads by itself (passthrough), and which through the server.

The kernel wants one backing id for an inode for as long as it is open anywhere, and never mixes
passthrough with cached reading of one inode. So how a node is opened is decided by its first
opener and holds until the last one has closed it. Openers are told apart by the number of their
OPEN request: the one that is sent again to a successor counts once.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from struct import Struct

from fsmount.mount.kernel.protocol import BACKING_CLOSE, BACKING_MAP, BACKING_OPEN

log = logging.getLogger("fsmount.mount")

CACHED = 0  # instead of a backing id: read through the server and the page cache
_ID = Struct("=I")
_FOR_ALL = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTTY)  # no file of this mount will do better


class BackingIds:
    """The kernel's register of backing files of one connection."""

    def __init__(self, device: int) -> None:
        """`device` is a descriptor of /dev/fuse."""
        self._device = device

    def register(self, fd: int) -> int:
        """A new backing id for the file behind `fd`; OSError."""
        argument = bytearray(BACKING_MAP.pack(fd, 0, 0))  # of bytes, ioctl would return bytes
        return int(fcntl.ioctl(self._device, BACKING_OPEN, argument))

    def close(self, backing_id: int) -> None:
        """Give an id back; OSError."""
        fcntl.ioctl(self._device, BACKING_CLOSE, _ID.pack(backing_id))


@dataclass(slots=True)
class _Open:
    backing_id: int
    openers: set[int] = field(default_factory=set)


class OpenNodes:
    """How each open node is read. Not safe for two threads."""

    def __init__(self, register: Callable[[int], int], close: Callable[[int], None]) -> None:
        """`register` and `close` are those of BackingIds."""
        self._register = register
        self._close = close
        self._nodes: dict[int, _Open] = {}
        self._refused: set[int] = set()  # devices whose files can't back ours
        self._given_up = False

    def __len__(self) -> int:
        return len(self._nodes)

    def how(self, node: int) -> int | None:
        """The backing id or CACHED of an open node; None for one that is not open."""
        found = self._nodes.get(node)
        return None if found is None else found.backing_id

    def open(self, node: int, opener: int, fd: int, device: int) -> int:
        """Count an opener; the backing id it is to use, or CACHED.

        `fd` is the file that was checked, of the file system `device` (st_dev); it is registered if
        the node was not open. Nothing is asked of that file system, which might hang.
        """
        found = self._nodes.get(node)
        if found is not None:
            return self.put(node, opener, found.backing_id)
        return self.put(node, opener, self._try(fd, device))

    def put(self, node: int, opener: int, backing_id: int) -> int:
        """Count an opener that was told to use `backing_id`."""
        self._nodes.setdefault(node, _Open(backing_id)).openers.add(opener)
        return backing_id

    def release(self, node: int, opener: int) -> None:
        """An opener has closed the node; the last one gives the id back. Once or many times."""
        backing_id = self.drop(node, opener)
        if backing_id == CACHED:
            return
        try:
            self._close(backing_id)
        except OSError as error:
            log.warning("backing id %d can't be given back: %s", backing_id, error)

    def drop(self, node: int, opener: int) -> int:
        """Forget an opener; the id that nobody uses any more, or CACHED."""
        found = self._nodes.get(node)
        if found is None:
            return CACHED
        found.openers.discard(opener)
        if found.openers:
            return CACHED
        del self._nodes[node]
        return found.backing_id

    def forget(self) -> None:
        """Begin anew: what is open is not known any more. Who has a file open can go on reading."""
        for found in self._nodes.values():
            if found.backing_id != CACHED:
                with suppress(OSError):  # it was given back
                    self._close(found.backing_id)
        self._nodes.clear()

    def _try(self, fd: int, device: int) -> int:
        if self._given_up or device in self._refused:
            return CACHED
        try:
            return self._register(fd)
        except OSError as error:
            self._remember(error, device)
            return CACHED

    def _remember(self, error: OSError, device: int) -> None:
        if error.errno in _FOR_ALL:
            self._given_up = True
            log.info("no passthrough: %s", error.strerror)
        elif error.errno == errno.ELOOP:
            self._refused.add(device)
            log.info(
                "no passthrough for files of device %d:%d: their file system is stacked itself",
                os.major(device),
                os.minor(device),
            )
        else:
            log.warning("no passthrough for one file: %s", error.strerror)
