"""Answers on their way to the kernel; what is read from a file goes there without being copied."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from dataclasses import dataclass
from typing import Protocol

from fsmount.mount.kernel.answers import Range
from fsmount.mount.kernel.protocol import OUT_HEADER, pack_header, pack_inval_inode

log = logging.getLogger("fsmount.mount")

SPLICED = 32 << 10  # bytes from which splicing is cheaper than copying
_PIPE = 2 << 20  # bytes: a request's pages, one partly used at each end, and the header's
_PLAIN_PIPE = 1 << 20  # what everybody may have
_PAGE = 4096
# Nobody waits for these: the reader was killed, the node is unknown, or the connection has ended.
_UNWANTED = (errno.ENOENT, errno.ENODEV, errno.ENOTCONN, errno.ECONNABORTED)


class _Pipe:
    """A pipe of one thread, whole pages in, whole pages out."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.capacity = 0
        for size in (_PIPE, _PLAIN_PIPE):
            try:
                self.capacity = fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, size)
                break
            except OSError:
                continue

    def holds(self, size: int) -> bool:
        """Whether an answer of `size` bytes fits for certain."""
        return size + 3 * _PAGE <= self.capacity

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


class Fetched(Protocol):
    """The bytes that a READ is answered with, all there. Exactly one of its methods is called.

    `send` says whether the kernel took them, as the methods of Sender do.
    """

    def send(self) -> bool: ...
    def drop(self) -> None: ...


class Sender:
    """Sends to a descriptor of /dev/fuse. Safe in any thread.

    What answers a request says whether the kernel took it: nobody may wait for it any more.
    """

    def __init__(self, device: int, *, splice: bool = True) -> None:
        self._device = device
        self._splice = splice
        self._own = threading.local()

    def body(self, unique: int, body: bytes) -> bool:
        """Answer a request."""
        return self._write([pack_header(unique, len(body)), body])

    def error(self, unique: int, code: int) -> bool:
        """Answer a request with an errno."""
        return self._write([pack_header(unique, 0, code)])

    def raw(self, message: bytes) -> None:
        """Send a whole message; OSError."""
        os.write(self._device, message)

    def drop_kept(self, node: int) -> None:
        """Have the kernel drop the attributes and pages of `node`; waits for who uses a page."""
        self._write([pack_inval_inode(node)])

    def fetch(self, unique: int, wanted: Range) -> Fetched:
        """Get what a READ is answered with; raises what reading raises.

        Must be sent or dropped by the thread that fetched it, before that fetches more.
        """
        spliced = self._into_pipe(unique, wanted)
        if spliced is not None:
            return spliced
        return _Copied(self, unique, wanted.file.handle.read(wanted.size, wanted.offset))

    def forget_thread(self) -> None:
        """Give back what is kept for the calling thread, which ends."""
        if getattr(self._own, "pipe", None) is not None:
            self.drop_pipe()

    def drop_pipe(self) -> None:
        """Throw away the calling thread's pipe and what is in it."""
        self._own.pipe.close()
        self._own.pipe = None

    def empty_pipe(self, pipe: _Pipe, size: int) -> bool:
        """Send the `size` bytes in the calling thread's pipe."""
        try:
            os.splice(pipe.reader, self._device, size)
        except OSError as error:
            self.drop_pipe()
            return _overlook(error)
        return True

    def _write(self, parts: list[bytes]) -> bool:
        try:
            os.writev(self._device, parts)
        except OSError as error:
            return _overlook(error)
        return True

    def _into_pipe(self, unique: int, wanted: Range) -> Fetched | None:
        """None where it is to be copied: too little, no file behind it, or something is wrong."""
        fd = wanted.file.handle.descriptor
        size = min(wanted.size, wanted.file.size - wanted.offset)
        if not self._splice or fd is None or size < SPLICED:
            return None
        try:
            pipe = self._pipe()
        except OSError:  # too many files are open
            return None
        if not pipe.holds(size):
            return None
        try:
            whole = _fill(pipe, pack_header(unique, size), fd, size, wanted.offset)
        except OSError:  # copying will tell what is wrong
            whole = False
        if not whole:
            self.drop_pipe()
            return None
        return _Spliced(self, pipe, OUT_HEADER.size + size)

    def _pipe(self) -> _Pipe:
        pipe: _Pipe | None = getattr(self._own, "pipe", None)
        if pipe is None:
            pipe = self._own.pipe = _Pipe()
        return pipe


@dataclass(frozen=True, slots=True)
class _Copied:
    sender: Sender
    unique: int
    data: bytes

    def send(self) -> bool:
        return self.sender.body(self.unique, self.data)

    def drop(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Spliced:
    sender: Sender
    pipe: _Pipe
    size: int

    def send(self) -> bool:
        return self.sender.empty_pipe(self.pipe, self.size)

    def drop(self) -> None:
        self.sender.drop_pipe()


def _fill(pipe: _Pipe, header: bytes, fd: int, size: int, offset: int) -> bool:
    """Put header and bytes into the pipe; False if the file ends before."""
    os.write(pipe.writer, header)
    done = 0
    while done < size:
        moved = os.splice(fd, pipe.writer, size - done, offset_src=offset + done)
        if not moved:
            return False
        done += moved
    return True


def _overlook(error: OSError) -> bool:
    """Log what is no reader's impatience; False."""
    if error.errno not in _UNWANTED:
        log.error("the kernel refused an answer: %s", error.strerror)
    return False
