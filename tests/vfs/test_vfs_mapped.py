"""A mapped path list is the tree that it was made of."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from looking import Show, find, read, walk

from fsmount.errors import FormatError, StoreError
from fsmount.formats import document as documents
from fsmount.model import Digest, ObjectRef, Version
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs import mapped, pathlist
from fsmount.vfs.filesystem import ROOT_NODE, Kind, Owner, Usage
from fsmount.vfs.layout import Content, VersionFiles
from fsmount.vfs.parted import Look, PartedTree
from fsmount.vfs.pathlist import PathList
from fsmount.vfs.reads import ObjectReader
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
def list_path(store: Store, version: Version) -> str:
    return mapped.prepare(version.document, lambda: version, [f"{store.cache_dir}/paths"])


def shown(store: Store, path: str) -> PartedTree:
    reader = ObjectReader(store.objects)
    return mapped.mapped_version(
        pathlist.open_list(path), store.path, reader, Look(Owner(12, 34), list_samples=True)
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
            late = path.startswith(("keysets", "samples"))
            assert tree.settled(entry.node) is not late
            assert tree.grows(entry.node) is (path == "keysets")
        assert list(tree.growing()) == [find(tree, "keysets")]


def test_a_list_is_made_once_and_again_if_it_is_damaged(
    store: Store, version: Version, tmp_path: Path
) -> None:
    def load() -> Version:
        loaded.append(1)
        return version

    loaded: list[int] = []
    places = [f"{tmp_path}/file/x", f"{tmp_path}/good"]
    (tmp_path / "file").touch()  # so there can be no directory
    path = mapped.prepare(version.document, load, places)
    assert path.startswith(f"{tmp_path}/good/")
    assert mapped.prepare(version.document, load, places) == path
    assert len(loaded) == 1
    whole = Path(path).read_bytes()
    for damaged in (whole[:-1], b"", whole[:100] + b"x" + whole[101:], whole + b"x"):
        Path(path).write_bytes(damaged)
        with pytest.raises(FormatError):
            pathlist.open_list(path)
        assert mapped.prepare(version.document, load, places) == path
        assert Path(path).read_bytes() == whole
    os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(FormatError, match="not a regular file"):
        pathlist.open_list(path)
    assert mapped.prepare(version.document, load, places) == path
    assert os.listdir(tmp_path / "good") == [os.path.basename(path)]
    with pytest.raises(StoreError, match="no place for the list"):
        mapped.prepare(version.document, load, places[:1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_lists_of_other_users_are_not_trusted(version: Version, tmp_path: Path) -> None:
    places = [f"{tmp_path}/theirs", f"{tmp_path}/mine"]
    first = mapped.prepare(version.document, lambda: version, places)
    assert first.startswith(places[0])
    os.chown(places[0], 1234, -1)
    assert mapped.prepare(version.document, lambda: version, places).startswith(places[1])


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
