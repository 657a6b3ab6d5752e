"""A bounded cache whose misses don't wait for each other."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Keeps what `load` returned, the least recently used going first, up to a total weight and a
    number of values.

    A value heavier than the limit is kept until the next one comes. A key is loaded by one thread;
    others that want it wait, those that want another key do not. A failure is not remembered. Safe
    in any thread.
    """

    def __init__(
        self,
        load: Callable[[K], V],
        weigh: Callable[[V], int],
        limit: int,
        most: int = sys.maxsize,
    ) -> None:
        self._load = load
        self._weigh = weigh
        self._limit = limit
        self._most = most
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()  # with their weights
        self._total = 0
        self._loading: dict[K, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: K) -> V:
        """The value of `key`, loaded if need be; raises what `load` raises."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            turn = self._loading.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                if key in self._values:
                    return self._values[key][0]
            try:
                value = self._load(key)
                self._keep(key, value)
                return value
            finally:
                with self._lock:
                    self._loading.pop(key, None)

    def peek(self, key: K) -> V | None:
        """The value of `key` if it is there, which does not count as a use."""
        found = self._values.get(key)
        return None if found is None else found[0]

    def _keep(self, key: K, value: V) -> None:
        weight = self._weigh(value)
        with self._lock:
            self._values[key] = (value, weight)
            self._total += weight
            while self._is_full() and len(self._values) > 1:
                _, (_, gone) = self._values.popitem(last=False)
                self._total -= gone

    def _is_full(self) -> bool:
        return self._total > self._limit or len(self._values) > self._most
