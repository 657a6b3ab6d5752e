"""The loader's options: their defaults, and what each of them may be."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np

from fsmount.errors import PlanError
from fsmount_loader.order import (
    DEFAULT_BUCKET_SIZE,
    DEFAULT_BUCKETS,
    DEFAULT_CHUNK_SIZE,
    DEFAULT_WINDOW,
)

OnError = Literal["raise", "skip"]
Shapes = Literal["error", "pad", "list"]
Transform = Callable[[Any, Any], Mapping[str, Any]]

DEFAULT_SEEK_THRESHOLD = 128 << 10
_LEVELS_MAX = 64  # of lists and dicts in a parameter


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
    bucket_by: str | None = None
    bucket_size: int = DEFAULT_BUCKET_SIZE
    bucket_window: int | None = None
    seek_threshold: int = DEFAULT_SEEK_THRESHOLD
    max_pad_fraction: float = 0.1
    drop_last: bool = False
    evaluate: bool = False
    fields: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    keys: bool = False
    transform: Transform | None = None
    contiguous: bool = False
    shapes: Shapes = "error"
    on_error: OnError = "raise"
    max_skipped: int = 100
    retries: int = 3
    prefetch: int = 2

    def __post_init__(self) -> None:
        self._check_numbers_and_flags()
        if (self.batch_size is None) == (self.global_batch_size is None):
            raise PlanError("give one of batch_size and global_batch_size")
        for name in ("where", "keyset", "bucket_by"):
            if not isinstance(getattr(self, name), str | None):
                raise PlanError(f"{name} must be a text, not {getattr(self, name)!r}")
        if self.on_error not in ("raise", "skip"):
            raise PlanError(f"on_error must be 'raise' or 'skip', not {self.on_error!r}")
        if self.shapes not in ("error", "pad", "list"):
            raise PlanError(f"shapes must be 'error', 'pad' or 'list', not {self.shapes!r}")
        if self.evaluate and self.drop_last:
            raise PlanError("evaluate=True counts each sample once, so drop_last can't be set")
        if self.params is not None and self.where is None:
            raise PlanError("params belong to where, which is not given")
        if self.transform is not None and not callable(self.transform):
            raise PlanError("transform must be a function of a batch and its generators")
        if self.bucket_by is not None:
            self._check_buckets()

    def _check_buckets(self) -> None:
        if not self.shuffled:
            raise PlanError("bucket_by sorts a shuffled order: it needs shuffle=True")
        if self.bucket_positions % self.bucket_size:
            raise PlanError(
                f"bucket_window={self.bucket_window} is no multiple of "
                f"bucket_size={self.bucket_size}"
            )

    def _check_numbers_and_flags(self) -> None:
        checked: dict[str, object] = {
            "params": _params(self.params),
            "max_pad_fraction": real("max_pad_fraction", self.max_pad_fraction, 0, 1),
        }
        for name in (*_WHOLE, *_FLAGS):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            checked[name] = (
                whole(name, value, *_WHOLE[name]) if name in _WHOLE else flag(name, value)
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def shuffled(self) -> bool:
        """`shuffle`, which defaults to False under `evaluate=True`, else to True."""
        return not self.evaluate if self.shuffle is None else self.shuffle

    @property
    def bucket_positions(self) -> int:
        """`bucket_window`, which defaults to sixteen buckets."""
        return self.bucket_window or DEFAULT_BUCKETS * self.bucket_size

    def global_batch(self, world_size: int) -> int:
        """Samples of one global batch; PlanError if `world_size` ranks can't share it evenly."""
        if self.batch_size is not None:
            return self.batch_size * world_size
        size = self.global_batch_size or 0
        if size % world_size:
            raise PlanError(f"global_batch_size={size} can't be divided among {world_size} ranks")
        return size


_WHOLE = {  # the least, and the bits that it may have: the order computes with 64 bits
    "batch_size": (1, 31), "global_batch_size": (1, 31), "seed": (0, 64), "streams": (1, 31),
    "window": (1, 31), "chunk_size": (1, 31), "bucket_size": (1, 31), "bucket_window": (1, 31),
    "seek_threshold": (0, 63), "max_skipped": (0, 63), "retries": (0, 63), "prefetch": (0, 63),
}  # fmt: skip
_FLAGS = ("shuffle", "drop_last", "evaluate", "keys", "contiguous")
_OPTIONAL = {  # may be None
    "batch_size", "global_batch_size", "streams", "bucket_window", "shuffle",
}  # fmt: skip


def whole(name: str, value: object, least: int = 0, bits: int = 63) -> int:
    """`value` as an int; PlanError if it is no integer from `least` on below 2**`bits`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise PlanError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if number >> bits:
        raise PlanError(f"{name} must be below 2**{bits}")
    return number


def real(name: str, value: object, least: float, most: float) -> float:
    """`value` as a float; PlanError if it is no number from `least` to `most`."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not (number and least <= value <= most):  # type: ignore[operator]
        raise PlanError(f"{name} must be {least:g} to {most:g}, not {value!r}")
    return float(value)  # type: ignore[arg-type]


def flag(name: str, value: object) -> bool:
    """`value` as a bool; PlanError if it is none."""
    if not isinstance(value, bool | np.bool_):
        raise PlanError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def _params(value: Any) -> list[Any] | dict[str, Any] | None:
    """The parameters as DuckDB takes them; PlanError if they are none, or too deep for it."""
    if _deep(value, _LEVELS_MAX):
        raise PlanError(f"params are nested more than {_LEVELS_MAX} deep")
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(part) for part in value]
    if value is not None:
        raise PlanError(f"params must be a list or a dict, not {value!r}")
    return None


def _deep(value: object, levels: int) -> bool:
    """Whether `value` has more than so many levels, as one that holds itself has."""
    if not isinstance(value, Mapping | list | tuple | set):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return not levels or any(_deep(part, levels - 1) for part in inner)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.integer | np.floating | np.bool_) else value


def names(option: str, value: Sequence[str]) -> tuple[str, ...]:
    """`value` as a tuple of distinct names; PlanError if it is one string or names one twice."""
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if not (listed and all(isinstance(name, str) for name in value)):
        raise PlanError(f"{option} must be a list of names, not {value!r}")
    if len(set(value)) != len(value):
        raise PlanError(f"{option} names {max(value, key=list(value).count)!r} twice")
    return tuple(value)
