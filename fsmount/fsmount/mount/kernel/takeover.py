"""What a server takes over when it begins, from the supervisor that forks it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fsmount.mount.kernel.answers import Request
from fsmount.mount.kernel.protocol import Opcode

Kind = tuple[int, int, bytes]  # opcode, node, and of a LOOKUP the name
Refused = Mapping[Kind, float]  # until when, by the monotonic clock


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Nothing, for the first server of a mount."""

    successor: bool = False  # another server has died before
    fresh: tuple[bytes, ...] = ()  # requests that were read, and that nobody has seen
    tried: frozenset[int] = frozenset()  # numbers of requests that other processes answer
    refused: Refused = field(default_factory=lambda: MappingProxyType({}))  # what servers died of

    def refuses(self, request: Request) -> bool:
        """Whether it is not to be done now, since a server would die of it."""
        return is_refused(self.refused, request)


def kind_of(request: Request) -> Kind:
    """What all requests have in common that would do the same as this one."""
    name = bytes(request.body) if request.opcode == Opcode.LOOKUP else b""
    return request.opcode, request.node, name


def is_refused(refused: Refused, request: Request) -> bool:
    """Whether a request of its kind is in `refused` at this moment."""
    return refused.get(kind_of(request), 0.0) > time.monotonic()
