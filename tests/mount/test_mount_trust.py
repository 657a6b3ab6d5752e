"""What a mount shows follows from the table's digest, whoever writes the store or a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from mounting import wait_for
from serving import both_drivers

from fsmount.errors import MountError
from fsmount.formats import document as documents
from fsmount.formats import table as tables
from fsmount.formats.table import document_of_table
from fsmount.model import Version
from fsmount.mount import lifecycle, records
from fsmount.mount.ending import umount
from fsmount.mount.request import FUSEPY, KERNEL, MountRequest
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs import pathlist
from fsmount.vfs.layout import VersionFiles, usage, version_tree
from fsmount.vfs.mapped import list_name
from fsmount.vfs.reads import Verify

pytestmark = pytest.mark.mounted


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"))


@pytest.fixture
def version(store: Store) -> Version:
    return tiny.publish(store, "v1", {"p": [tiny.numbered("p/x", 1)]})


def forge(store: Store, version: Version, directory: str) -> None:
    """Put a list into `directory` that shows other bytes, and a file more, under the version."""
    other = b"other bytes"
    with store.staging() as staging:
        ref = store.objects.put(other, staging)
    table = version.document.table
    untagged = document_of_table(table, tables.decode(store.objects.read(table)))
    for document in (version.document, untagged):
        text = documents.encode(document)
        tree = version_tree(version, text)
        files = dict(tree.files())
        forged = VersionFiles(
            {**files, "shards/p/000000.tar": ref, "train.py": b"import os\n"},
            ("manifests", "shards"),
        )
        Path(directory).mkdir(parents=True, exist_ok=True)
        data = pathlist.encode(forged, usage(forged), text)
        Path(directory, list_name(text)).write_bytes(data)


def everything(root: str) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(root).rglob("*"))
        if path.is_file()
    }


@both_drivers
def test_a_list_in_the_store_is_not_believed(
    store: Store, version: Version, mountpoint: str, driver: str
) -> None:
    forge(store, version, f"{store.path}/cache/paths")
    shard = version.partitions[0].shards[0].digest
    for ref in ("v1", f"sha256:{version.document.table.digest}"):
        lifecycle.mount(MountRequest(store.path, ref, mountpoint, Verify.OPEN, driver=driver))
        try:
            found = everything(mountpoint)
        finally:
            umount(mountpoint)
        assert found["shards/p/000000.tar"] == shard
        assert "train.py" not in found


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cache directory that belongs to another user."""
    path = tmp_path / "theirs"
    path.mkdir()
    os.chown(path, 65534, 65534)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return str(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
@pytest.mark.parametrize("ref", ["v1", None])
def test_without_a_cache_of_our_own(
    store: Store, version: Version, mountpoint: str, theirs: str, ref: str | None
) -> None:
    """Another user's directory is not believed, and the list outlives the server."""
    forge(store, version, f"{theirs}/fsmount/paths")
    lifecycle.mount(MountRequest(store.path, ref, mountpoint, driver=KERNEL))
    try:
        root = mountpoint if ref else f"{mountpoint}/latest"
        before = everything(root)
        assert before["shards/p/000000.tar"] == version.partitions[0].shards[0].digest
        assert "train.py" not in before
        server = served_by(mountpoint)
        os.kill(server, signal.SIGKILL)
        assert everything(root) == before
        wait_for(lambda: served_by(mountpoint) != server)
    finally:
        umount(mountpoint)


def served_by(root: str) -> int:
    [found] = [one.record for one in records.mounted() if one.record.mountpoint == root]
    assert found.server_pid is not None
    return found.server_pid


def damage(path: str) -> bytes:
    """Change a byte in place; size and time of modification stay."""
    before, whole = os.stat(path), Path(path).read_bytes()
    os.chmod(path, 0o644)
    Path(path).write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return whole


def what_fails(root: str) -> list[str]:
    """The files that can't be read, and why."""
    failed = []
    for path in sorted(Path(root).rglob("*")):
        if path.is_file():
            try:
                path.read_bytes()
            except OSError as error:
                failed.append(f"{path.relative_to(root)}: {error.strerror}")
    return failed


@both_drivers
def test_damage_is_an_error_of_that_file_alone(
    store: Store, version: Version, mountpoint: str, driver: str
) -> None:
    """Of the table too, where a list of the version's files is kept from before."""
    table, part = version.document.table, version.partitions[0]
    request = MountRequest(store.path, "v1", mountpoint, driver=driver)
    lifecycle.mount(request)
    umount(mountpoint)
    for shown, ref in (("partitions.parquet", table), ("manifests/p.parquet", part.manifest)):
        whole = damage(path := store.objects.path(ref.digest))
        if driver == FUSEPY and ref == table:
            with pytest.raises(MountError, match=f"{ref.digest} is damaged"):
                lifecycle.mount(request)
        else:
            lifecycle.mount(request)
            try:
                assert what_fails(mountpoint) == [f"{shown}: Input/output error"]
                Path(path).write_bytes(whole)
                assert what_fails(mountpoint) == []
            finally:
                umount(mountpoint)
        Path(path).write_bytes(whole)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@both_drivers
@pytest.mark.usefixtures("version", "cache")
def test_objects_of_another_store_are_not_reached_by_a_link(
    store: Store, mountpoint: str, tmp_path: Path, driver: str
) -> None:
    """Who mounts for others would show them what its owner keeps from them."""
    theirs = tmp_path / "theirs"
    shutil.copytree(store.path, theirs, ignore=shutil.ignore_patterns("objects"))
    (theirs / "objects").symlink_to(f"{store.path}/objects")
    request = MountRequest(str(theirs), "v1", mountpoint, driver=driver)
    with pytest.raises(MountError, match=f"{theirs}/objects is a symbolic link"):
        lifecycle.mount(request)
    if driver == FUSEPY:
        return
    lifecycle.mount(replace(request, store=store.path))  # its list of files is kept
    umount(mountpoint)
    lifecycle.mount(request)
    try:
        assert what_fails(mountpoint) == [
            f"{name}: Input/output error"
            for name in ("manifests/p.parquet", "partitions.parquet", "shards/p/000000.tar")
        ]
    finally:
        umount(mountpoint)
