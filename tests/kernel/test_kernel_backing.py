"""Which open files are read by the kernel itself, as rules and in supervisor and server."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fsmount.mount.kernel.backing import CACHED, OpenNodes
from fsmount.mount.kernel.link import Message, Said, Supervised, serve_one


class Register:
    """A kernel's backing ids, strict: an id is closed once."""

    def __init__(self, failure: int = 0) -> None:
        self.failure = failure
        self.live: set[int] = set()
        self.asked = 0

    def register(self, fd: int) -> int:
        os.fstat(fd)
        self.asked += 1
        if self.failure:
            raise OSError(self.failure, os.strerror(self.failure))
        self.live.add(self.asked)
        return self.asked

    def close(self, backing_id: int) -> None:
        self.live.remove(backing_id)


class OpenNodesRules(RuleBasedStateMachine):
    """Against a model: a node's openers and the id that the first of them got."""

    def __init__(self) -> None:
        super().__init__()
        self.fd = os.open(os.devnull, os.O_RDONLY)
        self.register = Register()
        self.nodes = OpenNodes(self.register.register, self.register.close)
        self.openers: dict[int, set[int]] = {}
        self.how: dict[int, int] = {}

    def teardown(self) -> None:
        os.close(self.fd)

    @rule(node=st.integers(1, 4), opener=st.integers(1, 6), fails=st.booleans())
    def open(self, node: int, opener: int, fails: bool) -> None:
        """An opener that is known already is one whose request was sent again."""
        self.register.failure = errno.ENOMEM if fails else 0
        found = self.nodes.open(node, opener, self.fd, 5)
        if self.openers.get(node):
            assert found == self.how[node]
        else:
            assert (found == CACHED) is fails
        self.how[node] = found
        self.openers.setdefault(node, set()).add(opener)

    @rule(node=st.integers(1, 4), opener=st.integers(1, 6))
    def release(self, node: int, opener: int) -> None:
        self.nodes.release(node, opener)
        self.openers.get(node, set()).discard(opener)

    @rule()
    def forget(self) -> None:
        self.nodes.forget()
        self.openers.clear()

    @invariant()
    def ids_live_as_long_as_somebody_uses_them(self) -> None:
        used = {self.how[node] for node, openers in self.openers.items() if openers}
        assert self.register.live == used - {CACHED}
        assert len(self.nodes) == sum(map(bool, self.openers.values()))


TestOpenNodes = OpenNodesRules.TestCase


@pytest.fixture
def null() -> Iterator[int]:
    fd = os.open(os.devnull, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("failure", "asked"), [(errno.EPERM, 1), (errno.ELOOP, 1), (errno.ENOMEM, 3)]
)
def test_a_refusal_that_stands_is_not_asked_for_again(null: int, failure: int, asked: int) -> None:
    register = Register(failure)
    nodes = OpenNodes(register.register, register.close)
    for node in range(3):
        assert nodes.open(node, 1, null, 5) == CACHED
        nodes.release(node, 1)
    assert register.asked == asked


def test_eloop_is_remembered_for_one_file_system(null: int) -> None:
    register = Register(errno.ELOOP)
    nodes = OpenNodes(register.register, register.close)
    assert nodes.open(1, 1, null, 5) == CACHED
    register.failure = 0
    assert nodes.open(2, 2, null, 5) == CACHED
    assert nodes.open(3, 3, null, 6) != CACHED
    assert nodes.open(1, 4, null, 5) == CACHED


def test_the_supervisor_registers_and_the_server_goes_on_alone(null: int) -> None:
    register = Register()
    theirs = OpenNodes(register.register, register.close)
    mine = OpenNodes(register.register, register.close)  # as a fork would have copied it
    ours, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    alone = threading.Event()
    link = Supervised(server_end, mine, alone.set)
    said: list[Said | None] = []

    def supervise() -> None:
        said.extend(serve_one(ours, theirs) for _ in range(5))
        ours.close()

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    link.say(Message.READY)
    first = link.open(1, 10, null, 5)
    assert first != CACHED
    assert link.open(1, 11, null, 5) == first
    second = link.open(2, 12, null, 5)
    link.release(2, 12)
    supervisor.join()
    assert said[0] == Said(Message.READY, 0, "")
    assert [one and one.what for one in said[1:]] == [*[Message.OPENED] * 3, Message.RELEASED]
    assert register.live == {first}
    assert second != first
    assert (theirs.how(1), theirs.how(2)) == (mine.how(1), mine.how(2)) == (first, None)

    assert link.open(1, 13, null, 5) == first
    assert alone.is_set()
    assert link.alone
    for opener in (10, 11, 13):
        assert register.live == {first}
        link.release(1, opener)
    assert not register.live
