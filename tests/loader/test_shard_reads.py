"""Reading payloads: coalesced, checked, retried, announced; damage is an error that names it."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_versions import build, damage, numbered
from test_dataset import ALL, all_numbers, numbers

from fsmount.errors import FsmountError, IntegrityError, LoadError
from fsmount_loader import ShardDataset, ShardLoader
from fsmount_loader.options import Options
from fsmount_loader.plan import Plan, make_plan
from fsmount_loader.read import Reader, ShardFiles, coalesce
from fsmount_loader.version import VersionFiles

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

PAYLOADS = st.lists(  # of three shards whose members never overlap, but may be asked for twice
    st.tuples(st.integers(0, 2), st.integers(0, 20)).map(
        lambda at: (at[0], at[1] * 50, 1 + at[1] * 37 % 50)
    ),
    max_size=20,
)


@given(PAYLOADS, st.integers(0, 60))
def test_runs_cover_each_payload_once_and_read_through_small_gaps_only(
    payloads: list[tuple[int, int, int]], threshold: int
) -> None:
    shard, offset, size = (
        (np.array(part, np.int64) for part in zip(*payloads, strict=True))
        if (payloads)
        else (np.zeros(0, np.int64),) * 3
    )
    runs = list(coalesce(shard, offset, size, threshold))
    assert sorted(place for *_, places in runs for place in places) == list(range(len(payloads)))
    for number, first, last, places in runs:
        spans = sorted((int(offset[p]), int(offset[p] + size[p])) for p in places)
        assert {int(shard[p]) for p in places} == {number}
        assert (spans[0][0], max(stop for _, stop in spans)) == (first, last)
        end = first
        for start, stop in spans:
            assert start - end <= threshold
            end = max(end, stop)
    for (one, _, stop, _), (other, start, _, _) in pairwise(runs):
        assert one < other or start - stop > threshold


def test_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsmount_loader.read._RUN_MAX", 100)
    shard, size = np.zeros(10, np.int64), np.full(10, 40, np.int64)
    runs = list(coalesce(shard, np.arange(10) * 40, size, 1000))
    assert [places for *_, places in runs] == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]
    assert len(list(coalesce(shard[:2], np.array([0, 200]), size[:2] * 5, 1000))) == 2


class Spy(ShardFiles):
    """Counts what is read and announced, and fails when told to."""

    def __init__(self, plan: Plan, fail: Callable[[int], OSError | None] = lambda n: None) -> None:
        super().__init__(plan.shards)
        self.reads: list[tuple[int, int, int]] = []
        self._fail = fail

    def read(self, shard: int, start: int, buffer: memoryview) -> int:
        self.reads.append((shard, start, start + len(buffer)))
        error = self._fail(len(self.reads))
        if error:
            raise error
        return super().read(shard, start, buffer)


def planned(root: Path, **options: Any) -> Plan:
    return make_plan(VersionFiles.open(root), Options(batch_size=1, **options))


def read_all(plan: Plan, files: Spy, threshold: int = 0, retries: int = 3) -> tuple[Any, Any]:
    """The payloads or errors of all rows, and how long it waited."""
    waits: list[float] = []
    reader = Reader(plan, files, seek_threshold=threshold, retries=retries, sleep=waits.append)
    rows = np.arange(len(plan.rows))
    groups = reader.payloads(rows)
    found = {p: d if isinstance(d, Exception) else bytes(d) for group in groups for p, d in group}
    files.close()
    return found, waits


def test_dense_selections_are_read_through_and_sparse_ones_sought(small: Path) -> None:
    plan = planned(small)
    through, sought = Spy(plan), Spy(plan)
    assert read_all(plan, through, 1 << 20) == read_all(plan, sought, 0)
    assert len(through.reads) == 3
    assert len(sought.reads) == 18
    sparse = planned(small, where="__index__ IN (0, 6)")
    files = Spy(sparse)
    read_all(sparse, files, 1024)
    assert len(files.reads) == 5
    assert sum(stop - start for _, start, stop in files.reads) == sparse.rows.size.sum()


def test_errors_are_retried_with_growing_waits(small: Path) -> None:
    plan = planned(small, where="n = 3")
    for failures in range(1, 5):
        files = Spy(plan, lambda n, f=failures: OSError(errno.EIO, "bad") if n <= f else None)  # type: ignore[misc]
        found, waits = read_all(plan, files)
        assert isinstance(found[0], bytes)
        assert waits == [0.1 * 2**n for n in range(failures - 1)]
    files = Spy(plan, lambda n: OSError(errno.ESTALE, "stale"))
    found, waits = read_all(plan, files, retries=8)
    assert isinstance(found[0], LoadError)
    assert str(found[0]).endswith(
        f"a/000000.tar: sample 'a/0003' at offset {plan.rows.offset[0]}: stale"
    )
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_payload_that_is_right_when_read_again_is_delivered(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = planned(small)
    expected, _ = read_all(plan, Spy(plan))

    class Flaky(Spy):
        def read(self, shard: int, start: int, buffer: memoryview) -> int:
            got = super().read(shard, start, buffer)
            if len(self.reads) in (1, 5):
                buffer[got // 2] ^= 1
            return got

    assert read_all(plan, Flaky(plan), 0)[0] == expected
    assert read_all(plan, Flaky(plan), 1 << 20)[0] == expected


def test_each_chunk_is_announced_once_and_before_it_is_read(
    larger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[tuple[str, int, int]] = []

    def note(files: ShardFiles, shard: int, start: int, stop: int) -> None:
        announced.append((files._paths[shard], start, stop))

    monkeypatch.setattr(ShardFiles, "announce", note)
    data = ShardDataset(larger, batch_size=8, chunk_size=5, streams=4, columns=["__offset__"])
    assert len(all_numbers(data)) == 103
    spans = sorted(announced)
    for (path, _, stop), (other, start, _) in pairwise(spans):
        assert path != other or stop <= start
    assert len(spans) == 3 + 4 + 5 + 4 + 6 + 1
    announced.clear()
    assert len(all_numbers(ShardDataset(larger, batch_size=8, prefetch=0))) == 103
    assert announced == []


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux tells what is cached")
def test_what_is_announced_is_fetched(tmp_path: Path) -> None:
    path, size = tmp_path / "shard", 1 << 20
    path.write_bytes(bytes(size))
    os.sync()
    files = ShardFiles([str(path)])
    with path.open("rb") as file:

        def cached(at: int) -> bool:
            try:
                return os.preadv(file.fileno(), [bytearray(1)], at, os.RWF_NOWAIT) == 1
            except BlockingIOError:
                return False

        os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
        if cached(300_000):
            pytest.skip("a file system that is its own cache")
        files.announce(0, 300_000, 2 * size)  # beyond its end, as a bad manifest may say
        end = time.monotonic() + 60
        while not (cached(300_000) and cached(size - 1)):
            assert time.monotonic() < end
            time.sleep(0.001)
        assert not cached(0)
    files.close()


def test_what_can_not_be_announced_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    files = ShardFiles([str(tmp_path / "empty"), str(tmp_path / "missing"), str(tmp_path)])
    for shard, start in ((0, 0), (1, 0), (2, 0), (0, 1 << 62), (0, -(1 << 62))):
        files.announce(shard, start, (1 << 63) - 1)
    files.close()


def test_open_files_are_bounded_and_survive_a_fork(small: Path) -> None:
    plan = planned(small)
    files = ShardFiles(plan.shards, most=1)

    def read_first(shard: int) -> bytes:
        buffer = bytearray(512)
        files.read(shard, 0, memoryview(buffer))
        return bytes(buffer)

    before = len(os.listdir("/proc/self/fd"))
    firsts = [read_first(shard) for shard in range(3)]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    pid = os.fork()
    if pid == 0:
        same = [read_first(shard) for shard in (2, 1, 0)] == firsts[::-1]
        os._exit(0 if same else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert [read_first(shard) for shard in range(3)] == firsts
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """One shard of four samples."""
    return build(tmp_path / "one", {"a": [numbered(4)]})


def test_a_flipped_bit_anywhere_in_a_payload_is_found(one: Path) -> None:
    shard = one / "shards" / "a" / "000000.tar"
    rows = planned(one).rows
    data = ShardDataset(one, batch_size=4, shuffle=False, retries=0)
    start, size = int(rows.offset[2]), int(rows.size[2])
    for at in range(start, start + size, 7):
        damage(shard, at)
        with pytest.raises(
            IntegrityError, match=rf"a/000000\.tar: sample 'a/0002' at offset {start}"
        ):
            list(data)
        damage(shard, at)
    for at in (0, start - 1):  # outside any payload: nothing to deliver is touched
        damage(shard, at)
    assert all_numbers(data) == [0, 1, 2, 3]


def test_a_shard_truncated_anywhere_is_an_error_or_delivers_all(one: Path) -> None:
    shard = one / "shards" / "a" / "000000.tar"
    whole = shard.read_bytes()
    rows = planned(one).rows
    ends = (rows.offset + rows.size).tolist()
    data = ShardDataset(one, batch_size=1, shuffle=False, retries=0)
    skipping = ShardDataset(one, batch_size=4, shuffle=False, retries=0, on_error="skip")
    for length in [*range(0, len(whole), 512), *(end - 1 for end in ends)]:
        shard.write_bytes(whole[:length])
        intact = sum(end <= length for end in ends)
        if intact == 4:
            assert all_numbers(data) == [0, 1, 2, 3]
            continue
        iterator = iter(data)
        assert [numbers(next(iterator)) for _ in range(intact)] == [[n] for n in range(intact)]
        with pytest.raises(IntegrityError, match=rf"a/000000\.tar: sample 'a/000{intact}' at off"):
            next(iterator)
        before = skipping.skipped
        (batch,) = skipping
        assert batch["__valid__"].tolist() == [n < intact for n in range(4)]
        assert not batch["x"][intact:].any()
        assert skipping.skipped - before == 4 - intact


def test_swapped_shards_are_found(larger: Path, tmp_path: Path) -> None:
    root = build(tmp_path / "v", {"a": [numbered(4)], "b": [numbered(4, 1)]})
    a, b = (root / "shards" / name / "000000.tar" for name in "ab")
    a.rename(root / "c")
    b.rename(a)
    (root / "c").rename(b)
    with pytest.raises(IntegrityError, match=r"/a/000000\.tar: sample 'a/0000'"):
        list(ShardDataset(root, batch_size=1, shuffle=False, retries=0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_missing_shard_is_an_error_or_skipped_and_counted(
    small: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    (small / "shards" / "d" / "000000.tar").unlink()
    data = ShardDataset(small, batch_size=3, retries=0)
    with pytest.raises(
        LoadError, match=r"d/000000\.tar: sample 'd/000.' at offset .*: No such"
    ) as e:
        list(ShardLoader(data, workers))
    assert "\n" not in str(e.value)
    skipping = ShardDataset(small, batch_size=3, retries=0, on_error="skip", max_skipped=7)
    with caplog.at_level(logging.ERROR):
        batches = list(ShardLoader(skipping, workers))
        assert sorted(n for batch in batches for n in numbers_of_valid(batch)) == ALL[:11]
        assert sum(len(batch["__valid__"]) for batch in batches) == 18
        assert skipping.skipped == 7
        with pytest.raises(LoadError, match="more than max_skipped=7 samples"):
            list(ShardLoader(skipping, workers))


def numbers_of_valid(batch: Any) -> list[int]:
    found: list[int] = batch["x"][:, 0].long()[batch["__valid__"]].tolist()
    return found


def test_a_skipped_row_keeps_its_position(small: Path) -> None:
    whole = [numbers(batch) for batch in ShardDataset(small, batch_size=6)]
    plan = planned(small, where="n = 2003")
    damage(small / "shards" / "d" / "000000.tar", int(plan.rows.offset[0]) + 5)
    data = ShardDataset(small, batch_size=6, on_error="skip", keys=True)
    for wanted, batch in zip(whole, data, strict=True):
        assert batch["__valid__"].tolist() == [n != 2003 for n in wanted]
        assert [n for n in wanted if n != 2003] == numbers_of_valid(batch)
        assert len(batch["__key__"]) == 6
    assert data.skipped == 1


def test_errors_of_every_kind_are_fsmount_errors(one: Path) -> None:
    shard = one / "shards" / "a" / "000000.tar"
    shard.unlink()
    shard.mkdir()  # a directory: can be opened, not read
    with pytest.raises(FsmountError, match=r"a/000000\.tar: sample 'a/000"):
        list(ShardDataset(one, batch_size=2, retries=0))
