"""A disk that fills up: an error that names the file, a valid store, and a run that goes on."""

from __future__ import annotations

import errno
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from npz_tree import (
    check_nothing_left,
    read_version,
    run_pack,
    snapshot,
    tags,
    write_numbered,
    write_sample,
)

from fsmount.errors import StoreWriteError
from fsmount.store import Store

PACK = [sys.executable, "-m", "fsmount_cli.main", "pack"]
FILLER = "filler"
SIZE = 4 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"needs the right to mount: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill(disk: Path, free: int) -> None:
    """Leave `free` bytes on the disk."""
    path = disk / FILLER
    path.unlink(missing_ok=True)
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017
        file.truncate(file.tell() - free)


def command(source: Path, store: Path, tag: str, workers: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PACK, str(source), str(store), "--tag", tag, "--quiet", "--workers", str(workers)],
        capture_output=True,
        text=True,
        check=False,
    )


def write_big(source: Path, key: str, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 256, 200_000, "u1")
    write_sample(source, key, {"x": values})


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk(workers: int, tmp_path: Path, disk: Path) -> None:
    source, store = tmp_path / "source", disk / "store"
    old = write_numbered(source, {"a/1": 1})
    run_pack(source, store, "v1")
    before = snapshot(store)
    for i in range(6):
        write_big(source, f"{'bc'[i % 2]}/{i}", i)
    fill(disk, free=500_000)
    failed = command(source, store, "v2", workers)
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert failed.stderr.count("\n") == 1
    assert failed.stderr.startswith(f"error: can't write {store}/")
    assert "No space left on device" in failed.stderr
    after = snapshot(store)
    assert before.items() <= after.items()
    assert tags(store) == ["v1"]
    check_nothing_left(store)
    assert read_version(store, "v1") == old
    (disk / FILLER).unlink()
    done = command(source, store, "v2", workers)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_version(store, "v2")) == 7


def test_a_disk_that_is_full_at_any_step(tmp_path: Path, disk: Path) -> None:
    """Whatever does not fit any more, it is an error of one kind, and the old version stands."""
    source, before, store = tmp_path / "source", tmp_path / "before", disk / "store"
    old = write_numbered(source, {"a/1": 1})
    run_pack(source, before, "v1")
    new = write_numbered(source, {"a/2": 2, "b/3": 3})
    for step in itertools.count():
        (disk / FILLER).unlink(missing_ok=True)
        shutil.rmtree(store, ignore_errors=True)
        shutil.copytree(before, store)
        fill(disk, free=4096 * step)
        try:
            run_pack(source, store, "v2")
        except StoreWriteError as error:
            assert str(error).startswith(f"can't write {store}/")  # noqa: PT017
            assert str(error).endswith("No space left on device")  # noqa: PT017
        else:
            break
        assert read_version(store, "v1") == old
        if "v2" in tags(store):  # there was no room to move `latest`
            assert read_version(store, "v2") == old | new
        (disk / FILLER).unlink()
        run_pack(source, store, "v2")
        assert Store.open(str(store)).latest() == "v2"
    assert step > 8
    assert read_version(store, "v2") == old | new
    check_nothing_left(store)
