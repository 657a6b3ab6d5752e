"""A file that was written again is read again, whatever was done to its times."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from npz_tree import Content, read_version, run_pack, write_sample

from fsmount.pack.files import FileStat
from fsmount.pack.settled import file_clock, settled
from fsmount.pack.source import SourceSample
from fsmount.store.inside import StorePath
from fsmount.testing.settled import settle

PACK = sys.modules["fsmount.pack.pack"]  # the package has a function of that name
SECOND = 1_000_000_000
BACK_THEN = 1_577_836_800 * SECOND  # ns


def write(root: Path, value: float) -> dict[str, Content]:
    """Samples whose files have one size and one mtime, whatever `value` of one digit they hold."""
    found = {}
    for key in ("p/0", "p/1", "q/0"):
        sidecar = b'{"value": %d}' % value
        found[key] = write_sample(root, key, {"x": np.full(4, value)}, sidecar)
    for path in root.rglob("*.*"):
        os.utime(path, ns=(BACK_THEN, BACK_THEN))
    return found


def overwrite(path: Path, data: bytes) -> None:
    """Other bytes in the same file: size, mtime and inode stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        before.st_size, before.st_mtime_ns, before.st_ino,
    )  # fmt: skip


def test_a_file_rewritten_in_place_with_its_mtime_put_back(
    source: Path, store: Path, tmp_path: Path
) -> None:
    expected = write(source, 1)
    run_pack(source, store)
    others = write(tmp_path / "other", 2)
    overwrite(source / "p/0.npz", (tmp_path / "other/p/0.npz").read_bytes())
    overwrite(source / "q/0.json", (tmp_path / "other/q/0.json").read_bytes())
    report = run_pack(source, store, "v2")
    assert (report.built, report.refreshed, report.samples_read) == (("p",), ("q",), 1)
    expected["p/0"] = replace(others["p/0"], sidecar=b'{"value": 1}')
    expected["q/0"] = replace(expected["q/0"], sidecar=b'{"value": 2}')
    assert read_version(store, "v2") == expected


def unpack_over(release: Path, source: Path) -> None:
    packed = release.with_suffix(".tar")
    subprocess.run(
        ["tar", "--mtime=@1577836800", "-cf", packed, "-C", release, "p", "q"], check=True
    )
    subprocess.run(["tar", "--overwrite", "-xf", packed, "-C", source], check=True)


def copy_over(release: Path, source: Path) -> None:
    subprocess.run(["cp", "-rp", f"{release}/.", source], check=True)


@pytest.mark.parametrize("spread", [unpack_over, copy_over])
def test_a_release_with_the_times_of_the_one_before(
    spread: Any, source: Path, store: Path, tmp_path: Path
) -> None:
    write(source, 1)
    run_pack(source, store)
    before = {path: FileStat.of(path.stat()) for path in source.rglob("*.*")}
    expected = write(tmp_path / "release", 2)
    spread(tmp_path / "release", source)
    for path, old in before.items():  # but for the ctime, nothing tells
        new = FileStat.of(path.stat())
        assert replace(old, ctime_ns=0, inode=0) == replace(new, ctime_ns=0, inode=0)
    assert run_pack(source, store, "v2").samples_read == 3
    assert read_version(store, "v2") == expected


def test_a_file_written_twice_within_a_step_of_its_clock(
    source: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second write comes after it was read, and leaves no trace at all."""
    real = FileStat.of

    def of(found: os.stat_result) -> FileStat:
        seen = real(found)
        return replace(seen, ctime_ns=BACK_THEN, mtime_ns=BACK_THEN)

    write(source, 1)
    expected = write(tmp_path / "other", 2)
    monkeypatch.setattr(FileStat, "of", of)
    monkeypatch.setattr(PACK, "file_clock", lambda *_: BACK_THEN + SECOND)
    run_pack(source, store)
    for path in source.rglob("*.*"):
        overwrite(path, (tmp_path / "other" / path.relative_to(source)).read_bytes())
    assert run_pack(source, store, "v2").samples_read == 3
    assert read_version(store, "v2") == expected


def test_force_reads_what_no_time_tells(
    source: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without a ctime: a write whose mtime is put back is missed, but by force."""
    real = FileStat.of
    monkeypatch.setattr(FileStat, "of", lambda found: replace(real(found), ctime_ns=BACK_THEN + 1))
    old = write(source, 1)
    expected = write(tmp_path / "other", 2)
    run_pack(source, store)
    for path in source.rglob("*.*"):
        overwrite(path, (tmp_path / "other" / path.relative_to(source)).read_bytes())
    assert run_pack(source, store, "v2").samples_read == 0
    assert read_version(store, "v2") == old
    assert run_pack(source, store, "v3", force=True).samples_read == 3
    assert read_version(store, "v3") == expected


@pytest.mark.parametrize(
    ("ctime", "mtime", "is_settled"),
    [
        (100 * SECOND + 1, 0, True),
        (130 * SECOND - 30_000_000, 0, True),
        (130 * SECOND - 10_000_000, 0, False),
        (130 * SECOND + 5, 0, False),
        (999 * SECOND + 5, 0, False),
        (129 * SECOND, 0, False),  # whole seconds: the step may be two of them
        (128 * SECOND, 0, True),
        (100 * SECOND + 1, 130 * SECOND, False),
        (100 * SECOND + 1, 129 * SECOND, True),
        (100 * SECOND, 129 * SECOND, False),
        (100 * SECOND + 1, 999 * SECOND, True),  # a camera's clock: no write gives it again
    ],
)
def test_which_times_are_too_recent(ctime: int, mtime: int, is_settled: bool) -> None:
    file = FileStat(10, mtime, ctime, 1)
    calm = FileStat(10, 0, 1, 2)
    for sample in (SourceSample("a", file, calm), SourceSample("a", calm, file)):
        assert (settled((sample,), 130 * SECOND) == (sample,)) is is_settled
    assert settled((SourceSample("a", calm, None),), 130 * SECOND)[0].sidecar is None


def test_the_clock_is_that_of_the_files(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.touch()
    clock = file_clock(str(tmp_path), StorePath(str(tmp_path)))
    after.touch()
    assert before.stat().st_ctime_ns <= clock <= after.stat().st_ctime_ns
    assert sorted(os.listdir(tmp_path)) == ["after", "before"]


def test_on_another_file_system_the_clock_may_be_wrong_by_a_minute(tmp_path: Path) -> None:
    assert os.stat("/proc").st_dev != tmp_path.stat().st_dev
    assert file_clock("/proc", StorePath(str(tmp_path))) <= time.time_ns() - 60 * SECOND


def test_a_file_that_was_just_written_is_read_twice_and_then_known(
    source: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source, 1)
    settle(source)
    (source / "q/0.npz").touch()
    changed = (source / "q/0.npz").stat().st_ctime_ns
    with monkeypatch.context() as patch:
        patch.setattr(PACK, "file_clock", lambda *_: changed)
        assert run_pack(source, store).samples_read == 3
    assert run_pack(source, store, "v2").samples_read == 1
    assert run_pack(source, store, "v3").samples_read == 0
