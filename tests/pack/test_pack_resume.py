"""A pack that was disturbed in the middle of a partition goes on after its last finished shard."""

from __future__ import annotations

import glob
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from npz_tree import (
    Content,
    check_nothing_left,
    numbered,
    objects,
    partitions,
    read_version,
    run_pack,
    write_numbered,
    write_sample,
)
from running import Ended, Packing, wait_until, write_slow

from fsmount.errors import SourceError
from fsmount.formats.shard import member_order
from fsmount.model import Digest
from fsmount.pack.shards import ShardSet
from fsmount.store import Store
from fsmount.testing.settled import settle
from fsmount_cli import main

LEVEL = 22
SLOW = 8  # samples
FAST = 60


def kill(packing: Packing) -> None:
    os.kill(packing.process.pid, signal.SIGKILL)
    packing.process.wait()


def kill_worker(packing: Packing) -> None:
    for worker in packing.workers():
        os.kill(worker, signal.SIGKILL)
    assert packing.finish()[0] == 1


def interrupt(packing: Packing) -> None:
    packing.interrupt()
    assert packing.finish()[0] == 130


def memories() -> list[str]:
    """What is remembered of finished shards of partitions that weren't finished."""
    cache = os.environ["XDG_CACHE_HOME"]
    return sorted(glob.glob(f"{cache}/fsmount/builds/*/*.shards/*.parquet"))


def finished() -> list[str]:
    """The digests of these shards."""
    return [Path(path).stem for path in memories()]


def places(store: Path, digests: list[str]) -> dict[str, tuple[int, int]]:
    """Inode and ctime of objects: whoever writes one again changes them."""
    paths = {name: Store.open(str(store)).objects.path(Digest(name)) for name in digests}
    found = {name: os.stat(path) for name, path in paths.items()}
    return {name: (stat.st_ino, stat.st_ctime_ns) for name, stat in found.items()}


def fresh(source: Path, store: Path, cache: Path, **options: int) -> dict[str, tuple[str, ...]]:
    """The objects of a pack that was never disturbed."""
    shutil.rmtree(cache)
    run_pack(source, store.with_name("fresh"), **options)
    return objects(store.with_name("fresh"), "v1")


def in_shards(store: Path, digests: list[str]) -> int:
    shards = [shard for part in partitions(store, "v1").values() for shard in part.shards]
    return sum(shard.samples for shard in shards if shard.digest in digests)


@pytest.mark.parametrize(("how", "workers"), [(kill, 1), (interrupt, 1), (kill_worker, 2)])
def test_finished_shards_are_not_made_again(
    how: Callable[[Packing], None], workers: int, source: Path, store: Path
) -> None:
    write_slow(source, "big", SLOW)
    write_numbered(source, {"small/1": 1})
    settle(source)
    arguments = ("--level", str(LEVEL), "--shard-size", "2MiB", "--quiet")
    with Packing(source, store, "v1", "--workers", str(workers), *arguments) as packing:
        wait_until(lambda: len(finished()) >= 2, "no two shards are ever finished")
        with Ended(packing.children()):
            how(packing)
    done = finished()
    there = places(store, done)
    options = {"level": LEVEL, "shard_bytes": 2 << 20}
    report = run_pack(source, store, **options)
    assert places(store, done) == there
    kept = in_shards(store, done)
    assert kept >= 2
    assert report.samples_read == SLOW - kept + (report.reused != ("small",))
    assert finished() == []
    check_nothing_left(store)
    assert run_pack(source, store, "v2").samples_read == 0
    assert set(read_version(store, "v1")) == {*(f"big/{i}" for i in range(SLOW)), "small/1"}


@pytest.fixture
def contents(source: Path, store: Path) -> dict[str, Content]:
    """A pack failed at the last sample of the order, which is as it should be by now."""
    expected = {}
    for i in range(FAST):
        arrays = numbered(i) | ({"text": np.array(f"é\0{i}")} if i % 5 else {})
        sidecar = b'{"a": [1, 2.50]}' if i % 3 else None
        expected[f"p/{i}"] = write_sample(source, f"p/{i}", arrays, sidecar)
    last = member_order(expected, 0)[-1]
    path = source / f"{last}.npz"
    good = path.read_bytes()
    path.write_bytes(b"no archive")
    with pytest.raises(SourceError, match=last):
        run_pack(source, store, shard_bytes=2000)
    assert Store.open(str(store)).versions() == ()
    path.write_bytes(good)
    assert len(finished()) >= 5
    return expected


def test_texts_and_sidecars_of_finished_shards_are_remembered(
    source: Path, store: Path, cache: Path, contents: dict[str, Content]
) -> None:
    done = finished()
    there = places(store, done)
    report = run_pack(source, store, shard_bytes=2000)
    assert report.samples_read == FAST - in_shards(store, done) <= FAST // 4
    assert places(store, done) == there
    assert read_version(store, "v1") == contents
    assert objects(store, "v1") == fresh(source, store, cache, shard_bytes=2000)


def test_a_sidecar_that_changed_meanwhile_is_read(
    source: Path, store: Path, contents: dict[str, Content]
) -> None:
    for i in range(FAST):
        (source / f"p/{i}.json").write_bytes(b'{"other": %d}' % i)
    done = finished()
    assert run_pack(source, store, shard_bytes=2000).samples_read == FAST - in_shards(store, done)
    found = read_version(store, "v1")
    assert {key: sample.arrays for key, sample in found.items()} == {
        key: sample.arrays for key, sample in contents.items()
    }
    assert {key: sample.sidecar for key, sample in found.items()} == {
        f"p/{i}": b'{"other": %d}' % i for i in range(FAST)
    }


def edit(source: Path, store: Path, contents: dict[str, Content]) -> None:
    for i in range(FAST):
        before = contents[f"p/{i}"]
        contents[f"p/{i}"] = write_sample(source, f"p/{i}", numbered(i + 1), before.sidecar)


def touch(source: Path, store: Path, contents: dict[str, Content]) -> None:
    for path in source.rglob("*.npz"):
        os.utime(path)


def lose_objects(source: Path, store: Path, contents: dict[str, Content]) -> None:
    for digest in finished():
        os.unlink(Store.open(str(store)).objects.path(Digest(digest)))


def damage_memory(source: Path, store: Path, contents: dict[str, Content]) -> None:
    for path in memories():
        Path(path).write_bytes(Path(path).read_bytes()[:-50])


def empty_memory(source: Path, store: Path, contents: dict[str, Content]) -> None:
    for path in memories():
        Path(path).write_bytes(b"")


@pytest.mark.parametrize("change", [edit, touch, lose_objects, damage_memory, empty_memory])
def test_what_no_longer_holds_is_read_again(
    change: Callable[[Path, Path, dict[str, Content]], None],
    source: Path,
    store: Path,
    cache: Path,
    contents: dict[str, Content],
) -> None:
    change(source, store, contents)
    assert run_pack(source, store, shard_bytes=2000).samples_read == FAST
    assert finished() == []
    assert read_version(store, "v1") == contents
    assert objects(store, "v1") == fresh(source, store, cache, shard_bytes=2000)


def test_a_memory_of_another_shard_is_not_believed(
    source: Path, store: Path, contents: dict[str, Content]
) -> None:
    one, *others = memories()
    for path in others:
        shutil.copyfile(one, path)
    run_pack(source, store, shard_bytes=2000)
    assert read_version(store, "v1") == contents


def test_a_run_that_goes_on_says_how_many_shards_are_done(
    source: Path,
    store: Path,
    contents: dict[str, Content],
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["pack", str(source), str(store), "--shard-size", "2000", "--workers", "1"]
    done = len(finished())
    for force, said in ((["--force"], ""), ([], f"resuming: {done} shards of partitions")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardSet, "add", interrupted)
            assert main.run([*arguments, "--tag", "v1", *force]) == 130
        assert capsys.readouterr().err.startswith(said or "packing ")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_force_reads_what_was_finished(
    source: Path, store: Path, contents: dict[str, Content]
) -> None:
    assert run_pack(source, store, force=True, shard_bytes=2000).samples_read == FAST
    assert read_version(store, "v1") == contents


def test_without_a_place_to_remember_a_pack_is_as_good(
    source: Path, store: Path, tmp_path: Path, contents: dict[str, Content]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", "relative")
        assert run_pack(source, store, shard_bytes=2000).samples_read == FAST
    assert read_version(store, "v1") == contents
