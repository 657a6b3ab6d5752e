"""Real mounts that leave nothing behind, and tiny stores to mount."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mounting import sweep

from fsmount.model import Version
from fsmount.mount import lifecycle
from fsmount.mount.ending import umount
from fsmount.mount.mountinfo import all_mounts
from fsmount.mount.request import MountRequest
from fsmount.store import Store
from fsmount.testing import tiny


@pytest.fixture(scope="session", autouse=True)
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Our own records and logs; no stale mount before, none at all after."""
    base = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        sweep(str(base.parent), only_dead=True)
        yield
        sweep(str(base), only_dead=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """An empty store of the module's own."""
    return Store.create(str(tmp_path_factory.mktemp("data") / "store"))


@pytest.fixture(scope="module")
def version(store: Store) -> Version:
    """Two small partitions as `v1`."""
    return tiny.publish(
        store,
        "v1",
        {
            "drive/a b": [tiny.numbered(f"drive/a b/{n}", n) for n in range(7)],
            "root_": [tiny.numbered("top", 1)],
        },
    )


@pytest.fixture
def mountpoint(tmp_path: Path) -> str:
    """An empty directory."""
    path = tmp_path / "mnt"
    path.mkdir()
    return str(path)


@pytest.fixture
def mounter(mountpoint: str) -> Iterator[Callable[[MountRequest], str]]:
    """Mounts a request at `mountpoint`, and unmounts after the test."""

    def mount(request: MountRequest) -> str:
        lifecycle.mount(replace(request, mountpoint=mountpoint))
        return mountpoint

    yield mount
    if os.path.realpath(mountpoint) in {mount.mountpoint for mount in all_mounts()}:
        umount(mountpoint, lazy=True)
