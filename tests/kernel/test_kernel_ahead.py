"""What the loader announces of a file that is passed through is read by the kernel alone."""

from __future__ import annotations

import os

import pytest
from kernel_mounts import Mounter, bytes_read, is_backed, wait_for

from fsmount.model import TagRef
from fsmount.store import Store
from fsmount_loader.read import ShardFiles

pytestmark = [
    pytest.mark.mounted,
    pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this system can't tell"),
]


def is_cached(file: int, at: int) -> bool:
    """Whether the page cache has a byte of a file."""
    try:
        return os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def test_the_server_is_not_asked_for_what_is_announced(mount: Mounter, store: Store) -> None:
    served = mount()
    shown = f"{served.root}/shards/large/000000.tar"
    if not is_backed(served, shown):
        pytest.skip("no passthrough here")
    size = os.path.getsize(shown)
    (ref, *_) = store.version(TagRef("v1")).partitions[0].shards
    files = ShardFiles([shown])
    files.read(0, 0, memoryview(bytearray(1)))  # it is open now
    with open(store.objects.path(ref.digest), "rb") as file:
        below = file.fileno()
        os.sync()
        os.posix_fadvise(below, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(below, size // 2):
            pytest.skip("a file system that is its own cache")
        before = bytes_read(served)
        files.announce(0, 0, size)
        wait_for(lambda: all(is_cached(below, at) for at in (0, size // 2, size - 1)))
        assert bytes_read(served) - before < size // 16
    files.close()
