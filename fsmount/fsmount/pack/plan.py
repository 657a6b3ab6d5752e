"""What a pack has to do, worked out from listings alone: a pure function, no file is touched.

Every partition of the new version is either taken over as it is (its files are as remembered),
looked at by a worker, or kept from the base because the source doesn't have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fsmount.errors import InvalidNameError, PartitionError, SourceError
from fsmount.model import (
    ROOT_PARTITION,
    Digest,
    Partition,
    Rule,
    check_partition_id,
    check_partition_ids,
)
from fsmount.pack.grouping import partitions_of
from fsmount.pack.memory import Remembered
from fsmount.pack.source import SourceSample, fingerprint
from fsmount.pack.task import Task

_SHOWN = 3  # examples in a message


@dataclass(frozen=True, slots=True)
class Plan:
    """The new version's partitions by what becomes of them, each in order of id."""

    reused: tuple[Partition, ...]
    tasks: tuple[Task, ...]
    kept: tuple[Partition, ...]  # in the base, not in the source
    resumed: tuple[Partition, ...]  # of `reused`: not the base's, but finished by an earlier run
    resumed_shards: int = 0  # of `tasks`: finished by an earlier run

    def known(self) -> list[Partition]:
        """The partitions of the version as far as they are known: some will change."""
        before = (task.previous for task in self.tasks)
        return [*self.reused, *self.kept, *(part for part in before if part is not None)]


@dataclass(frozen=True, slots=True)
class Known:
    """What may be reused: partitions as the base has them, as this user remembers them."""

    base: Mapping[str, Partition]
    remembered: Mapping[str, Remembered]
    unfinished: Mapping[str, tuple[Digest, ...]]  # shards that were finished of other partitions


def group(samples: tuple[SourceSample, ...], rule: Rule) -> dict[str, tuple[SourceSample, ...]]:
    """The samples of each partition, sorted by id and key.

    Raises PartitionError for samples that the rule leaves out, for ids that are no relative path,
    that clash in a mounted tree, or that are taken by samples of the source's top directory.
    """
    groups: dict[str, list[SourceSample]] = {}
    left_out = []
    ids = partitions_of(rule, [item.key for item in samples])
    for item, found in zip(samples, ids, strict=True):
        if found is None:
            left_out.append(item.key)
        else:
            groups.setdefault(found, []).append(item)
    if left_out:
        raise PartitionError(
            f"the rule ({rule}) leaves out {len(left_out)} of {len(samples)} samples, "
            f"such as {examples(left_out)}"
        )
    _check_ids(groups)
    return {name: tuple(groups[name]) for name in sorted(groups, key=str.encode)}


def make_plan(
    groups: Mapping[str, tuple[SourceSample, ...]],
    known: Known,
    is_sound: Callable[[Partition], bool],
    *,
    force: bool,
    drop_vanished: bool,
) -> Plan:
    """Decide for every partition of the source and of the base.

    A partition is reused unread if it is remembered that the present listing made it, and
    `is_sound` finds its objects whole; whoever wrote the base is not asked. With `force` none is
    reused unread; with `drop_vanished` the base's others are dropped.
    """
    reused: list[Partition] = []
    tasks: list[Task] = []
    for name, samples in groups.items():
        found = known.remembered.get(name)
        before = known.base.get(name) if found is None else found.partition
        same = found is not None and found.listing == fingerprint(samples)
        if before is not None and same and not force and is_sound(before):
            reused.append(before)
        else:
            tasks.append(Task(name, len(tasks), samples, before))
    vanished = (part for name, part in known.base.items() if name not in groups)
    kept = () if drop_vanished else tuple(vanished)
    check_partition_ids({*groups, *(part.id for part in kept)})
    resumed = tuple(_new_to(known.base, reused))
    shards = 0 if force else sum(len(known.unfinished.get(task.id, ())) for task in tasks)
    return Plan(tuple(reused), tuple(tasks), kept, resumed, shards)


def _new_to(base: Mapping[str, Partition], parts: Iterable[Partition]) -> Iterator[Partition]:
    """Those of `parts` that have other content than in the base, or are not in it."""
    for part in parts:
        there = base.get(part.id)
        if there is None or there.metadata_revision != part.metadata_revision:
            yield part


def check_sidecars(samples: tuple[SourceSample, ...]) -> None:
    """Raise SourceError if a sample has no sidecar."""
    missing = [item.key for item in samples if item.sidecar is None]
    if missing:
        raise SourceError(
            f"{len(missing)} of {len(samples)} samples have no sidecar, such as {examples(missing)}"
        )


def examples(names: list[str]) -> str:
    """The first few of `names`, for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _check_ids(groups: Mapping[str, list[SourceSample]]) -> None:
    for name, samples in groups.items():
        try:
            check_partition_id(name)
        except InvalidNameError as error:
            raise PartitionError(
                f"sample {samples[0].key!r}: {error}; rename its directory, or group the samples "
                "otherwise with --partition-depth or --partition-regex"
            ) from error
    check_partition_ids(set(groups))
    for name, samples in groups.items():
        inside = [item.key for item in samples if "/" in item.key]
        if inside and name.split("/")[0] == ROOT_PARTITION:
            raise PartitionError(
                f"sample {inside[0]!r} would be in partition {name!r}, but {ROOT_PARTITION!r} is "
                "the partition of samples that lie directly in the source: rename the directory"
            )
