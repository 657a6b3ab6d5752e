"""Random generators that belong to positions of the order, so that augmentation is elastic too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from fsmount.errors import PlanError
from fsmount_loader.options import names
from fsmount_loader.order import TRANSFORM_WORD, Int64s, keys

PerSample = Callable[[Mapping[str, Any], np.random.Generator], Mapping[str, Any]]


class Generators(Sequence[np.random.Generator]):
    """One numpy Generator for each sample of a batch, made when asked for.

    Seeded by (seed, epoch, position): the same whatever rank, worker or batch the sample is in.
    """

    def __init__(self, seed: int, epoch: int, positions: Int64s) -> None:
        self._keys = keys(seed, epoch, TRANSFORM_WORD, positions)

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, place: int) -> np.random.Generator: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[np.random.Generator]: ...

    def __getitem__(
        self, place: int | slice
    ) -> np.random.Generator | Sequence[np.random.Generator]:
        """The generator of the sample at `place`, new and at its start each time."""
        if isinstance(place, slice):
            return [self[at] for at in range(len(self))[place]]
        return np.random.Generator(np.random.PCG64(int(self._keys[place])))


def returned(value: object) -> Mapping[str, Any]:
    """What a transform, or a function of one sample, returned; PlanError if it is no mapping."""
    if not isinstance(value, Mapping):
        kind = "None" if value is None else type(value).__name__
        raise PlanError(f"a transform must return a mapping of names to values, not {kind}")
    return value


@dataclass(frozen=True, slots=True)
class per_sample:  # noqa: N801 - used as a function
    """Make a transform of batches from a function of one sample and its generator.

    `function` gets a dict of the sample's tensors and values and returns one; tensors of all
    samples are stacked, but for entries named in `lists`; those and anything else become lists. It
    sees padded and skipped samples too. PlanError names an entry that can't be stacked.
    """

    function: PerSample
    lists: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lists", names("lists", self.lists))

    def __call__(self, batch: Mapping[str, Any], generators: Generators) -> Mapping[str, Any]:
        """The batch of what the function returns for each sample."""
        samples = [
            returned(self.function({n: value[place] for n, value in batch.items()}, generator))
            for place, generator in enumerate(generators)
        ]
        return {name: self._joined(name, [s[name] for s in samples]) for name in samples[0]}

    def _joined(self, name: str, values: list[Any]) -> Any:
        if name in self.lists or not all(isinstance(value, torch.Tensor) for value in values):
            return values
        shapes = {tuple(value.shape): None for value in values}
        if len(shapes) > 1:
            one, other = map(list, [*shapes][:2])
            raise PlanError(
                f"per_sample: {name!r} is {one} in one sample and {other} in another: can't be "
                f"stacked; lists=[{name!r}] leaves them apart"
            )
        return torch.stack(values)
