"""What root's mount keeps of root's rights, and what it can do with that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import Mounter, request_for
from serving import both_drivers, processes_of

from fsmount.model import Version
from fsmount.mount import records
from fsmount.mount.request import KERNEL
from fsmount.privileges import KEPT
from fsmount.store import Store
from fsmount.testing import tiny

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up"),
]
SOMEBODY = 65534


def rights(pid: int) -> Iterator[dict[str, int]]:
    """The capability sets of each thread of a process, and whether it can gain new rights."""
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        names = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
        yield {**{name: int(fields[name], 16) for name in names}, "new": int(fields["NoNewPrivs"])}


def children(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, path.read_text().split())


@both_drivers
def test_roots_mount_keeps_three_rights(
    store: Store, version: Version, mounter: Mounter, driver: str
) -> None:
    """Who decodes samples for it has none."""
    del version
    root = mounter(request_for(store, driver=driver))
    assert Path(root, "samples/drive/a b/0.npz").read_bytes()
    [mine, *_] = rights(os.getpid())
    kept = {name: mine[name] & KEPT for name in ("CapPrm", "CapEff", "CapBnd")}
    wanted = {**kept, "CapInh": 0, "CapAmb": 0, "new": 1}
    serving = processes_of(root)
    for pid in serving:
        found = list(rights(pid))
        assert found
        assert [one for one in found if one != wanted] == []
    helpers = [pid for starter in children(serving[-1]) for pid in children(starter)]
    assert helpers
    nothing = {**wanted, "CapPrm": 0, "CapEff": 0}
    assert [one for pid in helpers for one in rights(pid) if one != nothing] == []


@both_drivers
def test_that_is_enough_for_a_private_store_of_another_user(
    mounter: Mounter, tmp_path: Path, driver: str
) -> None:
    """It is read and leased, and the kernel reads its objects itself where it can."""
    store = Store.create(str(tmp_path / "store"))
    tiny.publish(store, "v1", {"p": [tiny.numbered("p/x", 1)]})
    for path in (tmp_path / "store", *(tmp_path / "store").rglob("*")):
        os.chown(path, SOMEBODY, SOMEBODY)
        path.chmod(0o700 if path.is_dir() else 0o400)
    root = mounter(request_for(store, driver=driver, allow_other=True))
    assert Path(root, "shards/p/000000.tar").read_bytes()
    assert [lease.kind for lease in store.leases.live()] == ["mount"]
    record = records.read(root)
    assert record is not None
    assert (driver == KERNEL) == ("passthrough" in record.features)
