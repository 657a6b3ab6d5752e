"""How objects are opened, and what is remembered of it."""

from __future__ import annotations

import errno
import os

import pytest

from fsmount.errors import StoreError
from fsmount.store import Store
from fsmount.vfs import reads
from fsmount.vfs.reads import ObjectReader, Verify


@pytest.mark.parametrize("times", [1, 2])
def test_a_stale_handle_is_opened_again_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    store = Store.create(str(tmp_path_factory.mktemp("stale") / "store"))
    with store.staging() as staging:
        ref = store.objects.put(b"0123456789", staging)
    handle = ObjectReader(store.objects).open(ref, "x", 1)
    before, open_files = handle.fd, len(os.listdir("/proc/self/fd"))
    left, real = [times], os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "stale")
        return real(fd, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    if times == 1:
        assert handle.read(4, 3) == b"3456"
    else:
        with pytest.raises(StoreError, match="x: can't read object"):
            handle.read(4, 3)
    assert handle.fd == before
    assert len(os.listdir("/proc/self/fd")) == open_files
    handle.close()


def test_of_nodes_that_were_opened_only_so_many_are_remembered(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that is forgotten, what the kernel has cached is not used again."""
    monkeypatch.setattr(reads, "_REMEMBERED", 3)
    with store.staging() as staging:
        ref = store.objects.put(b"0123456789", staging)
    reader = ObjectReader(store.objects, Verify.OPEN)

    def is_as_before(node: int) -> bool:
        handle = reader.open(ref, "x", node)
        handle.close()
        return handle.keep_cache

    assert [is_as_before(node) for node in (1, 2, 3, 1)] == [False, False, False, True]
    assert [is_as_before(node) for node in (4, 1, 3, 2)] == [False, True, True, False]
    assert len(reader._last_opened) == 3
    assert not reader._hashing
