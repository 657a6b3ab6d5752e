"""The version that drivers are tested with, and where it is mounted."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from fsmount.formats import document as documents
from fsmount.model import ObjectRef, Version
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs.layout import Content, version_tree

MANY = 2500  # samples of one partition; each is two files or three
ODD_NAMES = (
    "with space",
    "dots.in.it",
    "ünï©ode/子",
    "new\nline",
    "back\\slash",
    "comma,=quote'\"",
)


@dataclass(frozen=True, slots=True)
class MountedVersion:
    """A version and where it is mounted."""

    root: str
    store: Store
    version: Version

    def files(self) -> dict[str, Content]:
        """What the fixed files must hold, by path from the root."""
        return dict(version_tree(self.version, documents.encode(self.version.document)).files())

    def objects(self) -> list[tuple[str, str]]:
        """Each file that is an object: its path on the mount and that of the object itself."""
        return [
            (f"{self.root}/{path}", self.store.objects.path(content.digest))
            for path, content in self.files().items()
            if isinstance(content, ObjectRef)
        ]

    def largest(self) -> tuple[str, str]:
        """The largest file that is an object, on the mount and in the store."""
        return max(self.objects(), key=lambda pair: os.path.getsize(pair[1]))


def publish_sample_version(store: Store, tag: str) -> Version:
    """Odd names, a directory of thousands of names, and a shard of some megabytes."""
    noise = np.random.default_rng(7)
    large = [
        tiny.Sample(f"large/{n}", {"noise": noise.integers(0, 256, 1 << 20, np.uint8)})
        for n in range(5)
    ]
    partitions = {
        "large": large,
        "many": [tiny.numbered(f"many/{n:06d}", n, size=1) for n in range(MANY)],
        **{name: [tiny.numbered(f"{name}/s {n}.x", n) for n in range(4)] for name in ODD_NAMES},
    }
    return tiny.publish(store, tag, partitions, samples_a_shard=MANY)
