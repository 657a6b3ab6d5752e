"""What differs between two states of a partition, sample by sample. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from fsmount.formats.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Changes:
    """Numbers of samples that one state has and another hasn't, or has otherwise."""

    added: int = 0
    removed: int = 0
    changed: int = 0  # other tensors
    metadata: int = 0  # the same tensors, another sidecar or other texts

    def __add__(self, other: Changes) -> Changes:
        sums = {part.name: getattr(self, part.name) + getattr(other, part.name) for part in _PARTS}
        return Changes(**sums)


_PARTS = fields(Changes)


def count_changes(before: Manifest, after: Manifest) -> Changes:
    """Compare the samples of two manifests, which need all their columns; FormatError."""
    old, new = _content(before), _content(after)
    both = old.keys() & new.keys()
    changed = sum(old[key][0] != new[key][0] for key in both)
    return Changes(
        added=len(new) - len(both),
        removed=len(old) - len(both),
        changed=changed,
        metadata=sum(old[key] != new[key] for key in both) - changed,
    )


def _content(found: Manifest) -> Mapping[str, tuple[bytes, object]]:
    """The fingerprint of each sample's tensors, and all else that it has, by key."""
    return {row.key: (row.sha256, (row.texts, row.sidecar)) for row in found.rows()}
