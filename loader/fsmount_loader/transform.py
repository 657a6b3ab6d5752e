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

    def __init__(
        self,
        seed: int,
        epoch: int,
        positions: Int64s,
        name_of: Callable[[int], str] = "sample {} of the batch".format,
    ) -> None:
        self._keys = keys(seed, epoch, TRANSFORM_WORD, positions)
        self.name_of = name_of  # the sample at a place, for a message

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
    samples, and NumPy's arrays and scalars, are stacked, but for entries named in `lists`; those
    and anything else become lists. It sees padded and skipped samples too. PlanError names an entry
    that can't be stacked; what `function` raises has a note that names the sample.
    """

    function: PerSample
    lists: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lists", names("lists", self.lists))

    def __call__(self, batch: Mapping[str, Any], generators: Generators) -> Mapping[str, Any]:
        """The batch of what the function returns for each sample."""
        samples = []
        for place, generator in enumerate(generators):
            try:
                given = {name: value[place] for name, value in batch.items()}
                samples.append(returned(self.function(given, generator)))
            except Exception as error:
                error.add_note(f"in the transform of {generators.name_of(place)}")
                raise
        names_of_first = dict.fromkeys(samples[0])
        for place, sample in enumerate(samples):
            if sample.keys() != names_of_first.keys():
                odd = min(map(str, sample.keys() ^ names_of_first.keys()))
                raise PlanError(
                    f"per_sample: only one of {generators.name_of(0)} and "
                    f"{generators.name_of(place)} has {odd!r} after the transform"
                )
        return {name: self._joined(name, samples, generators) for name in names_of_first}

    def _joined(
        self, name: str, samples: Sequence[Mapping[str, Any]], generators: Generators
    ) -> Any:
        values = [_tensor(sample[name]) for sample in samples]
        if name in self.lists or not all(isinstance(value, torch.Tensor) for value in values):
            return values
        shapes = [list(value.shape) for value in values]
        odd = next((place for place, shape in enumerate(shapes) if shape != shapes[0]), None)
        if odd is not None:
            raise PlanError(
                f"per_sample: {name!r} is {shapes[0]} in {generators.name_of(0)} and "
                f"{shapes[odd]} in {generators.name_of(odd)}: can't be stacked; "
                f"lists=[{name!r}] leaves them apart"
            )
        return torch.stack(values)


def _tensor(value: Any) -> Any:
    """NumPy's arrays and scalars of numbers, booleans and times as a batch has them."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind not in "biufcmM":
        return value
    native = np.array(value, value.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(native.view(np.int64) if native.dtype.kind in "mM" else native)
