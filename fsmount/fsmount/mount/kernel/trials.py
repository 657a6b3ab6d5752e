"""The supervisor's side of trials: which suspects are tried where, and what is found guilty.

A request that was in work when a server died is done again in a process of its own. Where that
ends well, something else had killed the server. Where that process dies as well, the request is
answered EIO, and for a while all of its kind are, before they can kill a server.
"""

from __future__ import annotations

import errno
import logging
import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fsmount.mount.kernel.answers import Request
from fsmount.mount.kernel.children import Child
from fsmount.mount.kernel.link import Message, Said
from fsmount.mount.kernel.protocol import IN_HEADER, Opcode
from fsmount.mount.kernel.sending import Sender
from fsmount.mount.kernel.session import doing
from fsmount.mount.kernel.takeover import Kind, Refused, is_refused, kind_of

log = logging.getLogger("fsmount.mount")

FEW, MOST = 2, 128  # processes at once: while requests get done soon, and where they take long
STALL = 0.1  # seconds that suspects wait before one more process is started for them
REFUSED_SECONDS = 60.0  # that requests like one that killed are refused at once
_AGAIN_SECONDS = 1.0  # after a process that could not begin
_ATTEMPTS = 3  # to have the kernel take an answer
# Tried at once. The others are done in memory, mostly; the next server does them, once.
_HEAVY = frozenset({Opcode.OPEN, Opcode.READ})


@dataclass(slots=True)
class _Suspect:
    message: bytes
    attempts: int = 0

    @property
    def request(self) -> Request:
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(self.message)
        return Request(opcode, unique, node, self.message[IN_HEADER.size :])


@dataclass(slots=True)
class _Trial:
    child: Child
    begun: bool = False  # it has asked for a suspect
    suspect: _Suspect | None = None  # what it does now
    path: str = ""  # that this is about, if it is known


class Trials:
    """All trials of a mount. Not safe for two threads."""

    def __init__(
        self,
        mountpoint: str,
        sender: Sender,
        fork: Callable[[], Child],
        listen: Callable[[Child], Said | None],
        buried: Callable[[Child], str],
    ) -> None:
        """`fork` starts a process that tries (OSError), `listen` hears what it says, `buried` says
        how it ended.
        """
        self._mountpoint = mountpoint
        self._sender = sender
        self._fork = fork
        self._listen = listen
        self._buried = buried
        self._queue: deque[_Suspect] = deque()
        self._known: set[int] = set()  # numbers of suspects that are not done
        self._trials: dict[int, _Trial] = {}  # by pid
        self._given: set[int] = set()  # numbers of those that the last server got
        self._refused: dict[Kind, float] = {}
        self._not_before = 0.0  # a process is started; by the monotonic clock
        self._stalled = 0.0  # when suspects have waited for too long

    @property
    def tried(self) -> frozenset[int]:
        """The numbers of requests that are answered here."""
        return frozenset(self._known)

    @property
    def refused(self) -> Refused:
        """What is refused now, and until when."""
        now = time.monotonic()
        self._refused = {kind: until for kind, until in self._refused.items() if until > now}
        return self._refused

    @property
    def waiting(self) -> int:
        """How many requests are not done."""
        return len(self._known)

    @property
    def children(self) -> list[Child]:
        return [trial.child for trial in self._trials.values()]

    @property
    def patience(self) -> float | None:
        """Seconds after which `see` wants to be called, whatever happens."""
        return STALL if self._queue else None

    def add(self, messages: Iterable[bytes]) -> list[bytes]:
        """Have requests tried; those that the next server is to do.

        Those that are being tried are sent again too, and stay where they are.
        """
        given = []
        for suspect in map(_Suspect, messages):
            request = suspect.request
            if is_refused(self._refused, request):
                self._sender.error(request.unique, errno.EIO)
            elif request.unique in self._known:
                continue
            elif request.opcode not in _HEAVY and request.unique not in self._given:
                given.append(suspect)
            else:
                self._known.add(request.unique)
                self._queue.append(suspect)
        self._given = {suspect.request.unique for suspect in given}
        return [suspect.message for suspect in given]

    def see(self, readable: Iterable[int]) -> None:
        """See to children with readable descriptors, and start what is needed."""
        found = set(readable)
        for trial in list(self._trials.values()):
            if trial.child.listening and trial.child.socket.fileno() in found:
                self._hear(trial)
            if trial.child.pidfd in found:
                self._bury(trial)
        self._grow()

    def _hear(self, trial: _Trial) -> None:
        said = self._listen(trial.child)
        if said is not None and said.what is Message.NAMED:
            trial.path = said.text
        if said is None or said.what is not Message.NEXT:
            return
        trial.begun = True
        done, trial.suspect, trial.path = trial.suspect, None, ""
        if done is not None:
            self._done(done, taken=bool(said.node))
        if self._queue:
            trial.suspect = self._queue.popleft()
            self._stalled = time.monotonic() + STALL
        self._hand(trial)

    def _hand(self, trial: _Trial) -> None:
        try:
            trial.child.socket.send(b"" if trial.suspect is None else trial.suspect.message)
        except OSError:  # it died in between
            if trial.suspect is not None:
                self._queue.appendleft(trial.suspect)
                trial.suspect = None

    def _done(self, suspect: _Suspect, *, taken: bool) -> None:
        suspect.attempts += 1
        if taken or suspect.attempts >= _ATTEMPTS:
            self._known.discard(suspect.request.unique)
        else:  # it was just then sent again; or nobody waits for it
            self._queue.append(suspect)

    def _bury(self, trial: _Trial) -> None:
        while trial.child.listening and select.select([trial.child.socket], [], [], 0)[0]:
            self._hear(trial)  # what it said last counts
        del self._trials[trial.child.pid]
        how = self._buried(trial.child)
        if trial.suspect is not None:
            self._condemn(trial.suspect, trial, how)
        elif not trial.begun:
            log.error("%s: a process for a trial %s", self._mountpoint, how)
            self._not_before = time.monotonic() + _AGAIN_SECONDS

    def _condemn(self, suspect: _Suspect, trial: _Trial, how: str) -> None:
        request = suspect.request
        log.error(
            "%s/%s: %s was in work when a server died, and done alone in process %d, which %s; it "
            "is answered EIO, and so is what asks the same in the next %.0f s",
            self._mountpoint,
            trial.path,
            doing(request),
            trial.child.pid,
            how,
            REFUSED_SECONDS,
        )
        self._known.discard(request.unique)
        self._refused[kind_of(request)] = time.monotonic() + REFUSED_SECONDS
        self._sender.error(request.unique, errno.EIO)

    def _grow(self) -> None:
        """Start processes if there are few, or one more if suspects have waited for too long."""
        now = time.monotonic()
        starting = sum(not trial.begun for trial in self._trials.values())
        while self._queue and starting < len(self._queue) and now >= self._not_before:
            count = len(self._trials)
            if count >= MOST or (count >= FEW and now < self._stalled):
                return
            try:
                child = self._fork()
            except OSError as error:
                log.error("%s: no process for a trial: %s", self._mountpoint, error)
                self._not_before = now + _AGAIN_SECONDS
                return
            self._trials[child.pid] = _Trial(child)
            self._stalled = now + STALL
            starting += 1
