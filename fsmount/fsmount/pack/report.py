"""What a pack did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsmount.diff import Changes
from fsmount.model import Partition, VersionDocument
from fsmount.pack.plan import Plan
from fsmount.pack.task import Built, Outcome


@dataclass(frozen=True, slots=True)
class PackReport:
    """What a pack did. The lists are partition ids in order; bytes are of the whole version."""

    document: VersionDocument
    published: bool  # False: the version was there already, complete
    latest: str | None  # what `latest` names now; another tag if it moved meanwhile
    changes: Mapping[str, Changes]  # of samples, against the base, by partition that differs
    built: tuple[str, ...]
    refreshed: tuple[str, ...]  # new manifest, old shards
    reused: tuple[str, ...]
    kept: tuple[str, ...]  # in the base, not in the source
    dropped: tuple[str, ...]  # in the base, not in the version
    samples_read: int
    ignored_files: int  # neither a sample nor a sidecar
    seconds: float


def ids_by_outcome(
    plan: Plan, built: Sequence[Built], before: Iterable[Partition]
) -> dict[str, tuple[str, ...]]:
    """The lists of a report: what became of the partitions of `plan` and of the base's."""
    by_outcome = {
        outcome: _names(item.partition for item in built if item.outcome is outcome)
        for outcome in Outcome
    }
    now = {*_names((*plan.reused, *plan.kept)), *_names(item.partition for item in built)}
    return {
        "built": by_outcome[Outcome.BUILT],
        "refreshed": by_outcome[Outcome.REFRESHED],
        "reused": tuple(sorted((*_names(plan.reused), *by_outcome[Outcome.UNCHANGED]))),
        "kept": _names(plan.kept),
        "dropped": tuple(name for name in _names(before) if name not in now),
    }


def _names(parts: Iterable[Partition]) -> tuple[str, ...]:
    return tuple(part.id for part in parts)
