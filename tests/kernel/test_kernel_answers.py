"""Requests to answers, without a kernel."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsmount.model import Version
from fsmount.mount.kernel import protocol
from fsmount.mount.kernel.answers import Answers, Range, Request
from fsmount.mount.kernel.protocol import RESENT, Opcode, OpenFlag
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs.filesystem import FOREVER, ROOT_NODE, Kind, Owner
from fsmount.vfs.parted import Look
from fsmount.vfs.reads import ObjectReader
from fsmount.vfs.version import VersionTree


class Backing:
    """Gives every node the backing id 7, or none."""

    def __init__(self, backing_id: int) -> None:
        self.backing_id = backing_id
        self.openers: set[tuple[int, int]] = set()

    def open(self, node: int, opener: int, fd: int, device: int) -> int:
        assert os.fstat(fd).st_dev == device
        self.openers.add((node, opener))
        return self.backing_id

    def release(self, node: int, opener: int) -> None:
        self.openers.discard((node, opener))


@pytest.fixture
def tree(tmp_path: Path) -> VersionTree:
    store = Store.create(str(tmp_path / "store"))
    version: Version = tiny.publish(
        store, "v1", {"a": [tiny.numbered(f"a/{n}", n) for n in range(40)]}, samples_a_shard=1
    )
    return VersionTree(
        version,
        store.keysets_of(version.document.table.digest),
        ObjectReader(store.objects),
        Look(Owner(1, 2)),
    )


def node_of(tree: VersionTree, path: str) -> int:
    node = ROOT_NODE
    for name in path.split("/"):
        node = tree.lookup(node, name).node
    return node


def ask(answers: Answers, opcode: int, node: int, body: bytes = b"", unique: int = 2) -> bytes:
    found = answers.answer(Request(opcode, unique, node, body))
    assert isinstance(found, bytes)
    return found


def open_file(answers: Answers, node: int, unique: int = 2, flags: int = 0) -> tuple[int, int, int]:
    body = protocol.OPEN_IN.pack(flags, 0)
    number, how, backing_id = protocol.OPEN_OUT.unpack(
        ask(answers, Opcode.OPEN, node, body, unique)
    )
    return number, how, backing_id


def read_range(answers: Answers, node: int, number: int, size: int, offset: int) -> bytes:
    body = protocol.READ_IN.pack(number, offset, size, 0, 0, 0, 0)
    found = answers.answer(Request(Opcode.READ, 4, node, body))
    assert isinstance(found, Range)
    return found.file.handle.read(found.size, found.offset)


def listing(answers: Answers, node: int, size: int, opcode: int) -> Iterator[tuple[bytes, int]]:
    """All names with their inodes, in answers of at most `size` bytes."""
    before = len(protocol.UNTOLD) if opcode == Opcode.READDIRPLUS else 0
    offset = 0
    while True:
        found = ask(answers, opcode, node, protocol.READ_IN.pack(0, offset, size, 0, 0, 0, 0))
        assert len(found) <= size
        if not found:
            return
        at = 0
        while at < len(found):
            inode, offset, length, _ = protocol.DIRENT.unpack_from(found, at + before)
            start = at + before + protocol.DIRENT.size
            told = protocol.ENTRY_OUT.unpack_from(found, at)[0] if before else 0
            assert told in (0, inode)
            yield found[start : start + length], inode
            at = start + length + -length % 8


@pytest.mark.parametrize("opcode", [Opcode.READDIR, Opcode.READDIRPLUS])
@pytest.mark.parametrize("size", [200, 1000, 1 << 20])
def test_listings_of_any_size_are_whole(tree: VersionTree, opcode: int, size: int) -> None:
    answers = Answers(tree, None)
    node = node_of(tree, "shards/a")
    found = list(listing(answers, node, size, opcode))
    expected = [(entry.name.encode(), entry.node) for entry in tree.readdir(node)]
    assert found == [(b".", node), (b"..", node_of(tree, "shards")), *expected]
    root = list(listing(answers, ROOT_NODE, size, opcode))
    assert root[:2] == [(b".", ROOT_NODE), (b"..", ROOT_NODE)]


def test_lookups(tree: VersionTree) -> None:
    answers = Answers(tree, None)
    shards = node_of(tree, "shards")

    def lookup(node: int, name: bytes) -> int:
        found = ask(answers, Opcode.LOOKUP, node, name + b"\0")
        assert len(found) == len(protocol.UNTOLD)
        return int(protocol.ENTRY_OUT.unpack_from(found)[0])

    assert lookup(ROOT_NODE, b"shards") == lookup(shards, b".") == shards
    assert lookup(shards, b"..") == ROOT_NODE
    for name in (b"nothing", b"\xff\xfe", b"a/b"):  # not there, and never will be
        assert lookup(ROOT_NODE, name) == 0
        with pytest.raises(FileNotFoundError):  # not there yet
            lookup(node_of(tree, "keysets"), name)


def test_what_may_wait(tree: VersionTree) -> None:
    answers = Answers(tree, None)
    for path, waits in (("shards/a", False), ("keysets", True), ("samples/a", True)):
        for opcode in (Opcode.LOOKUP, Opcode.GETATTR, Opcode.READDIR, Opcode.OPENDIR):
            assert answers.may_wait(Request(opcode, 2, node_of(tree, path), b"")) is waits
    shard, body = node_of(tree, "shards/a/000000.tar"), bytes(protocol.READ_IN.size)
    for opcode, waits in ((Opcode.OPEN, True), (Opcode.READ, True), (Opcode.RELEASE, False)):
        assert answers.may_wait(Request(opcode, 2, shard, body)) is waits


def test_a_sample_that_was_read_is_at_hand(tree: VersionTree) -> None:
    answers = Answers(tree, None)
    sample = node_of(tree, "samples/a/0.safetensors")
    directory = node_of(tree, "samples/a")
    opening = Request(Opcode.OPEN, 6, sample, protocol.OPEN_IN.pack(os.O_RDONLY, 0))
    assert answers.may_wait(opening)
    answers.answer(opening)
    reading = Request(Opcode.READ, 8, sample, protocol.READ_IN.pack(6, 0, 100, 0, 0, 0, 0))
    assert not answers.may_wait(reading)
    assert not answers.may_wait(opening)
    for opcode, waits in ((Opcode.LOOKUP, False), (Opcode.GETATTR, False), (Opcode.READDIR, True)):
        assert answers.may_wait(Request(opcode, 2, directory, b"")) is waits
    list(tree.readdir(directory))
    assert not answers.may_wait(Request(Opcode.READDIR, 2, directory, b""))


def test_only_what_cannot_change_is_cached_as_a_listing(tree: VersionTree) -> None:
    answers = Answers(tree, None)
    for path, kept in (("shards/a", True), ("keysets", False)):
        found = protocol.OPEN_OUT.unpack(ask(answers, Opcode.OPENDIR, node_of(tree, path)))
        assert bool(found[1] & OpenFlag.CACHE_DIR) is kept


def test_directories_are_opened_without_asking_and_those_that_grow_are_told_of(
    tree: VersionTree,
) -> None:
    listed: list[int] = []
    answers = Answers(tree, None, on_listed=listed.append)
    keysets = node_of(tree, "keysets")
    for node in (keysets, ROOT_NODE):
        with pytest.raises(OSError, match="not implemented") as caught:
            ask(answers, Opcode.OPENDIR, node)
        assert caught.value.errno == errno.ENOSYS
    for path in ("shards/a", "samples", "samples/a"):  # some need the store, but none grows
        assert list(listing(answers, node_of(tree, path), 1000, Opcode.READDIR))
    assert not listed
    for opcode in (Opcode.READDIR, Opcode.READDIRPLUS):
        assert [name for name, _ in listing(answers, keysets, 1000, opcode)] == [b".", b".."]
        assert listed == [keysets] * 2  # the beginning, and where it ends
        listed.clear()


@pytest.mark.parametrize("backing_id", [0, 7])
def test_open_read_release(tree: VersionTree, backing_id: int) -> None:
    backing = Backing(backing_id)
    answers = Answers(tree, backing)
    node = node_of(tree, "shards/a/000003.tar")
    size = tree.getattr(node).attr.size
    number, how, given = open_file(answers, node, unique=RESENT | 10)
    assert (number, given) == (10, backing_id)
    assert bool(how & OpenFlag.PASSTHROUGH) is bool(backing_id)
    assert not (backing_id and how & OpenFlag.KEEP_CACHE)
    assert backing.openers == {(node, 10)}
    whole = read_range(answers, node, number, size + 10, 0)
    assert len(whole) == size
    assert read_range(answers, node, 999, 100, 50) == whole[50:150]  # opened by another server
    for one in (10, 999, 999, 5):
        ask(answers, Opcode.RELEASE, node, protocol.RELEASE_IN.pack(one, 0, 0, 0))
    assert not backing.openers
    assert not answers._open


def test_an_open_that_reaches_nobody_is_undone(tree: VersionTree) -> None:
    backing = Backing(0)
    answers = Answers(tree, backing)
    node = node_of(tree, "shards/a/000003.tar")
    request = Request(Opcode.OPEN, 12, node, protocol.OPEN_IN.pack(0, 0))
    answers.answer(request)
    answers.undo(request)
    assert not backing.openers
    assert not answers._open


def test_files_in_memory_are_never_backed(tree: VersionTree) -> None:
    backing = Backing(7)
    answers = Answers(tree, backing)
    node = node_of(tree, "VERSION.json")
    number, how, given = open_file(answers, node)
    assert given == 0
    assert how & OpenFlag.KEEP_CACHE
    assert read_range(answers, node, number, 1 << 20, 0).startswith(b"{")
    assert not backing.openers


CHANGES = ("SETATTR", "SYMLINK", "MKNOD", "MKDIR", "UNLINK", "RMDIR", "RENAME", "LINK", "WRITE",
           "SETXATTR", "REMOVEXATTR", "CREATE", "FALLOCATE", "RENAME2", "COPY_FILE_RANGE",
           "TMPFILE")  # fmt: skip


def test_changes_are_refused_and_the_unknown_is_not_there(tree: VersionTree) -> None:
    answers = Answers(tree, None)

    def code_of(opcode: int, body: bytes = b"") -> int | None:
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is checked
            ask(answers, opcode, node_of(tree, "VERSION.json"), body)
        return caught.value.errno

    assert {name: code_of(Opcode[name]) for name in CHANGES} == dict.fromkeys(CHANGES, errno.EROFS)
    for unknown in (22, 25, 46, 52, 4711):  # getxattr, flush, lseek, statx, nothing
        assert code_of(unknown) == errno.ENOSYS
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_TRUNC):
        assert code_of(Opcode.OPEN, protocol.OPEN_IN.pack(flags, 0)) == errno.EROFS
    assert code_of(Opcode.ACCESS, protocol.ACCESS_IN.pack(os.W_OK, 0)) == errno.EROFS
    assert ask(answers, Opcode.ACCESS, ROOT_NODE, protocol.ACCESS_IN.pack(os.R_OK, 0)) == b""


def test_attributes_hold_for_ever(tree: VersionTree) -> None:
    answers = Answers(tree, None)
    assert tree.getattr(ROOT_NODE).ttl == FOREVER
    found = ask(answers, Opcode.GETATTR, ROOT_NODE)
    assert protocol.ATTR_OUT.unpack_from(found)[0] > 10**8
    assert protocol.ATTR.unpack_from(found, protocol.ATTR_OUT.size)[9] & Kind.DIRECTORY
