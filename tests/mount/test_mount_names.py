"""Partitions whose names common tools would skip or misread, looked at with these tools."""

from __future__ import annotations

import glob
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from fsmount.model import DirectoryRule
from fsmount.mount import lifecycle
from fsmount.mount.ending import umount
from fsmount.mount.request import MountRequest
from fsmount.paths import shard_path
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.testing.tiny import Sample
from fsmount_loader import ShardDataset

pytestmark = pytest.mark.mounted

KEYS = [
    "top", "plain/0", "_val/0", ".hid/0", "__pycache__/0", "a/_b/.c/0", "_metadata/0", "_root/0",
    "%41/0", "A/0", "x._COPYING_/0", "number=3/0", "number=x/0", "back\\slash/0", "-rf/0", "[ab]/0",
    "x.parquet/0", "x.parquet/y/0", "y.tar/z/0",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A version whose partitions have one sample each; its sidecar has its number."""
    partitions = {
        str(DirectoryRule().partition_of(key)): [
            Sample(key, {"a": np.array(number)}, (), b'{"number":%d}' % number)
        ]
        for number, key in enumerate(KEYS)
    }
    tiny.publish(store, "names", partitions)
    path = str(tmp_path_factory.mktemp("names"))
    lifecycle.mount(MountRequest(store.path, "names", path, xattrs=True))
    yield path
    umount(path)


NUMBERED = sorted(enumerate(KEYS))


def shell(script: str, cwd: str) -> list[str]:
    command = ["bash", "-O", "globstar", "-c", script]
    done = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()


def test_pyarrow_reads_all_manifests(root: str) -> None:
    for table in (
        ds.dataset(f"{root}/manifests").to_table(),
        pq.read_table(f"{root}/manifests", use_threads=False),
    ):
        found = zip(table["number"].to_pylist(), table["__key__"].to_pylist(), strict=True)
        assert sorted(found) == NUMBERED
        assert table.column_names.count("number") == 1


def test_duckdb_reads_all_manifests(root: str) -> None:
    with duckdb.connect() as connection:
        query = "SELECT number, __key__ FROM read_parquet(?)"
        found = connection.execute(query, [f"{root}/manifests/**/*.parquet"]).fetchall()
    assert sorted(found) == NUMBERED


def test_globs_find_all_files(root: str, tmp_path: Path) -> None:
    shards = sorted(shard_path(str(DirectoryRule().partition_of(key)), 0) for key in KEYS)
    assert sorted(shell("printf '%s\\n' shards/**/*.tar", root)) == shards
    assert sorted(glob.glob("shards/**/*.tar", root_dir=root, recursive=True)) == shards
    assert len(shell("printf '%s\\n' manifests/**/*.parquet", root)) == len(KEYS)
    copy = str(tmp_path / "copy")
    shell(f"rsync -r {root}/manifests {root}/shards {copy} && cp -r {root}/*.json {copy}", root)
    shell(f"cp {root}/*.parquet {root}/SHA256SUMS {copy} && sha256sum -c --strict SHA256SUMS", copy)


def test_files_of_a_glob_are_read_one_by_one(root: str) -> None:
    paths = glob.glob(f"{root}/manifests/**/*.parquet", recursive=True)
    tables = [pq.read_table(path, use_threads=False) for path in paths]
    assert sorted(key for table in tables for key in table["__key__"].to_pylist()) == sorted(KEYS)


def test_sha256sum_accepts_them(root: str) -> None:
    lines = shell("sha256sum -c --strict SHA256SUMS", root)
    assert len(lines) == 2 + 2 * len(KEYS)
    assert all(line.endswith(": OK") for line in lines)


def test_samples_have_the_names_of_the_source(root: str) -> None:
    for number, key in enumerate(KEYS):
        path = f"{root}/samples/{key if '/' in key else f'root_/{key}'}.npz"
        with np.load(path) as arrays:
            assert arrays["a"] == number


def test_the_partition_attribute_has_the_id_itself(root: str) -> None:
    attribute = "user.fsmount.partition"
    for partition in ("_val", "number=3", "back\\slash", "a/_b/.c", "root_"):
        assert os.getxattr(f"{root}/{shard_path(partition, 0)}", attribute).decode() == partition


def test_the_loader_delivers_them(root: str) -> None:
    data = ShardDataset(root, batch_size=1, shuffle=False)
    seen = sorted(int(number) for batch in data for number in batch["a"])
    assert seen == list(range(len(KEYS)))
    assert len(ShardDataset(root, batch_size=1, where="__key__ LIKE '\\_val%' ESCAPE '\\'")) == 1
