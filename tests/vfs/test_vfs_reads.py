"""Objects whose file server forgets who has opened them."""

from __future__ import annotations

import errno
import os

import pytest

from fsmount.errors import StoreError
from fsmount.store import Store
from fsmount.vfs.reads import ObjectReader


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
