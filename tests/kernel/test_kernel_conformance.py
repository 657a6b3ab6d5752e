"""The kernel driver passes the suite of all drivers, however it reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kernel_mounts import config_for
from kernel_mounts import mounted as mounted_by

from fsmount.store import Store
from fsmount.testing.driver_suite import DriverSuite
from fsmount.testing.mounted_version import MountedVersion, publish_sample_version

CASES: dict[str, dict[str, Any]] = {
    "passthrough": {},
    "splice": {"passthrough": False},
    "copy": {"passthrough": False, "splice": False},
}


@pytest.fixture(scope="module", params=CASES)
def mounted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MountedVersion]:
    base = tmp_path_factory.mktemp("conformance")
    store = Store.create(str(base / "store"))
    version = publish_sample_version(store, "v1")
    root = base / "mnt"
    root.mkdir()
    config = config_for(store, str(root), **CASES[request.param])
    with mounted_by(config, str(base / "log")):
        yield MountedVersion(str(root), store, version)


@pytest.mark.mounted
class TestKernel(DriverSuite):
    """As the user who runs the tests."""
