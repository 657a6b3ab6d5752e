"""A store that can't be written says so in one line, and stays what it was."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from handmade import publish_version, put_version, verify_version

from fsmount.errors import StoreWriteError
from fsmount.model import LatestRef, TagRef
from fsmount.store import Store
from fsmount.store.inside import StorePath

OLD = {"a": b"old"}
NEW = {"a": b"new" * 3000, "b": b"old"}


def files(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def put(store: Store, data: bytes) -> None:
    with store.staging() as staging:
        store.objects.put(data, staging)


def test_an_object_that_does_not_fit_leaves_nothing(small_disk: Path) -> None:
    store = Store.create(str(small_disk / "store"))
    publish_version(store, "old", OLD)
    before = files(small_disk)
    with pytest.raises(StoreWriteError, match=r"can't write .*/staging/.*: No space left") as error:
        put(store, b"x" * (2 << 20))
    assert "\n" not in str(error.value)
    assert isinstance(error.value.__cause__, OSError)
    assert files(small_disk) == before
    verify_version(store, store.version(LatestRef()))
    put(store, b"what fits is written")


def test_publishing_at_every_fill_level(small_disk: Path) -> None:
    store = Store.create(str(small_disk / "store"))
    publish_version(store, "old", OLD)
    ballast = small_disk / "ballast"
    failed = 0
    for free in itertools.count():
        fill(ballast, free)
        try:
            publish_version(store, "new", NEW, replaces="old")
            break
        except StoreWriteError:
            failed += 1
        for document in store.versions():
            verify_version(store, store.version(TagRef(str(document.tag))))
        assert store.latest() == "old"
        assert list((small_disk / "store" / "staging").iterdir()) == []
    assert failed > 3
    assert store.latest() == "new"
    verify_version(store, store.version(TagRef("new")))


def fill(ballast: Path, free: int) -> None:
    """Leave `free` pages of the disk."""
    page = 4096
    ballast.unlink(missing_ok=True)
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * page)
        except OSError:
            file.truncate(max(0, (file.tell() // page - free) * page))


WRITES: list[Callable[[Store], object]] = [
    lambda store: store.staging().__enter__(),
    lambda store: store.lease("mount"),
    lambda store: store.leases.now(),
    lambda store: store.publish(store.resolve(LatestRef()), store.path),
    lambda store: Store.create(store.path + "2"),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_read_only_store(small_disk: Path, write: Callable[[Store], object]) -> None:
    writable = Store.create(str(small_disk / "store"))
    publish_version(writable, "old", OLD)
    document = put_version(writable, "new", NEW, replaces="old")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    store = Store.open(writable.path)
    assert Store.create(writable.path) == store
    verify_version(store, store.version(LatestRef()))
    assert [version.tag for version in store.versions()] == ["old"]
    assert store.leases.all() == ()
    assert store.keysets(document.table.digest) == {}
    with pytest.raises(StoreWriteError, match="Read-only file system"):
        write(store)
    with pytest.raises(StoreWriteError):
        store.publish(document, StorePath(store.path))
