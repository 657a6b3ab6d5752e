"""What server and supervisor say to each other, over a socket that keeps messages whole.

The supervisor registers backing files, since it outlives the server: what it knows is right
whichever moment a server dies in. A server keeps a copy, and goes on alone when the supervisor is
gone.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from fsmount.mount.kernel.backing import OpenNodes

log = logging.getLogger("fsmount.mount")

_MESSAGE = Struct("=BQQQ")  # what, node, opener, device of the file that was opened
_REPLY = Struct("=i")  # backing id
_TEXT = 4096  # bytes of a reason
_REQUEST = 64 << 10  # bytes of a request of the kernel
_SECONDS = 10.0  # after which a supervisor that says nothing is taken for gone


class Message(IntEnum):
    """What a server tells its supervisor."""

    READY = 1  # the file system is made
    SERVING = 2  # a request was answered
    OPENED = 3  # comes with a descriptor and wants a reply
    RELEASED = 4
    FAILED = 5  # the process ends; the reason follows
    NEXT = 6  # it wants a request to try; node: whether the last one's answer was taken
    NAMED = 7  # the path that it is about follows


def say(supervisor: socket.socket, what: Message, text: str) -> None:
    """Tell a supervisor, if it listens, what does not concern a node."""
    with suppress(OSError):
        supervisor.send(_pack(what, text))


def _pack(what: Message, text: str) -> bytes:
    return _MESSAGE.pack(what, 0, 0, 0) + text.encode(errors="replace")[:_TEXT]


class Supervised:
    """A server's side: OpenNodes that live in the supervisor. Safe in any thread."""

    def __init__(self, supervisor: socket.socket, nodes: OpenNodes, on_alone: Callable[[], None]):
        """`nodes` is the supervisor's state when this server began; `on_alone` is called once,
        when the supervisor is found to be gone, and must return quickly.
        """
        supervisor.settimeout(_SECONDS)
        self._socket: socket.socket | None = supervisor
        self._nodes = nodes
        self._on_alone = on_alone
        self._lock = threading.Lock()

    @property
    def alone(self) -> bool:
        """Whether the supervisor is known to be gone."""
        return self._socket is None

    def say(self, what: Message, text: str = "") -> None:
        """Tell what does not concern a node."""
        with self._lock:
            self._tell(_pack(what, text))

    def lose(self) -> None:
        """The supervisor has ended."""
        with self._lock:
            self._lose()

    def next(self, *, taken: bool) -> bytes:
        """The request that is to be tried next, b"" if there is none. `taken`: whether the kernel
        has taken the last one's answer.
        """
        if self._socket is None:
            return b""
        try:
            self._socket.send(_MESSAGE.pack(Message.NEXT, taken, 0, 0))
            return self._socket.recv(_REQUEST)
        except OSError:
            return b""

    def open(self, node: int, opener: int, fd: int, device: int) -> int:
        """As OpenNodes.open."""
        with self._lock:
            backing_id = self._ask(_MESSAGE.pack(Message.OPENED, node, opener, device), fd)
            if backing_id is None:
                return self._nodes.open(node, opener, fd, device)
            return self._nodes.put(node, opener, backing_id)

    def release(self, node: int, opener: int) -> None:
        """As OpenNodes.release."""
        with self._lock:
            if self._tell(_MESSAGE.pack(Message.RELEASED, node, opener, 0)):
                self._nodes.drop(node, opener)
            else:
                self._nodes.release(node, opener)

    def _ask(self, message: bytes, fd: int) -> int | None:
        if self._socket is None:
            return None
        try:
            socket.send_fds(self._socket, [message], [fd])
            reply = self._socket.recv(_REPLY.size)
        except OSError:
            reply = b""
        if len(reply) == _REPLY.size:
            return int(_REPLY.unpack(reply)[0])
        self._lose()
        return None

    def _tell(self, message: bytes) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(message)
        except OSError:
            self._lose()
            return False
        return True

    def _lose(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            log.error("the supervisor is gone; this server goes on, but nobody replaces it")
            self._on_alone()


@dataclass(frozen=True, slots=True)
class Said:
    """A message that the supervisor got."""

    what: Message
    node: int
    text: str


def serve_one(server: socket.socket, nodes: OpenNodes) -> Said | None:
    """The supervisor's side: take one message and do what it says; None at the server's end."""
    data, fd = _receive(server)
    try:
        if len(data) < _MESSAGE.size:
            return None
        what, node, opener, device = _MESSAGE.unpack_from(data)
        if what == Message.OPENED and fd is not None:
            server.send(_REPLY.pack(nodes.open(node, opener, fd, device)))
        elif what == Message.RELEASED:
            nodes.release(node, opener)
        return Said(Message(what), node, data[_MESSAGE.size :].decode(errors="replace"))
    except OSError:  # it died in between
        return None
    finally:
        if fd is not None:
            os.close(fd)


def _receive(server: socket.socket) -> tuple[bytes, int | None]:
    fds = array.array("i")
    try:
        data, ancillary, _, _ = server.recvmsg(
            _MESSAGE.size + _TEXT, socket.CMSG_SPACE(fds.itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except OSError:
        return b"", None
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    return data, fds[0] if fds else None
