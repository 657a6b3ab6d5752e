"""The fusepy driver passes the suite of all drivers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsmount.mount import lifecycle
from fsmount.mount.ending import umount
from fsmount.mount.request import FUSEPY, MountRequest
from fsmount.store import Store
from fsmount.testing.driver_suite import DriverSuite
from fsmount.testing.mounted_version import MountedVersion, publish_sample_version


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MountedVersion]:
    base = tmp_path_factory.mktemp("conformance")
    store = Store.create(str(base / "store"))
    version = publish_sample_version(store, "v1")
    root = base / "mnt"
    root.mkdir()
    lifecycle.mount(MountRequest(store.path, "v1", str(root), driver=FUSEPY))
    try:
        yield MountedVersion(str(root), store, version)
    finally:
        umount(str(root))


@pytest.mark.mounted
class TestFusepy(DriverSuite):
    """Mounted as `fsmount mount` does."""
