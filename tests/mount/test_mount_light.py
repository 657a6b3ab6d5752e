"""What lists, begins and ends mounts loads nothing that reads data: each command waits for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fsmount.model import Version
from fsmount.mount.mountinfo import mount_at
from fsmount.store import Store

HEAVY = "{'duckdb', 'fuse', 'numpy', 'pyarrow', 'rich', 'safetensors', 'torch', 'zstandard'}"


def loads_nothing_heavy(program: str, *args: str) -> None:
    code = f"{program}\nimport sys\nassert not {HEAVY} & set(sys.modules), set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, *args], check=True, timeout=120)


@pytest.mark.parametrize("module", ["records", "ending", "mountinfo", "lifecycle", "kernel.start"])
def test_a_module_of_mounts_is_light(module: str) -> None:
    loads_nothing_heavy(f"import fsmount.mount.{module}")


@pytest.mark.mounted
def test_mounting_listing_and_unmounting_are_light(
    store: Store, version: Version, mountpoint: str
) -> None:
    del version
    program = """
import sys
from fsmount.mount import ending, lifecycle, records
from fsmount.mount.request import MountRequest
store, mountpoint = sys.argv[1:]
lifecycle.mount(MountRequest(store, "v1", mountpoint))
assert mountpoint in [one.record.mountpoint for one in records.mounted()]
ending.umount(mountpoint)
"""
    loads_nothing_heavy(program, store.path, mountpoint)
    assert mount_at(mountpoint) is None
