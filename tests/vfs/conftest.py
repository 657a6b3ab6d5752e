"""Tiny stores, looked at through the vfs without any mount."""

from __future__ import annotations

from pathlib import Path

import pytest
from looking import Show

from fsmount.model import Version
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs.filesystem import Owner
from fsmount.vfs.reads import ObjectReader, Verify
from fsmount.vfs.version import Look, VersionTree

PARTITIONS = {
    "a": [tiny.numbered("a/x", 0)],
    "a/b": [tiny.numbered(f"a/b/{n}", n) for n in range(7)],
    "root_": [tiny.numbered("top.one", 2)],
    "new\nline": [tiny.numbered("new\nline/y", 5)],
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"))


@pytest.fixture
def version(store: Store) -> Version:
    return tiny.publish(store, "v1", PARTITIONS)


@pytest.fixture
def show(store: Store) -> Show:
    """Makes the tree of a version, as a fresh server would."""

    def make(version: Version, verify: Verify = Verify.SIZE, **look: bool) -> VersionTree:
        return VersionTree(
            version,
            store.keysets_of(version.document.table.digest),
            ObjectReader(store.objects, verify),
            Look(Owner(12, 34), **look),
        )

    return make
