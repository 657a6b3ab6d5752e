"""Several files that can't be packed, told in one error.

The error's text is one line, as every error's; a note of its own (PEP 678) names each file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsmount.errors import SourceError

SHOWN = 20  # files that are named; the others are counted


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with some files: the first errors, and how many there are. Picklable."""

    first: tuple[SourceError, ...] = ()
    count: int = 0

    @classmethod
    def of(cls, errors: Iterable[SourceError]) -> Faults:
        """All of `errors`."""
        found = tuple(errors)
        return cls(found[:SHOWN], len(found))

    def __add__(self, other: Faults) -> Faults:
        return Faults((*self.first, *other.first)[:SHOWN], self.count + other.count)

    def raise_any(self) -> None:
        """Raise them, if there are any: one as it is, several as one error with a note for each."""
        if self.count == 1:
            raise self.first[0]
        if self.count:
            raise self._together()

    def _together(self) -> SourceError:
        kinds = {type(error) for error in self.first}
        kind = kinds.pop() if len(kinds) == 1 else SourceError
        error = kind(
            f"{self.count} files can't be packed, so nothing is published; what could be packed is "
            f"kept for the next run. The first: {self.first[0]}"
        )
        for one in self.first:
            error.add_note(str(one))
        if self.count > len(self.first):
            error.add_note(f"and {self.count - len(self.first)} more")
        return error
