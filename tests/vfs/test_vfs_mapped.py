"""A mapped path list is the tree that it was made of."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from looking import Show, find, read, walk

from fsmount.errors import FormatError
from fsmount.formats import document as documents
from fsmount.model import Digest, ObjectRef, Version
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs import mapped, pathlist
from fsmount.vfs.decoding import Decoding
from fsmount.vfs.filesystem import ROOT_NODE, Kind, Owner, Usage
from fsmount.vfs.layout import Content, VersionFiles
from fsmount.vfs.parted import Look, PartedTree
from fsmount.vfs.pathlist import PathList
from fsmount.vfs.reads import ObjectReader
from fsmount.vfs.sample_data import SampleData
from fsmount.vfs.version import VersionTree

names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1)
refs = st.builds(
    lambda data, size: ObjectRef(Digest(hashlib.sha256(data).hexdigest()), size),
    st.binary(max_size=3),
    st.integers(0, 1 << 62),
)
contents: st.SearchStrategy[Content] = st.one_of(st.binary(max_size=20), refs)
paths = st.lists(names, min_size=1, max_size=4).map("/".join)


@given(st.dictionaries(paths, contents, max_size=30), st.binary(max_size=9))
def test_it_is_the_same_tree(files: dict[str, Content], document: bytes) -> None:
    try:
        tree = VersionFiles(files)
    except FormatError:  # one path is a file and a directory
        return
    usage = Usage(5, len(tree))
    flat = PathList(memoryview(pathlist.encode(tree, usage, document)))
    assert (flat.document, flat.usage, len(flat)) == (document, usage, len(tree))
    assert len(flat) not in flat
    assert -1 not in flat
    for place in range(len(tree)):
        assert place in flat
        for question in (
            "path", "name", "content", "size", "is_directory", "subdirectories", "parent"
        ):  # fmt: skip
            asked = getattr(flat, question)(place)
            assert asked == getattr(tree, question)(place), question
        assert list(flat.children(place)) == list(tree.children(place))
        assert place == 0 or flat.child(flat.parent(place), flat.name(place)) == place
        for name in ("nothing", "", "a/b", "\udcff", "x\0y"):
            assert flat.child(place, name) == tree.child(place, name)


@pytest.fixture
def list_path(version: Version) -> str:
    path = mapped.prepare(version.document, lambda: version)
    assert isinstance(path, str)
    return path


def shown(store: Store, where: str | int) -> PartedTree:
    reader = ObjectReader(store.objects)
    return mapped.mapped_version(
        pathlist.open_list(where),
        store.path,
        reader,
        SampleData(Decoding(), reader),
        Look(Owner(12, 34), list_samples=True),
    )


def test_a_mapped_version_is_the_version(
    store: Store, version: Version, list_path: str, show: Show
) -> None:
    mine, theirs = shown(store, list_path), show(version, list_samples=True)
    everything = dict(walk(theirs))
    assert dict(walk(mine)) == everything
    assert mine.statfs() == theirs.statfs()
    for path, entry in everything.items():
        assert mine.getattr(entry.node) == theirs.getattr(entry.node)
        if entry.kind is Kind.FILE:
            assert read(mine, path) == read(theirs, path)
    tiny.put_keyset(store, version, "one", ["a/x"])
    assert read(mine, "keysets/one.parquet") == read(theirs, "keysets/one.parquet")


def test_parents_and_what_is_settled(
    store: Store, version: Version, list_path: str, show: Show
) -> None:
    for tree in (shown(store, list_path), show(version, list_samples=True)):
        assert tree.parent(ROOT_NODE) == ROOT_NODE
        for path, entry in walk(tree):
            above = find(tree, path.rpartition("/")[0]) if "/" in path else ROOT_NODE
            if entry.kind is Kind.DIRECTORY:
                assert tree.parent(entry.node) == above
            else:
                with pytest.raises(NotADirectoryError):
                    tree.parent(entry.node)
            if not path.startswith("samples") or entry.kind is Kind.FILE:
                assert tree.settled(entry.node) is not path.startswith("keysets")
            assert tree.grows(entry.node) is (path == "keysets")
        assert list(tree.growing()) == [find(tree, "keysets")]
        assert all(tree.settled(e.node) for p, e in walk(tree) if p.startswith("samples"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fsmount" / "paths"


def test_a_list_is_made_once_and_again_if_it_is_damaged(
    store: Store, version: Version, cache: Path
) -> None:
    def load() -> Version:
        loaded.append(1)
        return version

    loaded: list[int] = []
    path = mapped.prepare(version.document, load)
    assert isinstance(path, str)
    assert os.path.dirname(path) == str(cache)
    assert mapped.prepare(version.document, load) == path
    assert len(loaded) == 1
    whole = Path(path).read_bytes()
    for damaged in (whole[:-1], b"", whole[:100] + b"x" + whole[101:], whole + b"x"):
        Path(path).write_bytes(damaged)
        with pytest.raises(FormatError):
            pathlist.open_list(path)
        assert mapped.prepare(version.document, load) == path
        assert Path(path).read_bytes() == whole
    for make in (os.mkfifo, lambda it: os.symlink("/dev/zero", it), lambda it: os.mkdir(it, 0o700)):
        os.unlink(path)
        make(path)
        with pytest.raises(OSError, match=re.escape(path)):
            pathlist.open_list(path)
        again = mapped.prepare(version.document, load)
        assert read(shown(store, again), "VERSION.json") == documents.encode(version.document)
        assert os.listdir(cache) == [os.path.basename(path)]
        if isinstance(again, int):  # a directory is in the way
            os.rmdir(path)
            Path(path).touch()


def test_without_a_private_directory_a_list_is_in_memory(
    store: Store, version: Version, cache: Path
) -> None:
    path = mapped.prepare(version.document, lambda: version)
    everything = dict(walk(shown(store, path)))
    cache.chmod(0o777)
    descriptor = mapped.prepare(version.document, lambda: version)
    assert isinstance(descriptor, int)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    with pytest.raises(PermissionError):
        os.write(descriptor, b"x")
    assert dict(walk(shown(store, descriptor))) == everything


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_lists_that_others_could_write_are_not_mapped(version: Version, cache: Path) -> None:
    path = mapped.prepare(version.document, lambda: version)
    assert isinstance(path, str)
    for change in (lambda: os.chmod(path, 0o620), lambda: os.chown(path, 1234, -1)):
        change()
        with pytest.raises(PermissionError):
            pathlist.open_list(path)
        assert mapped.prepare(version.document, lambda: version) == path
        assert pathlist.open_list(path).document == documents.encode(version.document)
    assert len(os.listdir(cache)) == 1


def test_lists_that_are_long_unused_are_removed(
    version: Version, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "_BYTES_MAX", 10_000)
    cache.mkdir(parents=True)
    for days in (0, 1, 2, 3):
        old = cache / f"{days}.paths"
        old.write_bytes(bytes(5000))
        os.utime(old, (time.time() - days * 86400,) * 2)
    path = mapped.prepare(version.document, lambda: version)
    assert sorted(os.listdir(cache)) == sorted(["0.paths", os.path.basename(str(path))])


def sealed(data: bytearray) -> PathList:
    """The list of these bytes, with a checksum that is right."""
    return PathList(memoryview(bytes(data[:-32]) + hashlib.sha256(data[:-32]).digest()))


def test_numbers_that_would_lead_astray(list_path: str) -> None:
    whole = Path(list_path).read_bytes()
    head = struct.Struct("=8sQQQQQQ")
    count = head.unpack_from(whole)[2]
    kinds = head.size
    offsets = kinds + count
    ends = offsets + 8 * count + 8
    links, sizes = ends + 8 * count, ends + 16 * count
    astray = {
        "a place that ends at itself": (ends + 8, 1),
        "a place that ends before itself": (ends + 16, 0),
        "an end behind all": (ends + 8, count + 1),
        "a root that ends early": (ends, 1),
        "an offset behind all": (offsets + 16, 1 << 40),
        "offsets that fall": (offsets + 8 * count - 8, 0),
        "more directories than places": (links, 1 << 40),
        "a size that no file has": (sizes + 8, (1 << 64) - 1),
    }
    for what, (at, number) in astray.items():
        data = bytearray(whole)
        data[at : at + 8] = number.to_bytes(8, sys.byteorder)
        with pytest.raises(FormatError):
            pytest.fail(f"taken: {what}: {sealed(data)}")
    data = bytearray(whole)
    data[kinds : kinds + count] = bytes([7]) * count
    with pytest.raises(FormatError):
        sealed(data)
    data = bytearray(whole)
    at = data.index(b"SHA256SUMS")
    data[at : at + 1] = b"\xff"
    with pytest.raises(FormatError, match="not UTF-8"):
        list(map(sealed(data).path, range(count)))


def test_a_list_belongs_to_its_document(store: Store, version: Version, list_path: str) -> None:
    text = documents.encode(version.document)
    assert mapped.is_list(list_path, text)
    assert not mapped.is_list(list_path, text + b" ")
    again = documents.encode(tiny.publish(store, "v2", {}).document)
    assert mapped.list_name(again) != mapped.list_name(text)
    assert isinstance(shown(store, list_path), PartedTree)
    assert issubclass(VersionTree, PartedTree)


def test_a_server_starts_without_anything_heavy() -> None:
    code = (
        "import sys, fsmount.mount.kernel.start\n"
        "heavy = {'numpy', 'pyarrow', 'duckdb', 'fuse', 'torch', 'click', 'zstandard'}\n"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
