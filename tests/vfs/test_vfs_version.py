"""One version as a file system, every path of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from looking import Show, find, read, walk

from fsmount.errors import FormatError, IntegrityError, ObjectMissingError
from fsmount.formats import document as documents
from fsmount.model import Digest, ObjectRef, Version
from fsmount.store import Store
from fsmount.store.refs import Keysets
from fsmount.testing import tiny
from fsmount.vfs import layout
from fsmount.vfs.filesystem import FOREVER, ROOT_NODE, Kind
from fsmount.vfs.reads import ObjectReader, Verify


def damage(store: Store, digest: Digest, change: str) -> str:
    """Change an object behind the store's back: "flip" a byte, "cut" the last one, or "remove"."""
    path = store.objects.path(digest)
    if change == "remove":
        os.unlink(path)
        return path
    os.chmod(path, 0o644)
    with open(path, "r+b") as file:
        if change == "cut":
            file.truncate(os.path.getsize(path) - 1)
        else:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
    return path


def test_every_file_is_its_object(store: Store, version: Version, show: Show) -> None:
    tree = show(version)
    files = dict(layout.version_tree(version, documents.encode(version.document)).files())
    listed = {path for path, entry in walk(tree) if entry.kind is Kind.FILE}
    assert listed == files.keys()
    for path, content in files.items():
        data = read(tree, path)
        assert data == (store.objects.read(content) if isinstance(content, ObjectRef) else content)
    assert read(tree, "VERSION.json") == documents.encode(version.document)
    assert documents.decode(read(tree, "VERSION.json")) == version.document


def test_lookup_listing_and_getattr_agree(version: Version, show: Show) -> None:
    tree = show(version, list_samples=True)
    seen = {ROOT_NODE}
    for path, entry in walk(tree):
        node = find(tree, path)
        answer = tree.getattr(node)
        assert node == entry.node == answer.attr.node
        assert tree.path(node) == path
        assert answer.attr.kind == entry.kind
        assert answer.ttl == FOREVER
        assert (answer.attr.uid, answer.attr.gid) == (12, 34)
        assert answer.attr.time_ns == 1_714_979_289 * 10**9  # CREATED_AT
        assert node not in seen
        seen.add(node)
        if entry.kind is Kind.DIRECTORY:
            whole = list(tree.readdir(node))
            for at, one in enumerate(whole, 1):
                assert list(tree.readdir(node, one.offset)) == whole[at:]


def test_numbers_are_the_same_in_another_server(version: Version, show: Show) -> None:
    first, second = show(version, list_samples=True), show(version, list_samples=True)
    for path in reversed([path for path, _ in walk(first)]):
        node = find(first, path)
        assert find(second, path) == node
        assert second.getattr(node) == first.getattr(node)


def test_a_version_without_partitions_has_its_directories(store: Store, show: Show) -> None:
    tree = show(tiny.publish(store, "empty", {}), list_samples=True)
    names = ["SHA256SUMS", "VERSION.json", "keysets", "manifests", "partitions.parquet", "samples"]
    assert [path for path, _ in walk(tree)] == [*names, "shards"]
    assert tree.getattr(ROOT_NODE).attr.nlink == 2 + 4


def test_errors(version: Version, show: Show) -> None:
    tree = show(version)
    file, directory = find(tree, "VERSION.json"), find(tree, "shards/a")
    sample, samples = find(tree, "samples/a/x.npz"), find(tree, "samples/a")
    for parent in (file, sample):
        with pytest.raises(NotADirectoryError):
            tree.lookup(parent, "x")
        with pytest.raises(NotADirectoryError):
            tree.readdir(parent)
    for node in (directory, samples, ROOT_NODE):
        with pytest.raises(IsADirectoryError):
            tree.open(node)
        with pytest.raises(FileNotFoundError):
            tree.lookup(node, "nothing")
    for node in (0, 10**6, 1 << 40 | 7, 2 << 40 | 10**9, 3 << 40 | 10**9, 9 << 40, 3 << 40 | 1000):
        with pytest.raises(OSError, match="Stale") as caught:
            tree.getattr(node)
        assert caught.value.errno == errno.ESTALE
    with pytest.raises(OSError, match="no symbolic link"):
        tree.readlink(file)


def test_many_keysets_are_read_once_each(
    store: Store, version: Version, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `ls -l` asks costs a look at the names and each document once."""
    names = [f"k{number}" for number in range(30)]
    for name in names:
        tiny.put_keyset(store, version, name, ["a/x"])
    counted = {"names": 0, "read": 0}
    for method in counted:
        real = getattr(Keysets, method)

        def count(*args: Any, method: str = method, real: Callable[..., Any] = real) -> Any:
            counted[method] += 1
            return real(*args)

        monkeypatch.setattr(Keysets, method, count)
    tree = show(version)
    keysets = find(tree, "keysets")
    listed = list(tree.readdir(keysets))
    assert counted == {"names": 1, "read": 0}
    for entry in listed:
        assert tree.lookup(keysets, entry.name).node == entry.node
        assert tree.getattr(entry.node).attr.size > 0
    assert sorted(entry.name for entry in listed) == sorted(f"{name}.parquet" for name in names)
    assert counted == {"names": 1, "read": len(names)}


def test_a_damaged_keyset_is_an_error_under_its_own_name(
    store: Store, version: Version, show: Show
) -> None:
    for name in ("good", "bad"):
        tiny.put_keyset(store, version, name, ["a/x"])
    path = Path(store.path, "keysets", version.document.table.digest, "bad.json")
    path.unlink()
    path.write_text("{}")
    tree = show(version)
    assert len(list(tree.readdir(find(tree, "keysets")))) == 2
    assert read(tree, "keysets/good.parquet")
    with pytest.raises(FormatError, match=str(path)):
        find(tree, "keysets/bad.parquet")


def test_keysets_appear_and_stay(store: Store, version: Version, show: Show) -> None:
    tree = show(version)
    directory = find(tree, "keysets")
    assert list(tree.readdir(directory)) == []
    with pytest.raises(FileNotFoundError):
        find(tree, "keysets/one.parquet")
    one = tiny.put_keyset(store, version, "one", ["a/x"])
    node = find(tree, "keysets/one.parquet")
    assert read(tree, "keysets/one.parquet") == store.objects.read(one.keys)
    [listed] = tree.readdir(directory)
    for name in ("two", "three", "four"):
        tiny.put_keyset(store, version, name, ["a/b/1", "a/b/2"])
    assert find(tree, "keysets/one.parquet") == node
    everything = {entry.name for entry in tree.readdir(directory)}
    before = {e.name for e in tree.readdir(directory) if e.offset <= listed.offset}
    behind = {e.name for e in tree.readdir(directory, listed.offset)}
    assert (
        before | behind == everything == {f"{n}.parquet" for n in ("one", "two", "three", "four")}
    )
    assert not before & behind
    assert find(show(version), "keysets/two.parquet") == find(tree, "keysets/two.parquet")


def test_usage_is_that_of_the_files(version: Version, show: Show) -> None:
    tree = show(version)
    sizes = [tree.getattr(e.node).attr.size for _, e in walk(tree) if e.kind is Kind.FILE]
    assert tree.statfs().blocks == sum(-(-size // 4096) for size in sizes)


FAULTS = {
    "remove": (ObjectMissingError, "is missing"),
    "cut": (IntegrityError, "bytes instead of"),
    "flip": (IntegrityError, "is damaged: its bytes have the digest"),
}


@pytest.mark.parametrize("change", FAULTS)
def test_a_fault_is_an_error_on_that_file_alone(
    store: Store, version: Version, show: Show, change: str
) -> None:
    error, cause = FAULTS[change]
    shard = next(p for p in version.partitions if p.id == "a/b").shards[0]
    tree = show(version, Verify.OPEN)
    path = damage(store, shard.digest, change)
    with pytest.raises(error, match=cause) as caught:
        read(tree, "shards/a/b/000000.tar")
    assert str(caught.value).startswith("shards/a/b/000000.tar: object ")
    assert path in str(caught.value)
    for other, entry in walk(tree):
        if entry.kind is Kind.FILE and other != "shards/a/b/000000.tar":
            read(tree, other)


def test_a_flipped_byte_is_not_noticed_by_size_alone(
    store: Store, version: Version, show: Show
) -> None:
    shard = version.partitions[-1].shards[0]
    damage(store, shard.digest, "flip")
    assert len(read(show(version, Verify.SIZE), "shards/root_/000000.tar")) == shard.size


def test_an_object_is_hashed_once_for_each_state_of_its_file(
    store: Store, version: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # as on another host than the packer's
    ref = version.document.table
    reader = ObjectReader(store.objects, Verify.OPEN)
    hashed: list[str] = []
    once = ObjectReader._hash

    def counted(self: ObjectReader, fd: int, ref: ObjectRef, about: str) -> None:
        hashed.append(about)
        once(self, fd, ref, about)

    monkeypatch.setattr(ObjectReader, "_hash", counted)
    for _ in range(3):
        reader.open(ref, "x", 5).close()
    ObjectReader(store.objects, Verify.OPEN).open(ref, "y", 5).close()  # another server
    assert hashed == ["x"]
    damage(store, ref.digest, "flip")
    for _ in range(2):
        with pytest.raises(IntegrityError):
            reader.open(ref, "x", 5)
    assert len(hashed) == 3


def test_the_cache_is_kept_only_while_the_file_is_the_same(store: Store, version: Version) -> None:
    ref, reader = version.document.table, ObjectReader(store.objects)
    assert [reader.open(ref, "x", node).keep_cache for node in (5, 5, 6, 5)] == [
        False, True, False, True,
    ]  # fmt: skip
    data = store.objects.read(ref)
    path = damage(store, ref.digest, "remove")
    with open(path, "wb") as file:
        file.write(data)
    assert not reader.open(ref, "x", 5).keep_cache


def test_an_object_cut_while_open_is_never_a_short_read(store: Store, version: Version) -> None:
    shard = version.partitions[-1].shards[0]
    handle = ObjectReader(store.objects).open(shard, "x", 5)
    damage(store, shard.digest, "cut")
    with pytest.raises(IntegrityError, match=f"ends at byte {shard.size - 1} instead of"):
        handle.read(100, shard.size - 50)
    assert len(handle.read(10, 0)) == 10
    assert handle.read(10, shard.size) == b""
    handle.close()


def test_a_failing_disk_is_an_error_with_its_cause(
    store: Store, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = ObjectReader(store.objects).open(version.document.table, "x", 5)

    def fail(*args: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(Exception, match=r"x: can't read object .* at byte 7: Input/output error"):
        handle.read(100, 7)


def test_short_preads_are_continued(
    store: Store, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread
    handle = ObjectReader(store.objects).open(version.document.table, "x", 5)
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 7), offset))
    assert handle.read(100, 3) == store.objects.read(version.document.table)[3:103]


def test_a_link_or_pipe_in_the_place_of_an_object_is_refused(
    store: Store, version: Version, show: Show
) -> None:
    shard = version.partitions[-1].shards[0]
    path = damage(store, shard.digest, "remove")
    os.symlink("/etc/passwd", path)
    with pytest.raises(FormatError, match="not a regular file"):
        read(show(version), "shards/root_/000000.tar")
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(FormatError, match="not a regular file"):
        read(show(version), "shards/root_/000000.tar")
