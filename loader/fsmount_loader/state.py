"""Where a run stands: a small JSON object, bound to the rows and options that shape the order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fsmount.errors import PlanError, StateMismatchError
from fsmount_loader.options import whole
from fsmount_loader.order import EPOCH_BITS, ORDER_VERSION


@dataclass(frozen=True, slots=True)
class Identity:
    """What decides which sample stands at which position: equal identities, equal orders.

    `streams`, `window` and `chunk_size` are None where the order is not shuffled, and what begins
    with `bucket` and `lengths` where it is not sorted by length.
    """

    selection: str  # digest of the selected rows
    samples: int
    seed: int
    shuffle: bool
    streams: int | None
    window: int | None
    chunk_size: int | None
    bucket_by: str | None
    bucket_size: int | None
    bucket_window: int | None
    lengths: str | None  # digest of the selected rows' lengths
    order: int = ORDER_VERSION


@dataclass(frozen=True, slots=True)
class State:
    """An identity, and the position in an epoch up to which the training loop has consumed it.

    Raises PlanError if there can be no such epoch or position.
    """

    identity: Identity
    epoch: int
    position: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "epoch", whole("epoch", self.epoch, 0, EPOCH_BITS))
        object.__setattr__(self, "position", whole("position", self.position))
        if self.position > self.identity.samples:
            raise PlanError(f"position={self.position} of {self.identity.samples} samples")

    def to_dict(self) -> dict[str, Any]:
        """The state as a JSON object."""
        return {**asdict(self.identity), "epoch": self.epoch, "position": self.position}

    @classmethod
    def load(cls, value: Mapping[str, Any], mine: Identity) -> State:
        """The state in `value`; StateMismatchError names what differs from the identity `mine`."""
        _check_equal(value, mine, [field.name for field in fields(Identity)])
        epoch, position = _get(value, "epoch"), _get(value, "position")
        try:
            return cls(mine, epoch, position)
        except PlanError as error:
            raise StateMismatchError(f"not a state: {error}") from None


@dataclass(frozen=True, slots=True)
class Share:
    """How far one of a DataLoader's workers is in its share of a pass.

    The pass goes on from position `started` of the epoch. The worker has handed over so many whole
    `done_batches`, and so many `done_samples` of the next one where it hands over samples.
    """

    identity: Identity
    epoch: int
    started: int
    global_batch_size: int
    worker: int
    workers: int  # 0: the trainer itself
    done_batches: int
    done_samples: int

    def to_dict(self) -> dict[str, Any]:
        """The share as a JSON object."""
        rest = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {**asdict(self.identity), **rest}

    @classmethod
    def load(cls, value: Mapping[str, Any], mine: Share) -> Share:
        """The share in `value`; StateMismatchError names what differs from `mine`."""
        _check_equal(value, mine.identity, [field.name for field in fields(Identity)])
        _check_equal(value, mine, ["global_batch_size", "workers", "worker"])
        try:
            begun = State(mine.identity, _get(value, "epoch"), _get(value, "started"))
            return replace(
                mine,
                epoch=begun.epoch,
                started=begun.position,
                done_batches=whole("done_batches", _get(value, "done_batches")),
                done_samples=whole("done_samples", _get(value, "done_samples")),
            )
        except PlanError as error:
            raise StateMismatchError(f"not a state: {error}") from None


def _check_equal(value: Mapping[str, Any], mine: object, names: Sequence[str]) -> None:
    for name in names:
        saved, here = _get(value, name), getattr(mine, name)
        if not _equal(saved, here):
            of = f"; it was saved with {value['version']!r}" if "version" in value else ""
            raise StateMismatchError(f"the state has {name}={saved!r}, this is {here!r}{of}")


def _equal(saved: object, here: object) -> bool:
    try:
        return bool(saved == here)
    except (TypeError, ValueError, RuntimeError):  # an array, a tensor
        return False


def _get(value: Mapping[str, Any], name: str) -> Any:
    if not isinstance(value, Mapping) or name not in value:
        raise StateMismatchError(f"not a state: it has no {name!r}")
    return value[name]
