"""The process that a mount lives as long as: it holds the kernel's descriptor, and servers.

It mounts, agrees with the kernel on the protocol, and forks servers, which inherit all that it
knows: the mapped path list, what was agreed, and how each open node is read. It imports little and
does little, so that it does not die. A server that dies is replaced, whatever killed it; what it
had taken and not answered is done by processes of their own (see `trials`).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NoReturn

from fsmount.errors import MountError
from fsmount.mount.kernel import device as devices
from fsmount.mount.kernel import link, protocol
from fsmount.mount.kernel.backing import BackingIds, OpenNodes
from fsmount.mount.kernel.children import Child, fork
from fsmount.mount.kernel.config import Config
from fsmount.mount.kernel.device import MountOptions
from fsmount.mount.kernel.leaving import Leaving
from fsmount.mount.kernel.link import Message, Said
from fsmount.mount.kernel.negotiate import REQUEST, Features, missed, negotiate
from fsmount.mount.kernel.sending import Sender
from fsmount.mount.kernel.server import Make, serve
from fsmount.mount.kernel.suspects import Left, collect
from fsmount.mount.kernel.takeover import TakeOver
from fsmount.mount.kernel.trial import try_suspects
from fsmount.mount.kernel.trials import Trials
from fsmount.mount.mountinfo import mount_at

log = logging.getLogger("fsmount.mount")

GIVE_UP = 3  # servers in a row that died before the mount has ever served
_BACK_OFF = 0.05  # seconds after the second that died of nothing, then twice as much each
_LONGEST_BACK_OFF = 2.0
_IDLE_SECONDS = 10.0
_INIT_SECONDS = 20.0


class Supervisor:
    """One mount from the first to the last server."""

    def __init__(
        self,
        config: Config,
        make: Make,
        on_tick: Callable[[], None],
        tick: float,
        *,
        on_server: Callable[[int], None] = lambda pid: None,
        on_ready: Callable[[], object] = lambda: None,
    ) -> None:
        """`make` is called in each server; `on_tick` every `tick` seconds, `on_server` with the pid
        of each server, `on_ready` in each server when it serves.
        """
        self._config = config
        self._make = make
        self._on_tick = on_tick
        self._tick = tick
        self._on_server = on_server
        self._on_ready = on_ready
        self._next_tick = time.monotonic() + tick
        self._signals = 0
        self._fruitless = 0  # servers in a row that died of nothing that was asked
        self._next_start = 0.0  # of a server, by the monotonic clock
        self._device = -1
        self._me = os.pidfd_open(os.getpid())  # from which its servers see that it has ended
        self._features: Features | None = None
        self._nodes: OpenNodes | None = None
        self._server: Child | None = None
        self._trials: Trials | None = None
        self._fresh: list[bytes] = []  # requests for the next server
        self._closed: list[int] = []  # descriptors that no child keeps
        self._served = False
        self._started: Callable[[], None] | None = None
        self._leaving: Leaving | None = None
        self._ending = False
        self._over = False

    def mount(self) -> Features:
        """Mount and agree on the protocol; MountError."""
        config = self._config
        options = MountOptions(config.source, config.mountpoint, config.allow_other, REQUEST)
        self._device = devices.open_and_mount(options)
        self._config = replace(config, mounted=mount_at(config.mountpoint))
        self._leaving = Leaving(self._config, self._device)
        try:
            self._features = self._agree()
        except BaseException:
            self._leaving.detach()
            os.close(self._device)
            raise
        ids = BackingIds(self._device)
        self._nodes = OpenNodes(ids.register, ids.close)
        for what in missed(self._features, passthrough=config.passthrough):
            log.info("%s: this kernel does without %s", config.mountpoint, what)
        if devices.passed_descriptor(config.mountpoint) is None:
            reason = devices.raise_read_ahead(self._config.mounted, self._features.request)
            if reason is not None:
                log.info("%s: reads ahead 128 KiB only: %s", config.mountpoint, reason)
        return self._features

    def run(self, started: Callable[[], None], closed: Iterable[int] = ()) -> None:
        """Serve until unmounted. `started` is called once, when a server takes requests; `closed`
        are descriptors that only this process is to keep.

        Raises MountError when no server begins, or when what is to be served can't be; then the
        mount is gone as well.
        """
        self._started = started
        self._closed = list(closed)
        self._trials = Trials(
            self._config.mountpoint, Sender(self._device), self._fork_trial, self._hear, self._reap
        )
        wakeup_reader, wakeup_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wakeup_writer)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)
        while not self._over:
            if self._server is None and time.monotonic() >= self._next_start:
                self._start()
            self._watch(wakeup_reader)
        self._end_trials()
        os.close(self._device)
        self._away.finish()

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

    def _start(self) -> None:
        """Start a server; where that can't be, later."""
        try:
            server = fork(self._config.mountpoint, self._serve, self._children_close())
        except OSError as error:
            log.error("%s: can't start a server: %s", self._config.mountpoint, error)
            self._note_fruitless(f"can't be started: {error}")
            return
        self._server, self._served, self._fresh = server, True, []
        log.info("%s: served by process %d", self._config.mountpoint, server.pid)
        self._on_server(server.pid)

    def _serve(self, supervisor: socket.socket, on_alone: Callable[[], None]) -> None:
        assert self._trials is not None  # noqa: S101 - made before
        taken_over = TakeOver(
            self._served, tuple(self._fresh), self._trials.tried, self._trials.refused
        )
        serve(
            self._device,
            supervisor,
            self._open_nodes,
            self._agreed,
            config=self._config,
            make=self._make,
            taken_over=taken_over,
            parent=self._me,
            on_alone=on_alone,
            on_ready=self._on_ready,
        )

    def _fork_trial(self) -> Child:
        return fork(self._config.mountpoint, self._try, self._children_close())

    def _try(self, supervisor: socket.socket, on_alone: Callable[[], None]) -> None:
        try_suspects(
            self._device,
            supervisor,
            self._open_nodes,
            self._agreed,
            config=self._config,
            make=self._make,
            on_alone=on_alone,
        )

    @property
    def _open_nodes(self) -> OpenNodes:
        assert self._nodes is not None  # noqa: S101 - mounted before
        return self._nodes

    @property
    def _agreed(self) -> Features:
        assert self._features is not None  # noqa: S101 - mounted before
        return self._features

    @property
    def _away(self) -> Leaving:
        assert self._leaving is not None  # noqa: S101 - mounted before
        return self._leaving

    def _children(self) -> list[Child]:
        servers = [] if self._server is None else [self._server]
        return servers if self._trials is None else [*servers, *self._trials.children]

    def _children_close(self) -> list[int]:
        return [*self._closed, *(child.socket.fileno() for child in self._children())]

    def _watch(self, wakeup: int) -> None:
        """Wait for something to happen and see to it."""
        assert self._trials is not None  # noqa: S101
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        for fd in [fd for child in self._children() for fd in child.descriptors]:
            poll.register(fd, select.POLLIN)
        for fd in self._away.descriptors:
            poll.register(fd, select.POLLIN)
        found = {fd for fd, _ in poll.poll(self._patience() * 1000)}
        if wakeup in found:
            os.read(wakeup, 4096)
        server = self._server
        if server is not None and server.listening and server.socket.fileno() in found:
            self._hear(server)
        if server is not None and server.pidfd in found:
            self._bury(server)
        elif self._away.see():
            self._abort()
        self._trials.see(found)
        if self._signals and not self._over:
            wishes, self._signals = self._signals, 0
            if self._away.ask(wishes):
                self._abort()
        if self._server is None and not self._over:
            self._over = self._disconnected()
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + self._tick
            self._on_tick()

    def _patience(self) -> float:
        """Seconds that nothing needs to be done for."""
        assert self._trials is not None  # noqa: S101
        times = [self._tick]
        if self._away.descriptors:
            times.append(1.0)
        if self._trials.patience is not None:
            times.append(self._trials.patience)
        if self._server is None:
            times.append(max(0.0, self._next_start - time.monotonic()))
        return min(times)

    def _hear(self, child: Child) -> Said | None:
        """Take a message of a child and do what it says."""
        said = link.serve_one(child.socket, self._open_nodes)
        if said is None:
            child.listening = False
        elif said.what is Message.SERVING:
            child.answered = True
        elif said.what is Message.READY and self._started is not None:
            self._started()
            self._started = None
            self._closed = []
        elif said.what is Message.FAILED and self._started is not None:
            self._give_up(said.text)
        return said

    def _reap(self, child: Child) -> str:
        """How a child ended, all of whose messages were heard."""
        how = child.reap()
        if child.alone[0]:  # it did not tell what it opened
            self._open_nodes.forget()
        child.alone.close()
        return how

    def _bury(self, server: Child) -> None:
        while server.listening and select.select([server.socket], [], [], 0)[0]:
            self._hear(server)  # what it said last counts
        how = self._reap(server)
        self._server = None
        if self._ending or self._disconnected():
            self._over = True
            return
        left = collect(self._device) if self._agreed.resend else Left()
        assert self._trials is not None  # noqa: S101
        self._fresh += [*self._trials.add(left.suspects), *left.fresh]
        log.warning(
            "%s: server %d %s; replacing it; requests that are done alone now: %d",
            self._config.mountpoint,
            server.pid,
            how,
            self._trials.waiting,
        )
        idle = time.monotonic() - server.born > _IDLE_SECONDS  # nobody asked it anything
        if server.answered or idle or left.suspects:
            self._fruitless = 0
        else:
            self._note_fruitless(how)

    def _note_fruitless(self, how: str) -> None:
        """A server has ended before it did anything. Once it has served, a mount is never given up:
        what kills servers may end, and whoever reads waits.
        """
        self._fruitless += 1
        if self._started is not None and self._fruitless >= GIVE_UP:
            self._give_up(
                f"{self._config.mountpoint}: {GIVE_UP} servers in a row ended before they served "
                f"(the last one {how}); the mount is taken off"
            )
        if self._fruitless > 1:
            wait = min(_LONGEST_BACK_OFF, _BACK_OFF * 2 ** min(self._fruitless - 2, 10))
            self._next_start = time.monotonic() + wait

    def _give_up(self, reason: str) -> NoReturn:
        self._away.detach()
        self._end_trials()
        os.close(self._device)
        raise MountError(reason)

    # The end.

    def _abort(self) -> None:
        """End it whoever uses it: with the last descriptor the kernel ends the connection."""
        log.error("%s: the connection is ended", self._config.mountpoint)
        self._ending = True
        if self._server is None:
            self._over = True
        else:
            os.kill(self._server.pid, signal.SIGKILL)

    def _end_trials(self) -> None:
        for child in self._children():
            os.kill(child.pid, signal.SIGKILL)

    def _disconnected(self) -> bool:
        poll = select.poll()
        poll.register(self._device, 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
