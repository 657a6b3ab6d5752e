"""Kernel mounts that leave nothing behind, and small stores to mount."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kernel_mounts import KernelMount, Mounter, config_for, mounted, publish_large

from fsmount.mount.kernel.device import unmount
from fsmount.mount.mountinfo import FSTYPE, all_mounts
from fsmount.store import Store


@pytest.fixture(scope="session", autouse=True)
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Our own records; no mount of ours is left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        yield
    base = f"{tmp_path_factory.getbasetemp()}/"
    for mount in reversed(all_mounts()):
        if mount.fstype == FSTYPE and mount.mountpoint.startswith(base):
            unmount(mount.mountpoint, detach=True)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with shards of some megabytes; nobody changes it."""
    made = Store.create(str(tmp_path_factory.mktemp("data") / "store"))
    publish_large(made)
    return made


@pytest.fixture
def mount(store: Store, tmp_path: Path) -> Iterator[Mounter]:
    """Mounts a store (or `store`), with changes to the config; ends all mounts after the test."""
    with ExitStack() as stack:

        def make(of: Store = store, **more: Any) -> KernelMount:
            root = tmp_path / f"mnt{len(os.listdir(tmp_path))}"
            root.mkdir()
            config = replace(config_for(of, str(root)), **more)
            log = str(tmp_path / f"{root.name}.log")
            return stack.enter_context(mounted(config, log))

        yield make
