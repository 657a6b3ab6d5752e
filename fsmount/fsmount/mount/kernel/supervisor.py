"""The process that a mount lives as long as: it holds the kernel's descriptor, and servers.

It mounts, agrees with the kernel on the protocol, and forks servers, which inherit all that it
knows: the mapped path list, what was agreed, and how each open node is read. It imports little and
does little, so that it does not die. A server that dies is replaced, whatever killed it, and the
kernel sends the successor what was left unanswered.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from fsmount.errors import FsmountError, MountError
from fsmount.mount.kernel import device as devices
from fsmount.mount.kernel import link, protocol
from fsmount.mount.kernel.backing import BackingIds, OpenNodes
from fsmount.mount.kernel.config import Config
from fsmount.mount.kernel.device import MountOptions
from fsmount.mount.kernel.link import Message
from fsmount.mount.kernel.negotiate import REQUEST, Features, missed, negotiate
from fsmount.mount.kernel.server import Make, serve

log = logging.getLogger("fsmount.mount")

GIVE_UP = 8  # servers in a row that died before they had answered a request
_BACK_OFF = 0.05  # seconds after the second of them, then twice as much each
_LONGEST_BACK_OFF = 2.0
_IDLE_SECONDS = 10.0
_INIT_SECONDS = 20.0
_UNMOUNT_SECONDS = 5.0


@dataclass(slots=True)
class _Server:
    pid: int
    pidfd: int
    socket: socket.socket
    born: float  # by the monotonic clock
    alone: mmap.mmap  # one byte that it shares: 1 when it has given up its supervisor
    listening: bool = True
    answered: bool = False


@dataclass(slots=True)
class _Leaving:
    """An attempt to unmount."""

    pid: int
    pidfd: int
    detach: bool
    deadline: float

    def reap(self) -> int:
        """Wait for it; 0 or an errno."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(status)


class Supervisor:
    """One mount from the first to the last server."""

    def __init__(
        self,
        config: Config,
        make: Make,
        on_tick: Callable[[], None],
        tick: float,
        on_server: Callable[[int], None] = lambda pid: None,
    ) -> None:
        """`make` is called in each server; `on_tick` every `tick` seconds, `on_server` with the pid
        of each server.
        """
        self._config = config
        self._make = make
        self._on_tick = on_tick
        self._tick = tick
        self._on_server = on_server
        self._next_tick = time.monotonic() + tick
        self._signals = 0
        self._fruitless = 0
        self._device = -1
        self._features: Features | None = None
        self._nodes: OpenNodes | None = None
        self._server: _Server | None = None
        self._started: Callable[[], None] | None = None
        self._leaving: _Leaving | None = None
        self._left = False  # the mount is off its mountpoint
        self._ending = False

    def mount(self) -> Features:
        """Mount and agree on the protocol; MountError."""
        config = self._config
        options = MountOptions(config.source, config.mountpoint, config.allow_other, REQUEST)
        self._device = devices.open_and_mount(options)
        self._config = replace(config, number=devices.number_of(config.mountpoint))
        try:
            self._features = self._agree()
        except BaseException:
            self._unmount(detach=True).reap()
            os.close(self._device)
            raise
        ids = BackingIds(self._device)
        self._nodes = OpenNodes(ids.register, ids.close)
        for what in missed(self._features, passthrough=config.passthrough):
            log.info("%s: this kernel does without %s", config.mountpoint, what)
        if devices.passed_descriptor(config.mountpoint) is None:
            reason = devices.raise_read_ahead(self._config.number, self._features.request)
            if reason is not None:
                log.info("%s: reads ahead 128 KiB only: %s", config.mountpoint, reason)
        return self._features

    def run(self, started: Callable[[], None]) -> None:
        """Serve until unmounted. `started` is called once, when a server takes requests.

        Raises MountError when it gives up, or when what is to be served can't be; then the mount
        is gone as well.
        """
        self._started = started
        wakeup_reader, wakeup_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wakeup_writer)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        self._start(successor=False)
        while self._server is not None:
            self._watch(wakeup_reader)
        os.close(self._device)
        if self._leaving is not None:
            self._leaving.reap()

    def _on_signal(self, number: int, frame: object) -> None:
        del number, frame
        self._signals += 1

    def _agree(self) -> Features:
        poll = select.poll()
        poll.register(self._device, select.POLLIN)
        if not poll.poll(_INIT_SECONDS * 1000):
            raise MountError("the kernel does not begin to speak")
        data = memoryview(os.read(self._device, protocol.MIN_READ_BUFFER))
        _, opcode, unique, *_ = protocol.IN_HEADER.unpack_from(data)
        if opcode != protocol.Opcode.INIT:
            raise MountError("the descriptor was used by another server before")
        offer = protocol.parse_init(data[protocol.IN_HEADER.size :])
        answer, features = negotiate(offer, passthrough=self._config.passthrough)
        body = protocol.pack_init(answer)
        os.write(self._device, protocol.pack_header(unique, len(body)) + body)
        return features

    # Servers.

    def _start(self, *, successor: bool) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        alone = mmap.mmap(-1, 1)
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._be_server(theirs, alone, successor=successor)
        theirs.close()
        self._server = _Server(pid, os.pidfd_open(pid), ours, time.monotonic(), alone)
        log.info("%s: served by process %d", self._config.mountpoint, pid)
        self._on_server(pid)

    def _be_server(
        self, to_supervisor: socket.socket, alone: mmap.mmap, *, successor: bool
    ) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            assert self._features is not None  # noqa: S101 - mounted before
            assert self._nodes is not None  # noqa: S101
            serve(
                self._device,
                to_supervisor,
                self._nodes,
                self._features,
                config=self._config,
                make=self._make,
                successor=successor,
                on_alone=lambda: alone.__setitem__(0, 1),
            )
            code = 0
        except FsmountError as error:
            log.error("%s: %s", self._config.mountpoint, error)
        except BaseException:
            log.exception("%s: the server failed", self._config.mountpoint)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _watch(self, wakeup: int) -> None:
        """Wait for something to happen and see to it."""
        server = self._server
        assert server is not None  # noqa: S101
        poll = select.poll()
        talk = server.socket.fileno()
        watched = [server.pidfd, wakeup, *([talk] if server.listening else [])]
        for fd in (*watched, *([] if self._leaving is None else [self._leaving.pidfd])):
            poll.register(fd, select.POLLIN)
        found = dict(poll.poll(self._tick * 1000 if self._leaving is None else 1000))
        if wakeup in found:
            os.read(wakeup, 4096)
        if talk in found:
            self._listen(server)
        if server.pidfd in found:
            self._bury(server)
        elif self._leaving is not None:
            self._see_off(self._leaving, server)
        if self._signals and self._server is not None:
            self._end(self._server)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + self._tick
            self._on_tick()

    def _listen(self, server: _Server) -> None:
        assert self._nodes is not None  # noqa: S101
        said = link.serve_one(server.socket, self._nodes)
        if said is None:
            server.listening = False
        elif said.what is Message.SERVING:
            server.answered = True
        elif said.what is Message.READY and self._started is not None:
            self._started()
            self._started = None
        elif said.what is Message.FAILED and self._started is not None:
            self._give_up(said.text)

    def _bury(self, server: _Server) -> None:
        while server.listening and select.select([server.socket], [], [], 0)[0]:
            self._listen(server)  # what it said last counts
        _, status = os.waitpid(server.pid, 0)
        os.close(server.pidfd)
        server.socket.close()
        if server.alone[0] and self._nodes is not None:  # it did not tell what it opened
            self._nodes.forget()
        server.alone.close()
        self._server = None
        if self._ending or self._disconnected():
            return
        how = _how(status)
        idle = time.monotonic() - server.born > _IDLE_SECONDS  # nobody asked it anything
        self._fruitless = 0 if server.answered or idle else self._fruitless + 1
        log.warning("%s: server %d %s; replacing it", self._config.mountpoint, server.pid, how)
        if self._fruitless >= GIVE_UP:
            self._give_up(
                f"{self._config.mountpoint}: {GIVE_UP} servers in a row died before they had "
                f"answered a request (the last one {how}); given up, and the mount is taken off"
            )
        if self._fruitless > 1:
            time.sleep(min(_LONGEST_BACK_OFF, _BACK_OFF * 2 ** (self._fruitless - 2)))
        self._start(successor=True)

    def _give_up(self, reason: str) -> NoReturn:
        self._unmount(detach=True).reap()
        os.close(self._device)
        raise MountError(reason)

    # The end.

    def _end(self, server: _Server) -> None:
        """Somebody wants an end. Who uses the mount may go on until a second wish."""
        wishes, self._signals = self._signals, 0
        passed = devices.passed_descriptor(self._config.mountpoint) is not None
        if passed or wishes > 1 or self._left or self._leaving is not None:
            self._abort(server)
        else:
            self._leaving = self._unmount(detach=False)

    def _see_off(self, leaving: _Leaving, server: _Server) -> None:
        """The attempt to unmount has ended, or takes too long."""
        if not select.select([leaving.pidfd], [], [], 0)[0]:
            if time.monotonic() > leaving.deadline:
                log.error("%s: the kernel does not unmount it", self._config.mountpoint)
                self._abort(server)
            return
        code = leaving.reap()
        if code == errno.EBUSY and not leaving.detach:
            log.warning("%s is in use: detached, served until it is not", self._config.mountpoint)
            self._leaving = self._unmount(detach=True)
        elif code:
            log.error("can't unmount %s: %s", self._config.mountpoint, os.strerror(code))
            self._leaving = None
        else:
            self._leaving, self._left = None, True

    def _abort(self, server: _Server) -> None:
        """End it whoever uses it: with the last descriptor the kernel ends the connection."""
        log.error("%s: the connection is ended", self._config.mountpoint)
        self._ending = True
        os.kill(server.pid, signal.SIGKILL)

    def _unmount(self, *, detach: bool) -> _Leaving:
        """Unmount in a process of its own, since the kernel may take any time."""
        pid = os.fork()
        if pid == 0:
            code = errno.EIO
            try:
                os.close(self._device)  # or the connection could not be ended while this waits
                config = self._config
                code = devices.unmount(config.mountpoint, detach=detach, number=config.number)
            finally:
                os._exit(code)
        return _Leaving(pid, os.pidfd_open(pid), detach, time.monotonic() + _UNMOUNT_SECONDS)

    def _disconnected(self) -> bool:
        poll = select.poll()
        poll.register(self._device, 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
