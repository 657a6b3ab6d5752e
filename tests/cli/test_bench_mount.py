"""`fsmount bench mount` and `bench pack`: every measure is taken, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsmount.model import LatestRef
from fsmount.mount.mountinfo import all_mounts
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount_cli.bench.measures import MEASURES
from fsmount_cli.bench.reading import RATIOS, ratios
from fsmount_cli.bench.served import MOUNTS, OBJECT, largest

SHARD = 3 << 20  # bytes of random numbers, which zstd can't make smaller


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """`v1`: a shard of some megabytes and a few tiny ones."""
    made = Store.create(str(tmp_path_factory.mktemp("data") / "store"))
    noise = np.random.default_rng(1).integers(0, 256, SHARD, np.uint8)
    partitions = {
        "large": [tiny.Sample("large/0", {"noise": noise})],
        "small": [tiny.numbered(f"small/{n}", n) for n in range(9)],
    }
    tiny.publish(made, "v1", partitions)
    return made


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Where benches make their directories; all of them are gone afterwards, with all in them."""
    path = tmp_path / "scratch"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == []
    assert mountpoints(path) == []
    assert processes_of(path) == {}


def mountpoints(scratch: Path) -> list[str]:
    return [m.mountpoint for m in all_mounts() if m.mountpoint.startswith(f"{scratch}/")]


def processes_of(scratch: Path) -> dict[int, str]:
    """What has `scratch` in its command line."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            words = Path("/proc", name, "cmdline").read_text(errors="replace")
            if str(scratch) in words:
                found[int(name)] = words
    return found


def bench(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fsmount_cli.main", "bench", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(*arguments: object) -> dict[str, Any]:
    process = bench(*arguments, "--json")
    out, err = process.communicate()
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def until(probe: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not probe():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.mounted
def test_each_measure_is_taken(store: Store, scratch: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = ["--rounds", 2, "--scratch", scratch, "--output", output]
    found = result("mount", f"{store.path}@v1", *options)
    assert found == json.loads(output.read_text())
    assert found["left_out"] == {}
    assert set(MEASURES) <= set(found)
    assert found["settings"]["bytes_read"] >= SHARD
    assert len(found["start"]["runs"]) == 2
    assert found["start"]["driver"] == "kernel"
    assert min(found["start"]["server_rss_mb"], found["start"]["supervisor_rss_mb"]) > 1
    names = {f"{one} / {other}" for one, other in RATIOS}
    for heat in ("warm", "cold"):
        assert set(found[heat]["mb_per_second"]) == {OBJECT, *MOUNTS}
        assert set(found[heat]["ratios"]) == names
        assert min(found[heat]["ratios"].values()) > 0
        assert {len(runs) for runs in found[heat]["runs"].values()} == {2}
    assert found["recovery"]["seconds"] > 0
    metadata = found["metadata"]
    assert metadata["files"] == 3 + 2 + 1 + 3  # own files, manifests, shards
    assert min(metadata["ratios"].values()) > 0
    assert os.listdir(f"{store.path}/leases") == []


@pytest.mark.mounted
def test_pages_are_counted_once_by_passthrough_and_twice_without(
    store: Store, scratch: Path
) -> None:
    found = result("mount", store.path, "--only", "page_cache", "--only", "warm", "--rounds", 1,
                   "--scratch", scratch)  # fmt: skip
    shares = found["page_cache"]
    assert shares[OBJECT] == pytest.approx(1, abs=0.1)
    assert shares["no passthrough"] == pytest.approx(2, abs=0.1)
    expected = 1 if found["warm"]["passthrough_used"] else 2
    assert shares["passthrough"] == pytest.approx(expected, abs=0.1)


@pytest.mark.mounted
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_nothing_behind(
    store: Store, scratch: Path, number: int
) -> None:
    process = bench("mount", store.path, "--rounds", 10_000, "--only", "warm", "--scratch", scratch)
    until(lambda: bool(mountpoints(scratch)))
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert out == ""


@pytest.mark.mounted
def test_it_ends_in_time_though_a_server_hangs(store: Store, scratch: Path) -> None:
    options = ["--rounds", 10_000, "--seconds", 3, "--only", "warm", "--scratch", scratch]
    process = bench("mount", store.path, *options)
    until(lambda: any(mountpoint.endswith("/fusepy") for mountpoint in mountpoints(scratch)))
    for pid, words in processes_of(scratch).items():
        if "/fusepy" in words:
            os.kill(pid, signal.SIGSTOP)
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.splitlines()[-1] == "error: not done in 6 s"


@pytest.mark.mounted
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a tmpfs")
def test_what_can_not_be_had_is_left_out_with_the_reason(
    store: Store, scratch: Path, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", memory], check=True)
    try:
        shutil.copytree(store.path, memory / "store")
        only = ["--only", "cold", "--only", "recovery", "--rounds", 1]
        found = result("mount", memory / "store", *only, "--scratch", scratch)
    finally:
        subprocess.run(["umount", "--lazy", memory], check=True)
    assert "cold" not in found
    assert "stays in the page cache" in found["left_out"]["cold"]
    assert found["recovery"]["seconds"] > 0


def test_the_largest_shards_that_fit_are_read(store: Store) -> None:
    version = store.version(LatestRef())
    sizes = sorted((s.size for p in version.partitions for s in p.shards), reverse=True)
    everything = largest(store, version, 1 << 30)
    assert [os.path.getsize(shard.object) for shard in everything.shards] == sizes
    assert everything.size == sum(sizes)
    assert [shard.read for shard in largest(store, version, sizes[0]).shards] == sizes[:1]
    assert [shard.read for shard in largest(store, version, 1000).shards] == [1000]


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    runs = {OBJECT: [10.0, 100.0, 1000.0], "passthrough": [5.0, 90.0, 990.0]}
    assert ratios(runs) == {"passthrough / object": 0.9}


def test_a_source_is_packed_and_packed_again(scratch: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(6):
        path = source / f"drive{number % 2}" / f"{number}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, values=np.arange(1000.0) + number)
    options = ["--rounds", 2, "--workers", 2, "--scratch", scratch]
    found = result("pack", source, *options)
    assert found["settings"]["source_bytes"] == sum(f.stat().st_size for f in source.rglob("*.npz"))
    assert len(found["runs"]) == 2
    for run in found["runs"]:
        assert set(run) == set(found["medians"])
        assert min(run.values()) > 0
        assert run["samples_per_second"] * run["seconds"] == pytest.approx(6)
        assert run["raw_mb_per_second"] * run["seconds"] > 6 * 8000 / 1e6
    assert found["ratios"]["pack / unchanged"] > 0


def test_a_source_that_can_not_be_packed_is_an_error(scratch: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "0.npz").write_bytes(b"no archive")
    process = bench("pack", tmp_path / "source", "--scratch", scratch)
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("error: ")
    assert "0.npz" in err.splitlines()[-1]
