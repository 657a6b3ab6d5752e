"""Serving a connection: one thread takes requests, and others when that one waits for the store.

What is in memory is answered at once by the thread that takes requests. So a directory can be
listed, and an unmount gets through, whatever hangs.

A request that was interrupted is answered with EINTR if it has not been done after a moment. Not
at once: the kernel interrupts for any signal, and few programs expect EINTR of a file; but a reader
of a file that hangs must be able to die.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import time
from collections.abc import Callable

from fsmount.mount.kernel.answers import Answers, Range, Request
from fsmount.mount.kernel.crew import STALL, Crew, EndOfWork
from fsmount.mount.kernel.protocol import (
    IN_HEADER,
    INTERRUPT_IN,
    SILENT,
    Opcode,
)
from fsmount.mount.kernel.sending import Sender
from fsmount.mount.kernel.suspects import BUFFER
from fsmount.mount.kernel.takeover import TakeOver
from fsmount.mount.kernel.turns import Turns
from fsmount.vfs.faults import errno_of

log = logging.getLogger("fsmount.mount")

GRACE = 0.3  # seconds that an interrupted request gets
_ENDED = (errno.ENODEV, errno.ECONNABORTED, errno.EBADF)
_AGAIN = (errno.EINTR, errno.EAGAIN, errno.ENOENT)


class Session:
    """Answers what comes from a descriptor of /dev/fuse, after INIT."""

    def __init__(self, device: int, answers: Answers, sender: Sender, taken_over: TakeOver) -> None:
        self._device = device
        self._answers = answers
        self._sender = sender
        self._crew: Crew[Request] = Crew(self._take, self._do, sender.forget_thread)
        self._waiting: dict[int, Request] = {}  # those that may wait, by number
        self._turns: Turns[Request] = Turns()
        self._taken_over = taken_over
        self._elsewhere = set(taken_over.tried)  # those that other processes answer
        self._interrupted: dict[int, float] = {}  # and when each is answered with EINTR
        self._poll = select.poll()
        self._poll.register(device, select.POLLIN)
        self._buffer = bytearray(BUFFER)
        self._view = memoryview(self._buffer)
        self._on_first: Callable[[], None] | None = None

    def run(self, started: Callable[[], None], answered: Callable[[], None]) -> None:
        """Serve until unmounted; `started` is called when requests are taken, `answered` when the
        first one was answered.
        """
        self._on_first = answered
        for message in self._taken_over.fresh:
            self._buffer[: len(message)] = message
            work = self._dispatch(len(message))
            if work is not None:
                self._crew.add(work)
        self._crew.run(started)

    def _take(self, waiting: bool) -> Request | None:
        """Take a request; answer it, or return it if that may wait."""
        if self._interrupted or waiting:
            self._answer_interrupted()
            if not self._poll.poll(STALL * 1000):
                return None
        try:
            length = os.readv(self._device, [self._buffer])
        except OSError as error:
            if error.errno in _ENDED:
                raise EndOfWork from None
            if error.errno in _AGAIN:
                return None
            raise
        return self._dispatch(length)

    def _dispatch(self, length: int) -> Request | None:
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(self._buffer)
        request = Request(opcode, unique, node, self._view[IN_HEADER.size : length])
        if opcode in SILENT:
            return None
        if opcode == Opcode.INTERRUPT:
            self._interrupt(INTERRUPT_IN.unpack_from(request.body)[0])
            return None
        if self._taken_over.refused and self._taken_over.refuses(request):
            self._sender.error(unique, errno.EIO)
            return None
        if self._answers.may_wait(request):
            kept = Request(opcode, unique, node, bytes(request.body))
            self._waiting[unique] = kept
            return kept if self._turns.enter(node, kept) else None
        self._answer_now(request)
        return None

    def _answer_now(self, request: Request) -> None:
        answer(self._answers, self._sender, request)
        self._note_answer()

    def _do(self, request: Request) -> None:
        """Answer what may wait, and what waits for its turn at the same node."""
        following: Request | None = request
        while following is not None:
            if following.unique in self._waiting:  # nobody has lost patience
                self._do_one(following)
            following = self._turns.leave(request.node)

    def _do_one(self, request: Request) -> None:
        try:
            found = self._answers.answer(request)
            if isinstance(found, Range):
                self._read(request, found)
            elif self._claim(request):
                self._sender.body(request.unique, found)
            else:
                self._answers.undo(request)
        except BaseException as error:  # noqa: BLE001 - every failure is an errno
            if self._claim(request):
                self._sender.error(request.unique, errno_of(error, doing(request)))
        self._note_answer()

    def _note_answer(self) -> None:
        first, self._on_first = self._on_first, None
        if first is not None:
            first()

    def _read(self, request: Request, wanted: Range) -> None:
        data = self._sender.fetch(request.unique, wanted)
        if self._claim(request):
            data.send()
        else:
            data.drop()

    def _claim(self, request: Request) -> bool:
        """Whether the request is still to be answered; then nobody else does."""
        return self._waiting.pop(request.unique, None) is not None

    def _interrupt(self, unique: int) -> None:
        if unique in self._waiting or unique in self._elsewhere:
            self._interrupted[unique] = time.monotonic() + GRACE

    def _answer_interrupted(self) -> None:
        if not self._interrupted:
            return
        now = time.monotonic()
        for unique, due in list(self._interrupted.items()):
            elsewhere = unique in self._elsewhere
            if unique not in self._waiting and not elsewhere:
                del self._interrupted[unique]
            elif now >= due:
                del self._interrupted[unique]
                self._elsewhere.discard(unique)
                if self._waiting.pop(unique, None) is not None or elsewhere:
                    self._sender.error(unique, errno.EINTR)


def answer(answers: Answers, sender: Sender, request: Request) -> bool:
    """Do a request and answer it, whatever it raises; whether the kernel took the answer."""
    try:
        found = answers.answer(request)
        if isinstance(found, Range):
            return sender.fetch(request.unique, found).send()
        return sender.body(request.unique, found)
    except BaseException as error:  # noqa: BLE001 - every failure is an errno
        return sender.error(request.unique, errno_of(error, doing(request)))


def doing(request: Request) -> str:
    """What a request asks, for people."""
    name = Opcode(request.opcode).name.lower() if request.opcode in set(Opcode) else "request"
    return f"{name} of node {request.node}"
