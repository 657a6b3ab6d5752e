"""What a server takes over when it begins, from the supervisor that forks it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Kinds = Mapping[tuple[int, int], float]  # by opcode and node: until when, by the monotonic clock


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Nothing, for the first server of a mount."""

    successor: bool = False  # another server has died before
    fresh: tuple[bytes, ...] = ()  # requests that were read, and that nobody has seen
    tried: frozenset[int] = frozenset()  # numbers of requests that other processes answer
    refused: Kinds = field(default_factory=lambda: MappingProxyType({}))  # what servers died of

    def refuses(self, opcode: int, node: int) -> bool:
        """Whether such a request is not to be done now, since a server would die of it."""
        return is_refused(self.refused, opcode, node)


def is_refused(refused: Kinds, opcode: int, node: int) -> bool:
    """Whether a request of this kind is in `refused` at this moment."""
    return refused.get((opcode, node), 0.0) > time.monotonic()
