"""The loader's options: their defaults, and what each of them may be."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fsmount.errors import PlanError
from fsmount_loader.order import DEFAULT_CHUNK_SIZE, DEFAULT_WINDOW

OnError = Literal["raise", "skip"]
Transform = Callable[[Any, Any], Mapping[str, Any]]

DEFAULT_SEEK_THRESHOLD = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything that ShardDataset is told but where it reads and which rank it is.

    Construction checks each value and raises PlanError naming the option.
    """

    batch_size: int | None = None
    global_batch_size: int | None = None
    where: str | None = None
    params: Sequence[Any] | Mapping[str, Any] | None = None
    keyset: str | None = None
    shuffle: bool | None = None
    seed: int = 0
    streams: int | None = None
    window: int = DEFAULT_WINDOW
    chunk_size: int = DEFAULT_CHUNK_SIZE
    seek_threshold: int = DEFAULT_SEEK_THRESHOLD
    max_pad_fraction: float = 0.1
    drop_last: bool = False
    evaluate: bool = False
    fields: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    keys: bool = False
    transform: Transform | None = None
    contiguous: bool = False
    on_error: OnError = "raise"
    max_skipped: int = 100
    retries: int = 3
    prefetch: int = 2

    def __post_init__(self) -> None:
        for name, least in _WHOLE.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _whole(name, value, least))
        if (self.batch_size is None) == (self.global_batch_size is None):
            raise PlanError("give one of batch_size and global_batch_size")
        if self.seed >= 1 << 64:
            raise PlanError(f"seed must be below 2**64, not {self.seed}")
        for name in ("where", "keyset"):
            if not isinstance(getattr(self, name), str | None):
                raise PlanError(f"{name} must be a text, not {getattr(self, name)!r}")
        if not (isinstance(self.max_pad_fraction, int | float) and 0 <= self.max_pad_fraction <= 1):
            raise PlanError(f"max_pad_fraction must be 0 to 1, not {self.max_pad_fraction!r}")
        if self.on_error not in ("raise", "skip"):
            raise PlanError(f"on_error must be 'raise' or 'skip', not {self.on_error!r}")
        if self.evaluate and self.drop_last:
            raise PlanError("evaluate=True counts each sample once, so drop_last can't be set")
        if self.params is not None and self.where is None:
            raise PlanError("params belong to where, which is not given")
        if self.transform is not None and not callable(self.transform):
            raise PlanError("transform must be a function of a batch and its generators")

    @property
    def shuffled(self) -> bool:
        """`shuffle`, which defaults to False under `evaluate=True`, else to True."""
        return not self.evaluate if self.shuffle is None else self.shuffle

    def global_batch(self, world_size: int) -> int:
        """Samples of one global batch; PlanError if `world_size` ranks can't share it evenly."""
        if self.batch_size is not None:
            return self.batch_size * world_size
        size = self.global_batch_size or 0
        if size % world_size:
            raise PlanError(f"global_batch_size={size} can't be divided among {world_size} ranks")
        return size


_WHOLE = {
    "batch_size": 1, "global_batch_size": 1, "seed": 0, "streams": 1, "window": 1, "chunk_size": 1,
    "seek_threshold": 0, "max_skipped": 0, "retries": 0, "prefetch": 0,
}  # fmt: skip


def _whole(name: str, value: object, least: int) -> int:
    try:
        whole = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        whole = least - 1
    if whole < least or isinstance(value, bool):
        raise PlanError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return whole


def names(option: str, value: Sequence[str]) -> tuple[str, ...]:
    """`value` as a tuple of distinct names; PlanError if it is one string or names one twice."""
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise PlanError(f"{option} must be a list of names, not {value!r}")
    if len(set(value)) != len(value):
        raise PlanError(f"{option} names {max(value, key=list(value).count)!r} twice")
    return tuple(value)
