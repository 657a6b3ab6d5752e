"""What a worker is told to do, and what it answers. Picklable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from fsmount.formats.kinds import NO_FIELDS, Fields
from fsmount.model import Partition, Recipe
from fsmount.pack.faults import Faults
from fsmount.pack.memory import Memory
from fsmount.pack.source import MAX_SAMPLE_BYTES, NpzTree, SourceSample
from fsmount.store import Objects
from fsmount.store.inside import StorePath

Advance = Callable[[int, int], None]  # of samples done, of source bytes done; may raise to stop


class Outcome(Enum):
    """What became of a partition that was looked at."""

    BUILT = "built"  # new shards and a new manifest
    REFRESHED = "refreshed"  # the shards as they were, a new manifest
    UNCHANGED = "unchanged"  # files were touched, their content is the same


@dataclass(frozen=True, slots=True)
class Task:
    """One partition to look at: its samples, and the partition they may be equal to."""

    id: str
    place: int  # in the plan
    samples: tuple[SourceSample, ...]  # sorted by key
    previous: Partition | None


@dataclass(frozen=True, slots=True)
class Context:
    """What all tasks of a pack share. Picklable."""

    tree: NpzTree
    recipe: Recipe
    objects: Objects
    memory: Memory
    clock: int  # ns; files that changed later may change once more unnoticed
    staging: StorePath
    force: bool  # read every file, whatever is remembered
    max_sample_bytes: int = MAX_SAMPLE_BYTES
    fields: Fields = NO_FIELDS  # of the version, as far as they are known before it is built


@dataclass(frozen=True, slots=True)
class Built:
    """A partition as it now is, and how it came about."""

    partition: Partition
    outcome: Outcome
    samples_read: int
    remembered: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """A partition that can't be built, and what is wrong with its files."""

    faults: Faults


Result = Built | Failed
