"""The pure parts: paths to places, checksums, node numbers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsmount.errors import FormatError
from fsmount.vfs import layout
from fsmount.vfs.filesystem import Kind, Owner, node_number, slot_and_place
from fsmount.vfs.keysets import hashed_places
from fsmount.vfs.tree import PathTree

names = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=3
).filter(lambda name: name not in (".", ".."))
paths = st.lists(names, min_size=1, max_size=4).map("/".join)


def without_clashes(found: list[str]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in found:
        above = {path[:at] for at, char in enumerate(path) if char == "/"}
        if not above & files.keys() and not any(p.startswith(f"{path}/") for p in files):
            files[path] = path.encode()
    return files


@given(st.lists(paths, max_size=40).map(without_clashes))
def test_a_tree_holds_what_a_dictionary_of_paths_holds(files: dict[str, bytes]) -> None:
    tree = PathTree(files)
    directories = {"", *(p[:at] for p in files for at, char in enumerate(p) if char == "/")}
    assert {tree.path(place) for place in range(len(tree))} == directories | files.keys()
    assert dict(tree.files()) == files
    for place in range(len(tree)):
        path = tree.path(place)
        children = [child for child, _ in tree.children(place)] if path in directories else []
        inside = {p for p in directories | files.keys() if p and p.rpartition("/")[0] == path}
        assert {tree.path(child) for child in children} == inside
        assert len(children) == len(inside)
        for child in children:
            assert tree.child(place, tree.name(child)) == child
        assert tree.is_directory(place) == (path in directories)
        if path in directories:
            assert tree.subdirectories(place) == len(inside & directories)


@given(st.lists(paths, min_size=1, max_size=40).map(without_clashes), st.data())
def test_a_listing_resumes_behind_any_entry(files: dict[str, bytes], data: st.DataObject) -> None:
    tree = PathTree(files)
    whole = list(tree.children(0))
    at = data.draw(st.integers(0, len(whole) - 1))
    assert list(tree.children(0, whole[at][1])) == whole[at + 1 :]


def test_a_path_that_is_file_and_directory_is_refused() -> None:
    with pytest.raises(FormatError, match="'a/b' would be a file and a directory"):
        PathTree({"a/b": b"", "a/b/c": b""})


def test_no_child_is_found_by_a_path_or_nothing() -> None:
    tree = PathTree({"a/b": b""})
    assert tree.child(0, "a") is not None
    assert [tree.child(0, name) for name in ("a/b", "", "a\0b", "b")] == [None] * 4


@given(st.lists(names, min_size=1, max_size=5, unique=True))
def test_sha256sum_accepts_every_name(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    root = tmp_path_factory.mktemp("sums")
    files: dict[str, layout.Content] = {f"d/{name}.tar": name.encode() for name in names}
    Path(root / "d").mkdir()
    for path, content in files.items():
        assert isinstance(content, bytes)
        Path(root / path).write_bytes(content)
    sums = layout.checksums(PathTree(files).files())
    done = subprocess.run(
        ["sha256sum", "-c", "--strict", "--quiet", "-"],
        cwd=root,
        input=sums,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, b"", b"")
    damaged = sums.replace(sums[1:5], b"0000", 1)
    done = subprocess.run(
        ["sha256sum", "-c", "--quiet", "-"],
        cwd=root,
        input=damaged,
        capture_output=True,
        check=False,
    )
    assert done.returncode != 0


@given(st.integers(0, (1 << 23) - 1), st.integers(0, (1 << 40) - 3))
def test_a_node_number_is_its_slot_and_place(slot: int, place: int) -> None:
    node = node_number(slot, place)
    assert slot_and_place(node) == (slot, place)
    assert 0 < node < 1 << 63


@given(st.sets(names, max_size=30), st.integers(40, 60))
def test_every_name_has_a_place_of_its_own(names: set[str], places: int) -> None:
    taken = hashed_places(sorted(names), places)
    assert sorted(taken.values()) == sorted(names)
    assert list(taken) == sorted(taken)
    assert all(1 <= place <= places for place in taken)


def test_umask_takes_bits_away() -> None:
    owner = Owner(os.getuid(), os.getgid(), 0o077)
    assert owner.mode(Kind.FILE) == Kind.FILE | 0o400
    assert owner.mode(Kind.DIRECTORY) == Kind.DIRECTORY | 0o500
