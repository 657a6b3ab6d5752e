"""Where a run stands: a small JSON object, bound to the rows and options that shape the order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from fsmount.errors import StateMismatchError
from fsmount_loader.order import ORDER_VERSION


@dataclass(frozen=True, slots=True)
class Identity:
    """What decides which sample stands at which position: equal identities, equal orders.

    `streams`, `window` and `chunk_size` are None where the order is not shuffled.
    """

    selection: str  # digest of the selected rows
    samples: int
    seed: int
    shuffle: bool
    streams: int | None
    window: int | None
    chunk_size: int | None
    order: int = ORDER_VERSION


@dataclass(frozen=True, slots=True)
class State:
    """An identity, and the position in an epoch up to which the training loop has consumed it."""

    identity: Identity
    epoch: int
    position: int

    def to_dict(self) -> dict[str, Any]:
        """The state as a JSON object."""
        return {**asdict(self.identity), "epoch": self.epoch, "position": self.position}

    @classmethod
    def load(cls, value: Mapping[str, Any], mine: Identity) -> State:
        """The state in `value`; StateMismatchError names what differs from the identity `mine`."""
        for field in fields(Identity):
            saved, here = _get(value, field.name), getattr(mine, field.name)
            if saved != here:
                raise StateMismatchError(f"the state has {field.name}={saved!r}, this is {here!r}")
        epoch, position = _get(value, "epoch"), _get(value, "position")
        if not (_count(epoch) and _count(position) and position <= mine.samples):
            raise StateMismatchError(f"not a state: epoch {epoch!r}, position {position!r}")
        return cls(mine, epoch, position)


def _get(value: Mapping[str, Any], name: str) -> Any:
    if not isinstance(value, Mapping) or name not in value:
        raise StateMismatchError(f"not a state: it has no {name!r}")
    return value[name]


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
