"""Workers that die, packs that are killed or interrupted, files that change under their reader."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from npz_tree import (
    check_nothing_left,
    check_nothing_published,
    numbered,
    read_version,
    run_pack,
    tags,
    write_numbered,
    write_sample,
)
from running import Ended, Packing, wait_until, write_slow

from fsmount.errors import SourceChangedError, SourceError
from fsmount.pack import build, workers
from fsmount.pack.source import NpzTree, SourceSample
from fsmount.pack.workers import uninterrupted
from fsmount.store import Store
from fsmount.testing.settled import settle

SLOW = ("--level", "22", "--quiet")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Partition 'a' is done in no time, 'b' and 'c' take seconds."""
    source = tmp_path / "source"
    write_numbered(source, {"a/1": 1, "a/2": 2})
    write_slow(source, "b", 2)
    for i in range(2, 40):
        os.link(source / "b" / f"{i % 2}.npz", source / "b" / f"{i}.npz")
    (source / "c").mkdir()
    for path in (source / "b").iterdir():
        os.link(path, source / "c" / path.name)
    return source


def make_fast(source: Path) -> None:
    """What takes seconds is replaced, so that the next run needs none."""
    for name in "bc":
        shutil.rmtree(source / name)
        write_numbered(source, {f"{name}/1": 1})


def check_next_run(source: Path, store: Path, **options: Any) -> None:
    """It takes over what was finished, and publishes."""
    make_fast(source)
    report = run_pack(source, store, "v2", level=22, **options)
    assert (report.reused, report.built, report.samples_read) == (("a",), ("b", "c"), 2)
    assert tags(store) == ["v2"]
    assert set(read_version(store, "v2")) == {"a/1", "a/2", "b/1", "c/1"}
    assert os.listdir(store / "staging") == []
    assert Store.open(str(store)).leases.all() == ()


def test_a_worker_that_is_killed(source: Path, store: Path) -> None:
    with Packing(source, store, "v1", "--workers", "2", *SLOW) as packing:
        packing.wait_for_building(1, 2, remembered=1)
        workers = packing.workers()
        assert len(workers) == 2
        with Ended(packing.children()):
            os.kill(workers[0], signal.SIGKILL)
            code, out, err = packing.finish()
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith("error: a worker process died")
    assert "'b'" in err or "'c'" in err
    assert "'a'" not in err
    check_nothing_published(store)
    check_next_run(source, store)


def test_a_pack_that_is_killed_leaves_no_worker(source: Path, store: Path) -> None:
    with Packing(source, store, "v1", "--workers", "2", *SLOW) as packing:
        packing.wait_for_building(1, 2, remembered=1)
        assert len(packing.workers()) == 2
        with Ended(packing.children()):
            os.kill(packing.process.pid, signal.SIGKILL)
            packing.process.wait()
    assert Store.open(str(store)).versions() == ()
    assert os.listdir(store / "staging") != []  # left over, and part of nothing
    check_next_run(source, store)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_pack(number: int, workers: int, source: Path, store: Path) -> None:
    options = ("--workers", str(workers), "--level", "22")
    with Packing(source, store, "v1", *options) as packing:
        packing.wait_for_building(1, *range(2, workers + 1), remembered=1)
        with Ended(packing.children()):
            if number == signal.SIGINT:
                packing.interrupt()
            else:
                packing.process.terminate()
            code, out, err = packing.finish()
    assert (code, out) == (130, "")
    kept = "nothing is published; finished partitions and shards are kept"
    assert re.search(rf"\ninterrupted after \d+ of 82 samples: {kept}, and the next run", err)
    check_nothing_published(store)
    check_next_run(source, store)


def test_an_interrupt_while_workers_start(source: Path, store: Path) -> None:
    with Packing(source, store, "v1", "--workers", "2", *SLOW) as packing:
        wait_until(packing.workers, "no worker starts")
        with Ended(packing.children()):
            packing.interrupt()
            code, out, err = packing.finish()
    assert (code, out, err.strip()) == (130, "", "")
    check_nothing_published(store)


def test_an_interrupt_is_put_off_while_workers_start() -> None:
    """And what starts meanwhile is deaf to it from its first instruction on."""
    asked = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            child = subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True)
            steps.append(child.stdout.decode().strip())
        steps.append("never")
    assert steps == ["True"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with uninterrupted():
        steps.append("nothing came")
    assert steps == ["True", "nothing came"]


def test_a_bad_file_does_not_stop_what_can_be_packed(
    source: Path, store: Path, cache: Path
) -> None:
    make_fast(source)
    (source / "a" / "1.npz").write_bytes(b"no archive")
    with Packing(source, store, "v1", "--workers", "2", "--quiet") as packing:
        code, _, err = packing.finish()
    assert code == 1
    assert err.startswith(f"error: {source}/a/1.npz: not a readable zip archive")
    assert err.count("\n") == 1
    check_nothing_published(store)
    assert len(list(cache.rglob("builds/*/*.parquet"))) == 2
    write_numbered(source, {"a/1": 1})
    report = run_pack(source, store)
    assert (report.reused, report.built) == (("b", "c"), ("a",))


class Unlucky(Exception):
    """A bug."""


def test_what_was_finished_before_a_failure_is_taken_over(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "small"
    write_numbered(source, {f"{p}/{i}": i for p in "abc" for i in range(3)})
    real = build.build_partition

    def fail_at_c(task: Any, *rest: Any) -> Any:
        if task.id == "c":
            raise Unlucky
        return real(task, *rest)

    monkeypatch.setattr("fsmount.pack.workers.build_partition", fail_at_c)
    with pytest.raises(Unlucky):
        run_pack(source, store)
    monkeypatch.undo()
    check_nothing_published(store)
    report = run_pack(source, store)
    assert (report.reused, report.built, report.samples_read) == (("a", "b"), ("c",), 3)


def listed(tree: NpzTree, key: str) -> SourceSample:
    return next(sample for sample in tree.scan().samples if sample.key == key)


def test_a_file_that_changes_between_listing_and_reading(tmp_path: Path) -> None:
    tree = NpzTree(str(tmp_path))
    write_sample(tmp_path, "a/1", numbered(1), b"{}")
    sample = listed(tree, "a/1")
    assert set(tree.read_arrays(sample).tensors) == {"label", "values"}
    assert tree.read_sidecar(sample) == b"{}"
    old = sample.file
    for other in (
        replace(old, size=old.size + 1),
        replace(old, mtime_ns=old.mtime_ns - 1),
        replace(old, ctime_ns=old.ctime_ns - 1),
        replace(old, inode=old.inode + 1),
    ):
        with pytest.raises(SourceChangedError, match=f"{tmp_path}/a/1.npz: changed while"):
            tree.read_arrays(replace(sample, file=other))
        with pytest.raises(SourceChangedError, match=f"{tmp_path}/a/1.json: changed while"):
            tree.read_sidecar(replace(sample, sidecar=other))
    (tmp_path / "a" / "1.npz").unlink()
    (tmp_path / "a" / "1.json").unlink()
    with pytest.raises(SourceChangedError, match=f"{tmp_path}/a/1.npz: vanished"):
        tree.read_arrays(sample)
    with pytest.raises(SourceChangedError, match=f"{tmp_path}/a/1.json: vanished"):
        tree.read_sidecar(sample)
    (tmp_path / "a" / "1.npz").mkdir()
    with pytest.raises(SourceError, match=f"{tmp_path}/a/1.npz"):
        tree.read_arrays(sample)


@pytest.mark.parametrize("how", ["grows", "shrinks", "same size", "replaced"])
def test_a_file_that_changes_while_it_is_read(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change comes between the two looks at the open file, through the path."""
    tree = NpzTree(str(tmp_path))
    write_sample(tmp_path, "1", numbered(1))
    path, sample = tmp_path / "1.npz", listed(NpzTree(str(tmp_path)), "1")
    data = path.read_bytes()
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        if found.st_ino == sample.file.inode and not changed:
            changed.append(True)
            if how == "replaced":
                path.rename(tmp_path / "old")
                path.write_bytes(data)
            else:
                path.write_bytes({"grows": data + b"x", "shrinks": data[:-1]}.get(how, data))
        return found

    changed: list[bool] = []
    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(SourceChangedError, match="changed while it was packed"):
        tree.read_arrays(sample)
    assert changed


def test_a_change_in_the_middle_of_a_pack_publishes_nothing(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "small"
    write_numbered(source, {f"a/{i}": i for i in range(3)})
    run_pack(source, store)
    write_sample(source, "a/0", numbered(9))
    real = NpzTree.read_arrays

    def read_arrays(tree: NpzTree, sample: SourceSample, limit: int) -> Any:
        write_sample(source, "a/0", numbered(10))
        return real(tree, sample, limit)

    monkeypatch.setattr(NpzTree, "read_arrays", read_arrays)
    with pytest.raises(SourceChangedError, match=f"{source}/a/0.npz"):
        run_pack(source, store, "v2")
    monkeypatch.undo()
    assert tags(store) == ["v1"]
    check_nothing_left(store)
    assert run_pack(source, store, "v2").samples_read == 1


def spawned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many processes each pack starts from now on."""
    counts: list[int] = []
    pool = workers._pool

    def counting(count: int, shared: Any) -> Any:
        counts.append(count)
        return pool(count, shared)

    monkeypatch.setattr(workers, "_pool", counting)
    return counts


def test_processes_start_by_themselves_only_where_they_pay(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, counts = tmp_path / "many", spawned(monkeypatch)
    monkeypatch.setattr(workers, "_START", 0.1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    write_numbered(source, {f"{p}/{i}": i for p in "ab" for i in range(60)})
    settle(source)
    run_pack(source, store, workers=None)
    assert counts == [2]
    write_numbered(source, {"a/1": 99, "b/1": 98})
    report = run_pack(source, store, "v2", workers=None)
    assert (report.built, report.samples_read) == (("a", "b"), 2)
    assert counts == [2]
    run_pack(source, store, "v3", workers=2, force=True)
    assert counts == [2, 2]
