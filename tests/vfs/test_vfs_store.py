"""A whole store as a file system."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from looking import find, read, walk

from fsmount.errors import FormatError, StoreError
from fsmount.model import VersionDocument
from fsmount.store import Store
from fsmount.store.refs import Survey
from fsmount.testing import tiny
from fsmount.testing.tiny import Sample
from fsmount.vfs.filesystem import FOREVER, MOMENT, ROOT_NODE, Kind, Owner, node_number
from fsmount.vfs.reads import ObjectReader
from fsmount.vfs.store import StoreTree
from fsmount.vfs.version import Look
from fsmount.vfs.versions import families_of


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def publish(store: Store, tag: str, number: int) -> None:
    sample = Sample("p/x", {"a": np.array(number)})
    tiny.publish(store, tag, {"p": [sample]}, created_at=f"2024-01-01T00:00:{number:02d}Z")


def show(store: Store, clock: Clock, used: list[str] | None = None) -> StoreTree:
    def note(document: VersionDocument) -> None:
        if used is not None:
            used.append(str(document.tag))

    look = Look(Owner(0, 0))
    return StoreTree(store, ObjectReader(store.objects), look, clock=clock, on_first_use=note)


def test_versions_appear_and_latest_follows(store: Store) -> None:
    clock = Clock()
    tree = show(store, clock)
    assert [path for path, _ in walk(tree)] == ["versions"]
    with pytest.raises(FileNotFoundError):
        find(tree, "latest")
    publish(store, "v1", 1)
    clock.now += MOMENT
    assert [entry.name for entry in tree.readdir(find(tree, "versions"))] == ["v1"]
    clock.now += MOMENT
    assert tree.readlink(find(tree, "latest")) == "versions/v1"
    assert [entry.name for entry in tree.readdir(find(tree, "versions"))] == ["v1"]
    publish(store, "v2", 2)
    with pytest.raises(FileNotFoundError):
        find(tree, "versions/v2")  # for a moment
    clock.now += MOMENT
    assert {e.name for e in tree.readdir(find(tree, "versions"))} == {"v1", "v2"}
    assert tree.readlink(find(tree, "latest")) == "versions/v1"  # a moment more
    clock.now += MOMENT
    latest = tree.lookup(ROOT_NODE, "latest")
    assert latest.attr.kind is Kind.SYMLINK
    assert latest.attr.size == len(tree.readlink(latest.node)) == len("versions/v2")
    assert {e.name for e in tree.readdir(find(tree, "versions"))} == {"v1", "v2"}
    assert read(tree, "versions/v1/VERSION.json") != read(tree, "versions/v2/VERSION.json")
    assert read(tree, "versions/v2/samples/p/x.safetensors")


def test_latest_is_not_behind_where_nobody_looked_for_a_while(store: Store) -> None:
    clock = Clock()
    publish(store, "v1", 1)
    tree = show(store, clock)
    latest = find(tree, "latest")
    publish(store, "v2", 2)
    clock.now += 2 * MOMENT
    assert tree.readlink(latest) == "versions/v2"


class Publishing:
    """A store in which a version is published just after its versions were counted, or before."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.publish: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _now(self) -> None:
        publish, self.publish = self.publish, None
        if publish is not None:
            publish()

    def survey(self) -> Survey:
        self._now()
        return self._store.survey()

    def latest(self) -> str | None:
        found = self._store.latest()
        self._now()
        return found


def test_latest_does_not_vanish_while_a_version_is_published(store: Store) -> None:
    publish(store, "v1", 1)
    clock, catalogue = Clock(), Publishing(store)
    tree = show(catalogue, clock)  # type: ignore[arg-type]
    for number in (2, 3):
        catalogue.publish = lambda number=number: publish(store, f"v{number}", number)  # type: ignore[misc]
        clock.now += 3 * MOMENT
        target = tree.readlink(find(tree, "latest"))
        assert target.removeprefix("versions/") in {
            entry.name for entry in tree.readdir(find(tree, "versions"))
        }


def test_a_store_that_is_gone_lists_nothing_as_empty(store: Store) -> None:
    clock = Clock()
    publish(store, "v1", 1)
    tree = show(store, clock)
    keysets = find(tree, "versions/v1/keysets")
    assert list(tree.readdir(keysets)) == []
    gone = f"{store.path}.gone"
    os.rename(store.path, gone)
    clock.now += MOMENT
    for make in (lambda: None, lambda: os.mkdir(store.path)):  # an unmounted disk's directory
        make()
        for node in (keysets, node_number(0, 1), ROOT_NODE):
            with pytest.raises(StoreError, match=f"{store.path} can't be reached"):
                list(tree.readdir(node))
        with pytest.raises(StoreError, match="can't be reached"):
            tree.lookup(keysets, "one.parquet")
    os.rmdir(store.path)
    os.rename(gone, store.path)
    assert list(tree.readdir(keysets)) == []
    assert [entry.name for entry in tree.readdir(ROOT_NODE)] == ["versions", "latest"]


def test_numbers_are_unique_and_the_same_in_another_server(store: Store) -> None:
    for number in range(1, 6):
        publish(store, f"v{number}", number)
    one, other = show(store, Clock()), show(store, Clock())
    listed = {path: entry.node for path, entry in walk(one)}
    assert len(set(listed.values())) == len(listed)
    for path in reversed(listed):
        assert find(other, path) == listed[path]
        assert other.getattr(listed[path]) == one.getattr(listed[path])
    third = show(store, Clock())
    for path, node in listed.items():  # by number alone, nothing looked up before
        assert third.getattr(node) == one.getattr(node), path
        assert third.path(node) == path


def test_a_listing_of_versions_resumes_when_others_have_come(store: Store) -> None:
    clock = Clock()
    for number in range(1, 5):
        publish(store, f"v{number}", number)
    tree = show(store, clock)
    versions = find(tree, "versions")
    first = list(tree.readdir(versions))
    for number in range(5, 10):
        publish(store, f"v{number}", number)
    clock.now += MOMENT
    for entry in first:
        behind = {e.name for e in tree.readdir(versions, entry.offset)}
        assert {e.name for e in first if e.offset > entry.offset} <= behind
        assert entry.name not in behind


def test_a_version_is_used_when_it_is_looked_into(store: Store) -> None:
    publish(store, "v1", 1)
    publish(store, "v2", 2)
    used: list[str] = []
    tree = show(store, Clock(), used)
    [root] = [e.node for e in tree.readdir(find(tree, "versions")) if e.name == "v1"]
    tree.getattr(root)
    assert used == []
    for _ in range(3):
        read(tree, "versions/v1/SHA256SUMS")
    assert used == ["v1"]


def test_what_grows(store: Store) -> None:
    for number in (1, 2):
        publish(store, f"v{number}", number)
    tree = show(store, Clock())
    growing = set(tree.growing())
    assert tree.grows(ROOT_NODE)
    assert len(growing) == 4
    for path, entry in walk(tree):
        grows = path == "versions" or path.endswith("/keysets")
        assert tree.grows(entry.node) is grows is (entry.node in growing)


def test_times_to_live(store: Store) -> None:
    publish(store, "v1", 1)
    tree = show(store, Clock())
    lives = {path: tree.getattr(find(tree, path)).ttl for path in ("versions", "latest")}
    assert set(lives.values()) == {MOMENT} == {tree.ttl}
    assert tree.getattr(find(tree, "versions/v1/shards")).ttl == FOREVER


def test_a_version_stays_as_it_is_once_it_was_looked_into(store: Store) -> None:
    clock = Clock()
    publish(store, "v1", 1)
    publish(store, "v2", 2)
    publish(store, "v3", 3)
    tree = show(store, clock)
    node = find(tree, "versions/v1/VERSION.json")
    find(tree, "versions/v2")  # is not looking into it
    for tag in ("v1", "v2"):
        os.unlink(f"{store.path}/versions/{tag}.json")
    clock.now += MOMENT
    assert tree.open(node).read(1 << 20, 0)
    assert find(tree, "versions/v1/VERSION.json") == node
    assert {e.name for e in tree.readdir(find(tree, "versions"))} == {"v1", "v3"}
    with pytest.raises(FileNotFoundError):
        find(tree, "versions/v2")


@pytest.mark.parametrize("name", ["v2", "v9", "bad tag", "-x"])
def test_a_damaged_document_is_an_error_under_its_own_name_alone(store: Store, name: str) -> None:
    clock = Clock()
    publish(store, "v1", 1)
    publish(store, "v2", 2)
    tree = show(store, clock)
    used = find(tree, "versions/v1/VERSION.json")
    path = f"{store.path}/versions/{name}.json"
    if os.path.exists(path):
        os.unlink(path)
    with open(path, "w") as file:
        file.write("no document")
    clock.now += MOMENT
    assert tree.open(used).read(1 << 20, 0)
    others = {"v1", "v2"} - {name}
    assert {e.name for e in tree.readdir(find(tree, "versions"))} == others
    assert read(tree, "versions/v1/SHA256SUMS")
    with pytest.raises(FormatError, match=re.escape(path)):
        find(tree, f"versions/{name}")


def test_a_damaged_latest_is_an_error_under_its_own_name_alone(store: Store) -> None:
    publish(store, "v1", 1)
    os.unlink(f"{store.path}/latest.json")
    with open(f"{store.path}/latest.json", "w") as file:
        file.write("[]")
    tree = show(store, Clock())
    assert [e.name for e in tree.readdir(ROOT_NODE)] == ["versions"]
    assert read(tree, "versions/v1/SHA256SUMS")
    with pytest.raises(FormatError, match="latest"):
        find(tree, "latest")


def test_errors(store: Store) -> None:
    publish(store, "v1", 1)
    tree = show(store, Clock())
    latest, versions = find(tree, "latest"), find(tree, "versions")
    with pytest.raises(NotADirectoryError):
        tree.lookup(latest, "x")
    for node in (ROOT_NODE, versions):
        with pytest.raises(IsADirectoryError):
            tree.open(node)
        with pytest.raises(OSError, match="no symbolic link"):
            tree.readlink(node)
    for node in (77, 4000 << 42 | 1, 4000 << 42 | 9):
        with pytest.raises(OSError, match="Stale") as caught:
            tree.getattr(node)
        assert caught.value.errno == errno.ESTALE


def test_a_damaged_table_is_an_error_in_its_version_alone(store: Store) -> None:
    publish(store, "v1", 1)
    publish(store, "v2", 2)
    table = store.versions()[0].table
    path = store.objects.path(table.digest)
    os.chmod(path, 0o644)
    with open(path, "wb") as file:
        file.write(bytes(table.size))
    tree = show(store, Clock())
    assert {e.name for e in tree.readdir(find(tree, "versions"))} == {"v1", "v2"}
    with pytest.raises(FormatError):
        find(tree, "versions/v1/shards")
    read(tree, "versions/v2/SHA256SUMS")


def test_the_older_version_keeps_its_family(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 6):
        publish(store, f"v{number}", number)
    monkeypatch.setattr("fsmount.vfs.versions._FAMILIES", 5)
    documents = store.versions()
    before = {d.tag: family for family, d in families_of(documents[:4]).items()}
    after = {d.tag: family for family, d in families_of(documents).items()}
    assert sorted(after.values()) == [1, 2, 3, 4, 5]
    assert before.items() <= after.items()
