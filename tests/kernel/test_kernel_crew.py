"""Threads of which one leads: all work is done once, whatever hangs."""

from __future__ import annotations

import queue
import threading
from collections import Counter

import pytest
from kernel_mounts import wait_for

from fsmount.mount.kernel.crew import CALM, STALL, Crew, EndOfWork
from fsmount.mount.kernel.turns import MOST, Turns

SECONDS = 20


class Line:
    """Work that comes in a line, and is noted when it is done; None ends it."""

    def __init__(self, work: list[int | None]) -> None:
        self.coming: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for one in work:
            self.coming.put(one)
        self.done: Counter[int] = Counter()
        self.all_done = threading.Event()
        self.hung = threading.Event()
        self.ended = 0
        self.leaders = 0

    def take(self, waiting: bool) -> int | None:
        self.leaders += 1
        assert self.leaders == 1
        try:
            found = self.coming.get(timeout=STALL if waiting else SECONDS)
        except queue.Empty:
            return None
        finally:
            self.leaders -= 1
        if found is None:
            raise EndOfWork
        return found

    def work(self, one: int) -> None:
        if one < 0:
            self.hung.wait(SECONDS)
        self.done[one] += 1
        if one == 0:
            self.all_done.set()

    def end(self) -> None:
        self.ended += 1


def run(line: Line) -> threading.Thread:
    crew = Crew(line.take, line.work, line.end)
    thread = threading.Thread(target=crew.run)
    thread.start()
    return thread


def test_everything_is_done_once() -> None:
    line = Line([*range(1, 2000), 0])
    thread = run(line)
    wait_for(lambda: line.done.total() >= 2000)
    line.coming.put(None)
    thread.join(SECONDS)
    assert line.done == Counter(range(2000))


@pytest.mark.parametrize("hanging", [1, CALM, 30])
def test_what_hangs_hangs_nothing_else(hanging: int) -> None:
    line = Line([*range(-hanging, 0), *range(1, 100), 0])
    thread = run(line)
    assert line.all_done.wait(SECONDS)
    assert all(line.done[one] == 1 for one in range(100))
    assert not any(line.done[one] for one in range(-hanging, 0))
    line.hung.set()
    line.coming.put(None)
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_failure_to_take_is_raised() -> None:
    def take(waiting: bool) -> int | None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Crew(take, print, lambda: None).run()


def test_so_many_have_their_turn_at_a_node_and_the_others_in_order() -> None:
    turns: Turns[int] = Turns()
    let_in = [work for work in range(MOST + 5) if turns.enter(1, work)]
    assert let_in == list(range(MOST))
    assert turns.enter(2, 0)
    assert turns.leave(2) is None
    assert [turns.leave(1) for _ in range(5)] == list(range(MOST, MOST + 5))
    assert [turns.leave(1) for _ in range(MOST - 1)] == [None] * (MOST - 1)
    assert [turns.enter(1, work) for work in range(MOST)] == [True] * (MOST - 1) + [False]
    assert turns.leave(1) == MOST - 1
    for _ in range(MOST):
        assert turns.leave(1) is None
    assert not turns._inside
    assert not turns._outside
