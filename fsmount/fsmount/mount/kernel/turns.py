"""How many work on one node at a time, so that one that hangs does not take every thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")

MOST = 32  # at one node


class Turns(Generic[T]):
    """Work by node: so many pieces are let in, the others wait outside. Safe in any thread."""

    def __init__(self) -> None:
        self._inside: dict[int, int] = {}
        self._outside: dict[int, deque[T]] = {}
        self._lock = threading.Lock()

    def enter(self, node: int, work: T) -> bool:
        """Whether `work` is let in; else a `leave` will return it."""
        with self._lock:
            inside = self._inside.get(node, 0)
            if inside >= MOST:
                self._outside.setdefault(node, deque()).append(work)
                return False
            self._inside[node] = inside + 1
            return True

    def leave(self, node: int) -> T | None:
        """What is let in instead of work that is done; None if nothing waits outside."""
        with self._lock:
            outside = self._outside.get(node)
            if outside:
                return outside.popleft()
            self._outside.pop(node, None)
            if self._inside[node] > 1:
                self._inside[node] -= 1
            else:
                del self._inside[node]
            return None
