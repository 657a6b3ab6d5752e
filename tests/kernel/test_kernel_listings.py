"""Directories are opened without asking; what grows is seen to grow all the same."""

from __future__ import annotations

import errno
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
from kernel_mounts import (
    KernelMount,
    Mounter,
    end,
    publish_large,
    reads,
    start,
    wait_for,
)

from fsmount.errors import StoreError
from fsmount.model import Version
from fsmount.mount.kernel import listings
from fsmount.mount.kernel.listings import Listings
from fsmount.mount.kernel.prepare import command as command_of
from fsmount.mount.kernel.prepare import prepare_store
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs.filesystem import Owner
from fsmount.vfs.parted import Look

SECONDS = 20
DIRECTORIES = 40  # with shards
KEYSETS = 60


def test_what_was_noted_is_dropped_twice_and_then_forgotten() -> None:
    dropped: queue.SimpleQueue[int] = queue.SimpleQueue()
    listed = Listings(dropped.put)
    listed.begin()
    for _ in range(2):
        for node in (5, 6):
            listed.note(node)
        assert sorted(dropped.get(timeout=SECONDS) for _ in range(4)) == [5, 5, 6, 6]
    with pytest.raises(queue.Empty):
        dropped.get(timeout=3 * listings.KEPT)


def test_what_a_dead_server_had_noted_is_dropped_once_the_store_can_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listings, "MOMENT", 0.01)
    dropped: queue.SimpleQueue[int] = queue.SimpleQueue()
    failures = iter([StoreError("not now"), OSError(5, "not now")])

    def growing() -> Collection[int]:
        for failure in failures:
            raise failure
        return [7]

    listed = Listings(dropped.put)
    listed.begin()
    listed.note_all(growing)
    assert dropped.get(timeout=SECONDS) == 7


@pytest.fixture
def version(tmp_path: Path) -> tuple[Store, Version]:
    """A version of many directories, and no key-sets."""
    store = Store.create(str(tmp_path / "store"))
    parts = {f"p{n}": [tiny.numbered(f"p{n}/x", n)] for n in range(DIRECTORIES)}
    return store, tiny.publish(store, "v1", parts)


def find(root: str) -> list[str]:
    return subprocess.check_output(["find", root, "-type", "f"], text=True).splitlines()


def needs_no_opendir(served: KernelMount) -> None:
    if "no_opendir_support" not in served.features:
        pytest.skip("this kernel asks before it opens a directory")


@pytest.mark.mounted
def test_a_second_walk_asks_next_to_nothing(version: tuple[Store, Version], mount: Mounter) -> None:
    served = mount(version[0])
    needs_no_opendir(served)
    found = find(served.root)
    assert len(found) > 2 * DIRECTORIES
    for _ in range(2):
        before = reads(served)
        assert find(served.root) == found
        assert reads(served) - before < DIRECTORIES / 2  # `keysets` is asked for again
        old = served.server
        os.kill(old, signal.SIGKILL)  # the next one knows as well what was agreed
        wait_for(lambda old=old: served.server != old and os.stat(f"{served.root}/keysets"))


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[tuple[Store, Version, KernelMount]]:
    """A store that is mounted with all its versions, of which there is one."""
    store = Store.create(str(tmp_path / "store"))
    version = publish_large(store)
    root = str(tmp_path / "mnt")
    os.mkdir(root)
    config = prepare_store(store, root, store.path, Look(Owner.of_process()))
    served = start(command_of(config), root, str(tmp_path / "log"))
    yield store, version, served
    end(served)


def no_kill(served: KernelMount) -> None:
    pass


def kill(served: KernelMount) -> None:
    os.kill(served.server, signal.SIGKILL)


@pytest.mark.mounted
@pytest.mark.parametrize(
    ("before", "after"), [(no_kill, no_kill), (kill, no_kill), (no_kill, kill)]
)
def test_new_names_are_listed(
    whole: tuple[Store, Version, KernelMount],
    before: Callable[[KernelMount], None],
    after: Callable[[KernelMount], None],
) -> None:
    """Though the kernel had a listing without them; and a server that knew of it may be killed
    before they appear, or after.
    """
    store, version, served = whole
    versions = f"{served.root}/versions"
    keysets = f"{versions}/v1/keysets"

    def add_keyset(name: str) -> None:
        tiny.put_keyset(store, version, name, ["small/1"])

    def add_version(tag: str) -> None:
        tiny.publish(store, tag, {"a": [tiny.numbered("a/1", 1)]})

    def see(directory: str, name: str, add: Callable[[str], None], *, names: list[str]) -> None:
        assert sorted(os.listdir(directory)) == names[:-1]
        before(served)
        add(name)
        after(served)
        wait_for(lambda: sorted(os.listdir(directory)) == names)

    see(keysets, "a", add_keyset, names=["a.parquet"])
    see(keysets, "b", add_keyset, names=["a.parquet", "b.parquet"])
    see(versions, "v2", add_version, names=["v1", "v2"])
    assert os.listdir(f"{versions}/v2/keysets") == []


@pytest.mark.mounted
def test_latest_is_never_ahead_of_what_is_listed(
    whole: tuple[Store, Version, KernelMount],
) -> None:
    store, _, served = whole

    def looked(tag: str) -> bool:
        target = os.readlink(f"{served.root}/latest")
        assert os.path.basename(target) in os.listdir(f"{served.root}/versions")
        return target == f"versions/{tag}"

    for tag in ("v2", "v3"):
        tiny.publish(store, tag, {"a": [tiny.numbered("a/1", 1)]})
        wait_for(lambda tag=tag: looked(tag))


@pytest.mark.mounted
def test_a_store_that_is_gone_is_an_error(whole: tuple[Store, Version, KernelMount]) -> None:
    store, _, served = whole
    lists = [f"{served.root}/versions", f"{served.root}/versions/v1/keysets"]
    before = [os.listdir(path) for path in lists]

    def fails(path: str) -> bool:
        try:
            os.listdir(path)
        except OSError as error:
            return error.errno == errno.EIO
        return False

    os.rename(store.path, f"{store.path}.gone")
    for path in lists:
        wait_for(lambda path=path: fails(path))
    os.rename(f"{store.path}.gone", store.path)
    for path, names in zip(lists, before, strict=True):
        wait_for(lambda path=path: not fails(path))
        assert os.listdir(path) == names


LIST = """
import os, sys
seen = set()
while "last.parquet" not in seen:
    names = os.listdir(sys.argv[1])
    assert len(set(names)) == len(names), names
    seen.update(names)
assert len(names) == int(sys.argv[2]), names
"""


@pytest.mark.mounted
def test_listing_while_names_appear(version: tuple[Store, Version], mount: Mounter) -> None:
    store, made = version
    served = mount(store)
    command = [sys.executable, "-c", LIST, f"{served.root}/keysets", str(KEYSETS + 1)]
    users = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    try:
        for number in range(KEYSETS):
            tiny.put_keyset(store, made, f"k{number}", ["p0/x"])
            if number == KEYSETS // 2:
                kill(served)
        tiny.put_keyset(store, made, "last", ["p0/x"])
        assert [user.communicate(timeout=SECONDS)[1] for user in users] == [b""] * 3
        assert [user.returncode for user in users] == [0] * 3
    finally:
        for user in users:
            user.kill()
            user.wait()
