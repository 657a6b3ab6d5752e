"""Looking at a file system without a mount."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fsmount.vfs.filesystem import ROOT_NODE, DirEntry, FileSystem, Kind
from fsmount.vfs.version import VersionTree

Show = Callable[..., VersionTree]


def walk(
    tree: FileSystem, node: int = ROOT_NODE, prefix: str = ""
) -> Iterator[tuple[str, DirEntry]]:
    """Every path that is listed below `node`."""
    for entry in tree.readdir(node):
        yield prefix + entry.name, entry
        if entry.kind is Kind.DIRECTORY:
            yield from walk(tree, entry.node, f"{prefix}{entry.name}/")


def find(tree: FileSystem, path: str) -> int:
    """The node of `path`."""
    node = ROOT_NODE
    for name in path.split("/"):
        node = tree.lookup(node, name).node
    return node


def read(tree: FileSystem, path: str) -> bytes:
    """All bytes of the file at `path`."""
    node = find(tree, path)
    handle = tree.open(node)
    try:
        data = handle.read(1 << 40, 0)
    finally:
        handle.close()
    assert len(data) == tree.getattr(node).attr.size
    return data
