"""The schemas of many samples as arrays, and what keeps samples of two out of one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from fsmount.formats import sample
from fsmount_loader.order import Int64s


class Headers(Sequence[bytes]):
    """Headers in one array of bytes, the end of each in another."""

    def __init__(self, data: npt.NDArray[np.uint8], ends: Int64s) -> None:
        self.data = data
        self.ends = ends

    @classmethod
    def of(cls, headers: Sequence[bytes]) -> Headers:
        """`headers` in arrays."""
        ends = np.cumsum([len(header) for header in headers], dtype=np.int64)
        return cls(np.frombuffer(b"".join(headers), np.uint8), ends)

    @property
    def sizes(self) -> Int64s:
        """The length of each."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, place: int) -> bytes: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[bytes, ...]: ...

    def __getitem__(self, place: int | slice) -> bytes | tuple[bytes, ...]:
        if isinstance(place, slice):
            return tuple(self)[place]
        end = int(self.ends[place])
        start = int(self.ends[place - 1]) if place % len(self) else 0
        return self.data[start:end].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        data, start = self.data.tobytes(), 0
        for end in self.ends.tolist():
            yield data[start:end]
            start = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True, slots=True)
class Kind:
    """Schemas with the same fields but for sizes."""

    places: Int64s  # of the schemas among all
    fields: tuple[sample.Field, ...]  # of the first of them, in file order
    dims: Int64s  # [schemas, dimensions of all fields]
    header_size: Int64s

    def shapes(self) -> Iterator[tuple[sample.Field, Int64s]]:
        """Each field, and its shapes: int64[schemas, dimensions]."""
        start = 0
        for one in self.fields:
            end = start + len(one.shape)
            yield one, self.dims[:, start:end]
            start = end

    def ends(self) -> Int64s:
        """Where each field ends in the member's data: int64[schemas, fields]."""
        sizes = [shapes.prod(axis=1) * one.dtype.itemsize for one, shapes in self.shapes()]
        return np.cumsum(np.array(sizes, np.int64).reshape(-1, len(self.places)).T, axis=1)


@dataclass(frozen=True, slots=True)
class Schemas:
    """Distinct schemas, in the order of their first use, as arrays."""

    headers: Headers
    raw_size: Int64s  # of the members; -1: more than a manifest can say
    kind: npt.NDArray[np.int32]  # ascending at first use
    dims: Int64s  # shapes of all fields, in file order, of one schema after the other
    dims_ends: Int64s  # of each schema in `dims`

    @classmethod
    def of_arrays(cls, arrays: Sequence[npt.NDArray[Any]]) -> Schemas:
        """What `arrays` were taken from."""
        data, ends, *rest = arrays
        return cls(Headers(data, ends), *rest)

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """All there is; one dimension each."""
        headers = self.headers
        return headers.data, headers.ends, self.raw_size, self.kind, self.dims, self.dims_ends

    def __len__(self) -> int:
        return len(self.kind)

    def schema(self, place: int) -> sample.Schema:
        """One schema as the format module has it."""
        return sample.read_schema(self.headers[place])

    def kinds(self) -> list[Kind]:
        """The kinds, in the order of their first use."""
        order = np.argsort(self.kind, kind="stable")
        bounds = np.flatnonzero(np.diff(self.kind[order])) + 1
        return [self._kind(places) for places in np.split(order, bounds)]

    def first_unlike(self, wanted: Sequence[str] | None, *, sizes: bool = True) -> int | None:
        """The first schema that can't be in one batch with schema 0; see `describe_difference`."""
        first = self.schema(0)
        expected = {
            one.name: one.shape for one in first.fields if wanted is None or one.name in wanted
        }
        found: list[int] = []
        for kind in self.kinds():
            other = self.schema(int(kind.places[0]))
            if describe_difference(first, other, sizes=False, wanted=wanted):
                found.append(int(kind.places[0]))
            elif sizes:
                for one, shapes in kind.shapes():
                    if one.name in expected:
                        unlike = (shapes != expected[one.name]).any(axis=1)
                        found += kind.places[unlike][:1].tolist()
        return min(found, default=None)

    def _kind(self, places: Int64s) -> Kind:
        fields = self.schema(int(places[0])).fields
        count = sum(len(field.shape) for field in fields)
        starts = self.dims_ends[places] - count
        dims = self.dims[starts[:, None] + np.arange(count)]
        return Kind(places, fields, dims, self.headers.sizes[places])


def describe_difference(
    first: sample.Schema,
    other: sample.Schema,
    *,
    sizes: bool = True,
    wanted: Sequence[str] | None = None,
) -> str:
    """What keeps samples of two schemas out of one batch; empty if nothing does.

    Only the fields `wanted` (None: all) count. Without `sizes` shapes may differ, if not in their
    number of dimensions.
    """
    chosen = None if wanted is None else {*wanted}
    ours, theirs = (
        {f.name: f for f in schema.fields if chosen is None or f.name in chosen}
        for schema in (first, other)
    )
    if ours.keys() != theirs.keys():
        odd = min(ours.keys() ^ theirs.keys())
        return f"only one of them has {odd!r}"
    for name, field in ours.items():
        its = theirs[name]
        unlike = field.shape != its.shape if sizes else len(field.shape) != len(its.shape)
        if unlike or _native(field) != _native(its):
            one, two = (f"{_native(f)} {list(f.shape)}" for f in (field, its))
            return f"{name!r} is {one} in one and {two} in the other"
    return ""


def _native(field: sample.Field) -> np.dtype[Any]:
    return field.dtype.newbyteorder("=")
