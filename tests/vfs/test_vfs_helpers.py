"""What decodes for a server is another process, whose death harms one sample alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from looking import Show, find, read
from processes import children_of, kill_whoever_reads

from fsmount.errors import FormatError, FsmountError, LoadError
from fsmount.model import Digest, Version
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs.decoding import Decoding
from fsmount.vfs.filesystem import Owner
from fsmount.vfs.helpers import Helpers
from fsmount.vfs.parted import Look
from fsmount.vfs.reads import ObjectReader
from fsmount.vfs.sample_data import SampleData
from fsmount.vfs.version import VersionTree

SECONDS = 60
HEAVY = 64 << 20  # bytes of an array; decoding it takes long enough to be killed meanwhile


@pytest.fixture
def helpers() -> Iterator[Helpers]:
    made = Helpers()
    yield made
    made.close()


@pytest.fixture
def heavy(store: Store) -> Version:
    """A sample that takes long, and one that does not, in shards of their own."""
    arrays = {"x": np.zeros(HEAVY, np.uint8), "y": np.asfortranarray(np.ones((9, 9), ">f4"))}
    samples = [tiny.Sample("d/heavy", arrays), tiny.numbered("d/light", 1)]
    return tiny.publish(store, "v1", {"d": samples}, samples_a_shard=1)


def tree_of(store: Store, version: Version, helpers: Helpers) -> VersionTree:
    reader = ObjectReader(store.objects)
    samples = SampleData(helpers, reader)
    return VersionTree(
        version,
        store.keysets_of(version.document.table.digest),
        reader,
        Look(Owner(1, 2)),
        samples=samples,
    )


def test_they_give_what_decoding_gives(
    store: Store, version: Version, show: Show, helpers: Helpers
) -> None:
    mine, theirs = tree_of(store, version, helpers), show(version)
    for path in ("a/x.npz", "a/x.safetensors", "a/x.json", "a/b/3.npz"):
        assert read(mine, f"samples/{path}") == read(theirs, f"samples/{path}")
    assert helpers.partitions(store.path, version.document) == version.partitions
    found = Decoding().partitions(store.path, version.document)
    assert found == version.partitions


def test_errors_are_those_of_decoding(store: Store, version: Version, helpers: Helpers) -> None:
    tree = tree_of(store, version, helpers)
    by_id = {partition.id: partition for partition in version.partitions}
    for ref in (by_id["a"].manifest, by_id["a/b"].shards[0]):
        path = store.objects.path(ref.digest)
        os.chmod(path, 0o644)
        with open(path, "r+b") as file:
            file.seek(600)
            file.write(b"damage")
    with pytest.raises(FormatError, match=r"manifests/a.parquet: object .* is damaged"):
        find(tree, "samples/a/x.npz")
    failures = []
    for n in range(7):
        try:
            read(tree, f"samples/a/b/{n}.safetensors")
        except FsmountError as error:
            failures.append(str(error))
    [failure] = failures
    assert "is damaged: wrong checksum" in failure
    assert "shards/a/b/000000.tar at byte" in failure


def test_a_sample_that_kills_them_is_an_error_and_the_others_notice_nothing(
    store: Store, heavy: Version, helpers: Helpers
) -> None:
    tree = tree_of(store, heavy, helpers)
    node = find(tree, "samples/d/heavy.npz")
    ended = threading.Event()
    path = store.objects.path(_largest_shard(heavy))
    killer = threading.Thread(target=kill_whoever_reads, args=(os.getpid(), path, ended))
    killer.start()
    try:
        with pytest.raises(LoadError, match=r"'d/heavy'.*was killed by signal 9, twice"):
            tree.open(node)
        read(tree, "samples/d/light.npz")
    finally:
        ended.set()
        killer.join()
    read(tree, "samples/d/heavy.npz")


def test_those_that_died_while_idle_are_replaced(
    store: Store, version: Version, helpers: Helpers
) -> None:
    tree = tree_of(store, version, helpers)
    read(tree, "samples/a/x.npz")
    starter = helpers.starter
    assert starter is not None
    for pid in (*children_of(starter), starter):
        os.kill(pid, signal.SIGKILL)
    read(tree, "samples/a/b/1.npz")


def test_they_end_with_who_uses_them(store: Store, version: Version) -> None:
    assert version.document.tag == "v1"
    code = (
        "import sys\n"
        "from fsmount.vfs.helpers import Helpers\n"
        "from fsmount.formats import document\n"
        "helpers = Helpers()\n"
        "helpers.partitions(sys.argv[1], document.decode(open(sys.argv[2], 'rb').read()))\n"
        "print(helpers.starter, flush=True)\n"
        "input()"
    )
    document = f"{store.path}/versions/v1.json"
    with subprocess.Popen(
        [sys.executable, "-c", code, store.path, document],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as user:
        assert user.stdout is not None
        starter = int(user.stdout.readline())
        all_of_them = [os.pidfd_open(pid) for pid in (starter, *children_of(starter))]
        user.kill()
    for pidfd in all_of_them:
        with open(pidfd, "rb", buffering=0):
            assert _ends(pidfd)


def test_none_can_be_started(store: Store, version: Version) -> None:
    assert version.document.tag == "v1"
    code = (
        "import sys\n"
        "from fsmount.vfs.helpers import Helpers\n"
        "from fsmount.errors import StoreError\n"
        "from fsmount.formats import document\n"
        "sys.executable = '/bin/false'\n"
        "try:\n"
        "    Helpers().partitions(sys.argv[1], document.decode(open(sys.argv[2], 'rb').read()))\n"
        "except StoreError as error:\n"
        "    print(error)"
    )
    document = f"{store.path}/versions/v1.json"
    done = subprocess.run(
        [sys.executable, "-c", code, store.path, document],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert done.stdout.startswith("no process that decodes samples can be started")


def _largest_shard(version: Version) -> Digest:
    return max(version.partitions[0].shards, key=lambda shard: shard.size).digest


def _ends(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], SECONDS)[0])
