"""A directory of 100,000 names."""

from __future__ import annotations

import os
import random
import re
import stat
import subprocess
from collections.abc import Iterator

import pytest

from fsmount.mount import lifecycle, records
from fsmount.mount.ending import umount
from fsmount.mount.request import FUSEPY, KERNEL, MountRequest
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.testing.directories import DirectoryStream, RawEntry

pytestmark = pytest.mark.mounted

SHARDS = 100_000
SAMPLES = 33_334 if os.environ.get("FSMOUNT_SOAK") else 2_000  # of three files each
CROWDS = {"shards/crowd": SHARDS, "samples/many": 3 * SAMPLES}
crowds = pytest.mark.parametrize("crowd", CROWDS)
REGULAR = stat.S_IFREG >> 12


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store.create(str(tmp_path_factory.mktemp("crowded") / "store"))
    tiny.publish_crowded(store, "v1", shards=SHARDS, samples=SAMPLES)
    return store


@pytest.fixture(scope="module", params=[KERNEL, FUSEPY])
def root(
    crowded: Store, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("crowd"))
    lifecycle.mount(MountRequest(crowded.path, "v1", path, driver=request.param))
    yield path
    umount(path)


def requests_answered(root: str) -> int:
    """At least so many: each is read from the kernel."""
    record = records.read(root)
    assert record is not None
    with open(f"/proc/{record.server_pid}/io", encoding="ascii") as file:
        found = re.search(r"syscr: (\d+)", file.read())
    assert found is not None
    return int(found[1])


@crowds
def test_types_are_told_without_asking_for_each_file(root: str, crowd: str) -> None:
    """First of all tests, since what was asked once is remembered."""
    os.stat(f"{root}/{crowd}")
    before = requests_answered(root)
    find = ["find", f"{root}/{crowd}", "-mindepth", "1", "-type", "f", "-printf", "."]
    assert len(subprocess.run(find, check=True, capture_output=True).stdout) == CROWDS[crowd]
    assert requests_answered(root) - before < CROWDS[crowd] // 10
    some = os.listdir(f"{root}/{crowd}")[:: CROWDS[crowd] // 500]
    before = requests_answered(root)
    for name in some:
        assert stat.S_ISREG(os.stat(f"{root}/{crowd}/{name}").st_mode)
    asked = requests_answered(root) - before
    record = records.read(root)
    assert record is not None
    if record.driver == KERNEL:  # attributes came with the listing
        assert asked < 50
    else:
        assert asked > 250  # so that is what they cost


@crowds
def test_every_name_is_listed_once_and_listing_goes_on_anywhere(root: str, crowd: str) -> None:
    directory, count = f"{root}/{crowd}", CROWDS[crowd]
    rng = random.Random(5)  # noqa: S311 - not for secrets
    stops = sorted(rng.sample(range(count), 20))
    with DirectoryStream(directory) as stream:
        whole: list[RawEntry] = []
        places = []
        for entry in stream:
            whole.append(entry)
            if len(whole) in stops:
                places.append((len(whole), stream.tell()))
        rng.shuffle(places)
        for at, place in places:
            stream.seek(place)
            assert [next(stream) for _ in range(min(300, len(whole) - at))] == whole[at : at + 300]
        stream.rewind()
        assert list(stream) == whole
    dots, files = whole[:2], whole[2:]
    assert {entry.name for entry in dots} == {b".", b".."}
    assert len(files) == len({entry.name for entry in files}) == count
    assert len({entry.inode for entry in files}) == count
    assert {entry.type for entry in files} == {REGULAR}
    for entry in rng.sample(files, 50):
        assert os.stat(os.path.join(os.fsencode(directory), entry.name)).st_ino == entry.inode


@crowds
def test_a_listing_goes_on_when_the_kernel_has_forgotten_it(root: str, crowd: str) -> None:
    with DirectoryStream(f"{root}/{crowd}") as stream:
        expected = [entry.name for entry in stream]
        stream.rewind()
        head = [next(stream).name for _ in range(len(expected) // 2)]
        fd = os.open(f"{root}/{crowd}", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # a directory's pages are its listing
        os.close(fd)
        assert head + [entry.name for entry in stream] == expected
