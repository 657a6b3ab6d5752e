"""No step inside a store follows a symbolic link, and nothing in it blocks whoever reads it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from handmade import put_version

from fsmount.errors import FormatError, InvalidNameError, NotAStoreError, StoreError
from fsmount.model import LatestRef, TagRef
from fsmount.store import Store
from fsmount.store.inside import StorePath, store_path
from fsmount.testing import tiny

LONG_AGO = time.time() - 30 * 86400
PARTS = ("objects", "versions", "keysets", "leases", "staging")
FILES = ("leases/.clock", "latest.lock")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Somebody's directory, long untouched."""
    root = tmp_path / "elsewhere"
    (root / "thesis" / "chapter").mkdir(parents=True)
    (root / "thesis" / "chapter" / "text").write_text("years of work")
    (root / "settings.json").write_text("{}")
    for path in (*root.rglob("*"), root):
        os.utime(path, (LONG_AGO, LONG_AGO))
    return root


def below(root: Path) -> dict[str, float]:
    return {str(path): path.lstat().st_mtime for path in sorted([root, *root.rglob("*")])}


def replace_by_link(path: Path, target: Path) -> None:
    if path.is_dir():
        path.rename(path.with_name(f"{path.name}.was"))
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


def work(store: Store) -> None:
    """Everything that a pack does to a store."""
    store.sweep()
    with store.lease("pack") as lease:
        lease.renew()
        tiny.publish(store, "v2", {"p": [tiny.numbered("p/x", 2)]})
        tiny.put_keyset(store, store.version(LatestRef()), "one", ["p/x"])


def open_and_work(path: str) -> None:
    store = Store.open(path)
    store.resolve(TagRef("v1"))
    work(store)


@pytest.mark.parametrize("name", PARTS)
def test_a_directory_that_is_a_link(store: Store, elsewhere: Path, name: str) -> None:
    tiny.publish(store, "v1", {"p": [tiny.numbered("p/x", 1)]})
    before = below(elsewhere)
    replace_by_link(Path(store.path, name), elsewhere)
    with pytest.raises(StoreError, match=f"{store.path}/{name} is a symbolic link"):
        work(store)
    assert below(elsewhere) == before


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_a_link(store: Store, tmp_path: Path, name: str) -> None:
    tiny.publish(store, "v1", {"p": [tiny.numbered("p/x", 1)]})
    replace_by_link(Path(store.path, name), tmp_path / "made")
    with pytest.raises(StoreError, match=f"{store.path}/{name} is a symbolic link"):
        work(store)
    assert not (tmp_path / "made").exists()


def test_a_link_deeper_inside(store: Store, elsewhere: Path) -> None:
    version = tiny.publish(store, "v1", {"p": [tiny.numbered("p/x", 1)]})
    table = version.document.table
    before = below(elsewhere)
    objects = Path(store.path, "objects", table.digest[:2])
    objects.rename(elsewhere / "objects")
    objects.symlink_to(elsewhere / "objects")
    for look in (store.objects.verify, store.objects.check, store.objects.has, store.objects.read):
        with pytest.raises(StoreError, match=f"{objects} is a symbolic link"):
            look(table)
    with pytest.raises(StoreError, match="is a symbolic link"), store.staging() as staging:
        store.objects.put(Path(elsewhere, "objects", table.digest).read_bytes(), staging)
    keysets = Path(store.path, "keysets", table.digest)
    keysets.symlink_to(elsewhere)
    with pytest.raises(StoreError, match=f"{keysets} is a symbolic link"):
        store.keysets(table.digest)
    (elsewhere / "objects" / table.digest).unlink()
    (elsewhere / "objects").rmdir()
    os.utime(elsewhere, (LONG_AGO, LONG_AGO))
    assert below(elsewhere) == before


def test_staging_of_the_dead_that_is_a_link_or_a_fifo(store: Store, elsewhere: Path) -> None:
    """A stale lease of its name makes it go; what it names stays."""
    before = below(elsewhere)
    staging = Path(store.path, "staging")
    (staging / "link").symlink_to(elsewhere)
    (staging / "dead").mkdir()
    (staging / "dead" / "link").symlink_to(elsewhere)
    os.mkfifo(staging / "fifo")
    for name in ("link", "fifo", "dead"):
        lease = Path(store.path, "leases", f"{name}.json")
        lease.write_text("{}")
        os.utime(lease, (LONG_AGO, LONG_AGO))
    store.sweep()
    assert sorted(os.listdir(staging)) == ["fifo", "link"]
    assert below(elsewhere) == before


SWAP = """
import itertools, os, sys
from contextlib import suppress
directory, target = sys.argv[1:]
print(flush=True)
for number in itertools.count():
    with suppress(FileNotFoundError):
        os.rename(directory, f"{directory}.{number}")
    with suppress(FileExistsError):
        os.symlink(target, directory)
        os.unlink(directory)
"""


def test_a_link_that_comes_and_goes(store: Store, elsewhere: Path) -> None:
    """Between any check and any use: nothing is made, changed or removed behind the link."""
    before = below(elsewhere)
    staging = f"{store.path}/staging"
    with subprocess.Popen(
        [sys.executable, "-c", SWAP, staging, str(elsewhere)], stdout=subprocess.PIPE
    ) as swapper:
        assert swapper.stdout is not None
        swapper.stdout.readline()
        told = set()
        try:
            for number in range(300):
                try:
                    with store.staging() as fresh:
                        store.objects.put(b"%d" % number, fresh)
                    told.add("done")
                except StoreError as error:
                    told.add("link" if "symbolic link" in str(error) else "gone")
        finally:
            swapper.kill()
    assert below(elsewhere) == before
    assert len(told) > 1


def test_the_root_may_be_reached_through_links(store: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store.path)
    work(Store.open(str(tmp_path / "link")))
    assert store.latest() == "v2"


@pytest.mark.parametrize("name", ["store.json", "latest.json", "versions/v1.json", *FILES])
def test_what_would_block_or_never_end(store: Store, name: str) -> None:
    tiny.publish(store, "v1", {"p": [tiny.numbered("p/x", 1)]})
    path = Path(store.path, name)
    for make in (
        os.mkfifo,
        lambda it: os.symlink("/dev/zero", it),
        lambda it: os.truncate(os.open(it, os.O_CREAT | os.O_RDWR), 1 << 40),
    ):
        path.unlink(missing_ok=True)
        make(path)
        if name in FILES and path.is_file():
            continue  # nobody reads it
        with pytest.raises((FormatError, StoreError), match=str(path)):
            open_and_work(store.path)


def test_a_table_beyond_any_size(store: Store) -> None:
    document = put_version(store, "v1", {"p": b"bytes"})
    path = Path(store.objects.path(document.table.digest))
    path.chmod(0o644)
    os.truncate(path, 1 << 40)
    huge = type(document.table)(document.table.digest, 1 << 40)
    with pytest.raises(FormatError, match=f"{path} has .* bytes; no more than .* are read"):
        store.objects.read(huge)


def test_paths_inside() -> None:
    path = StorePath("/root", "a") / "b"
    assert (path, path.name, path.directory, path.root) == ("/root/a/b", "b", "/root/a", "/root")
    again = pickle.loads(pickle.dumps(path))  # noqa: S301
    assert (again, again.names) == (path, ("a", "b"))
    for name in ("", ".", "..", "a/b"):
        with pytest.raises(InvalidNameError):
            StorePath("/root", name)


@pytest.mark.parametrize("text", ["s3://bucket/store", "file:///x", "gs://b", "a+b.c-1://x"])
def test_a_url_is_no_store(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (Store.open, Store.create, Store.exists, store_path):
        with pytest.raises(NotAStoreError, match="URLs are not supported"):
            use(text)
    assert os.listdir() == []


def test_a_path_that_looks_like_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert store_path("./s3://b") == f"{tmp_path}/s3:/b"
    assert store_path("s3:/b") == f"{tmp_path}/s3:/b"


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(NotAStoreError, match="the working directory is gone"):
        store_path("store")
