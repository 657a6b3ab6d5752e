"""Standard tools on a real mount, and what they find of faults."""

from __future__ import annotations

import gc
import glob
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset
from mounting import Mounter, fsmount, request_for, wait_for

from fsmount.formats import sample as samples
from fsmount.model import Digest, Version
from fsmount.mount import lifecycle
from fsmount.mount.ending import umount
from fsmount.mount.request import FUSEPY, KERNEL, MountRequest
from fsmount.store import Store
from fsmount.testing import tiny
from fsmount.vfs.reads import Verify
from fsmount_loader.webdataset import ShardSamples, decoder

pytestmark = pytest.mark.mounted


@pytest.fixture(scope="module", params=[KERNEL, FUSEPY])
def root(
    store: Store,
    version: Version,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[str]:
    """`v1`, mounted."""
    del version
    path = str(tmp_path_factory.mktemp("tools"))
    lifecycle.mount(MountRequest(store.path, "v1", path, driver=request.param))
    yield path
    umount(path)


def run(*command: str, cwd: str | None = None) -> str:
    """The output of a command that must succeed and complain of nothing."""
    done = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), (command, done.stdout)
    return done.stdout


def test_ls_and_find_agree(root: str) -> None:
    assert run("ls", root).split() == sorted(os.listdir(root))
    found = run("find", ".", "-type", "f", "-printf", "%p %s %i %n %b\n", cwd=root).splitlines()
    info = {
        f"./{os.path.relpath(d, root)}/{n}".replace("/./", "/"): os.stat(f"{d}/{n}")
        for d, _, names in os.walk(root)
        for n in names
    }
    assert sorted(found) == sorted(
        f"{p} {s.st_size} {s.st_ino} {s.st_nlink} {s.st_blocks}" for p, s in info.items()
    )
    directories = run("find", ".", "-type", "d", cwd=root).splitlines()
    assert len(directories) == len(set(directories)) == 1 + sum(len(d) for _, d, _ in os.walk(root))


def test_stat_and_du(root: str) -> None:
    path = f"{root}/partitions.parquet"
    info = os.stat(path)
    assert run("stat", "-c", "%s %Y %A %h", path).split() == [
        str(info.st_size), "1714979289", "-r--r--r--", "1",
    ]  # fmt: skip
    sizes = [os.path.getsize(f"{d}/{name}") for d, _, names in os.walk(root) for name in names]
    assert int(run("du", "-s", "--apparent-size", "--block-size=1", root).split()[0]) == sum(sizes)
    blocks = sum(-(-size // 512) for size in sizes)
    assert int(run("du", "-s", "--block-size=512", root).split()[0]) == blocks


def test_cp_cmp_and_diff(root: str, tmp_path: Path) -> None:
    copy = str(tmp_path / "copy")
    run("cp", "-r", root, copy)
    run("diff", "-r", root, copy)
    run("cmp", f"{root}/VERSION.json", f"{copy}/VERSION.json")
    run(
        "sh", "-c", f"cat '{root}/shards/root_/000000.tar' | cmp - '{copy}/shards/root_/000000.tar'"
    )


def test_rsync_has_nothing_to_do_the_second_time(root: str, tmp_path: Path) -> None:
    copy = str(tmp_path / "copy")
    run("rsync", "-a", f"{root}/", copy)
    assert run("rsync", "-a", "--itemize-changes", f"{root}/", copy) == ""
    assert run("rsync", "-a", "--checksum", "--itemize-changes", f"{root}/", copy) == ""
    run("diff", "-r", root, copy)


def test_sha256sum_accepts_the_whole_version(root: str) -> None:
    lines = run("sha256sum", "-c", "--strict", "SHA256SUMS", cwd=root).splitlines()
    files = [name for d, _, names in os.walk(root) for name in names]
    assert len(lines) == len(files) - 1
    assert all(line.endswith(": OK") for line in lines)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tar_and_webdataset_read_the_shards(root: str) -> None:
    shard = f"{root}/shards/drive/a b/000000.tar"
    names = run("tar", "tf", shard).splitlines()
    assert len(names) == 3
    assert all(name.startswith("drive/a b/") for name in names)
    with tarfile.open(shard) as archive:
        assert archive.getnames() == names
    dataset = webdataset.WebDataset(f"file:{shard}", shardshuffle=False, empty_check=False)
    found = list(dataset)
    del dataset
    gc.collect()  # webdataset leaves its files to the collector, which warns
    assert [f"{one['__key__']}.safetensors.zst" for one in found] == names
    for one in found:
        number = int(one["__key__"].rpartition("/")[2])
        expected = samples.encode(tiny.numbered("", number).arrays)
        assert samples.decompress(one["safetensors.zst"], len(expected)) == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_decodes_what_our_stream_delivers(root: str) -> None:
    shards = glob.glob(f"{root}/shards/**/*.tar", recursive=True)
    plain = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False).decode(decoder)
    theirs = {one["__key__"]: one["safetensors.zst"] for one in plain}
    del plain
    gc.collect()
    source = ShardSamples(root, batch_size=2, evaluate=True, rank=0, world_size=1)
    ours = {one["__key__"]: one["safetensors.zst"] for one in source.decode()}
    assert ours.keys() == theirs.keys() == {f"drive/a b/{n}" for n in range(7)} | {"top"}
    for number in range(7):
        for name, array in tiny.numbered("", number).arrays.items():
            for found in (ours, theirs):
                assert found[f"drive/a b/{number}"][name].tobytes() == array.tobytes()


def test_duckdb_and_pyarrow_read_the_manifests(root: str) -> None:
    keys = {f"drive/a b/{n}" for n in range(7)} | {"top"}
    with duckdb.connect() as connection:
        pattern = f"{root}/manifests/**/*.parquet"
        rows = connection.execute(
            "SELECT __key__, __size__, number FROM read_parquet(?)", [pattern]
        ).fetchall()
    assert {key for key, _, _ in rows} == keys
    assert {(key, n) for key, _, n in rows} == {
        *((f"drive/a b/{n}", None if n % 2 else n) for n in range(7)), ("top", None),
    }  # fmt: skip
    table = pq.read_table(f"{root}/manifests/drive/a b.parquet", memory_map=True)
    assert set(table.column("__key__").to_pylist()) == keys - {"top"}
    assert pq.read_table(f"{root}/partitions.parquet").column("id").to_pylist() == [
        "drive/a b", "root_",
    ]  # fmt: skip


def test_a_script_that_reads_one_file_per_sample(root: str) -> None:
    for number in range(7):
        with np.load(f"{root}/samples/drive/a b/{number}.npz") as arrays:
            expected = tiny.numbered("", number).arrays
            assert {n: a.tobytes() for n, a in arrays.items()} == {
                n: a.tobytes() for n, a in expected.items()
            }


def test_getfattr_is_told_that_there_are_no_attributes(root: str) -> None:
    done = subprocess.run(["getfattr", "-d", root], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Operation not supported" in done.stderr


def test_samples_are_listed_when_asked(store: Store, version: Version, mounter: Mounter) -> None:
    del version
    root = mounter(request_for(store, list_samples=True))
    assert "samples" in os.listdir(root)
    found = [name for _, _, names in os.walk(f"{root}/samples") for name in names]
    assert len(found) == 2 * 8 + 4
    assert os.stat(root).st_nlink == 2 + 4


def test_look(store: Store, version: Version, mounter: Mounter) -> None:
    del version
    root = mounter(request_for(store, uid=12, gid=34, umask=0o077))
    info = os.stat(f"{root}/VERSION.json")
    assert (info.st_uid, info.st_gid, info.st_mode & 0o7777) == (12, 34, 0o400)
    assert os.stat(root).st_mode & 0o7777 == 0o500


def test_a_whole_store(tmp_path: Path, mounter: Mounter) -> None:
    store = Store.create(str(tmp_path / "store"))
    publish(store, "v1", 1)
    root = mounter(request_for(store, None))
    assert os.listdir(f"{root}/versions") == ["v1"]
    assert os.readlink(f"{root}/latest") == "versions/v1"
    run("sha256sum", "-c", "SHA256SUMS", cwd=f"{root}/latest/")
    before = {path: os.stat(path).st_ino for path in paths(f"{root}/versions")}
    publish(store, "v2", 2)
    wait_for(lambda: os.readlink(f"{root}/latest") == "versions/v2")
    wait_for(lambda: sorted(os.listdir(f"{root}/versions")) == ["v1", "v2"])
    run("sha256sum", "-c", "SHA256SUMS", cwd=f"{root}/latest/")
    umount(root)
    mounter(request_for(store, None))
    assert {path: os.stat(path).st_ino for path in before} == before


def paths(root: str) -> list[str]:
    """All paths below `root`."""
    return [f"{d}/{n}" for d, dirs, files in os.walk(root) for n in (*dirs, *files)]


def publish(store: Store, tag: str, number: int) -> Version:
    return tiny.publish(store, tag, {"p": [tiny.numbered("p/x", number), tiny.numbered("p/y", 7)]})


def test_a_version_without_tag(store: Store, version: Version, mounter: Mounter) -> None:
    table = version.document.table.digest
    root = mounter(request_for(store, f"sha256:{table[:10]}"))
    assert os.stat(root).st_mtime == 0
    run("sha256sum", "-c", "SHA256SUMS", cwd=root)


@pytest.mark.parametrize("fault", ["remove", "cut", "flip"])
def test_a_fault_is_eio_on_that_file_alone_and_logged(
    tmp_path: Path, mountpoint: str, fault: str
) -> None:
    store = Store.create(str(tmp_path / "store"))
    content = {name: [tiny.numbered(f"{name}/x", n)] for n, name in enumerate(("bad", "good"))}
    version = tiny.publish(store, "v1", content)
    digest = version.partitions[0].shards[0].digest
    path = spoil(store, digest, fault)
    log = tmp_path / "log"
    request = request_for(store, verify=Verify.OPEN, log=str(log), mountpoint=mountpoint)
    lifecycle.mount(request)
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error"):
                Path(mountpoint, "shards/bad/000000.tar").read_bytes()
        with pytest.raises(OSError, match="Input/output error"):
            Path(mountpoint, "samples/bad/x.npz").read_bytes()
        assert os.path.getsize(f"{mountpoint}/shards/bad/000000.tar")
        for good in ("shards/good/000000.tar", "samples/good/x.npz", "manifests/bad.parquet"):
            assert Path(mountpoint, good).read_bytes()
        check = subprocess.run(
            ["sha256sum", "-c", "SHA256SUMS"],
            cwd=mountpoint,
            check=False,
            capture_output=True,
            text=True,
        )
        assert check.returncode == 1
        assert check.stdout.count(": FAILED") == 1
        text = log.read_text()
        assert "shards/bad/000000.tar: object" in text
        assert path in text
        assert {"remove": "is missing", "cut": "bytes instead of", "flip": "is damaged"}[
            fault
        ] in text
    finally:
        umount(mountpoint)


def spoil(store: Store, digest: Digest, fault: str) -> str:
    """Remove an object, cut its last byte or flip one of its bits."""
    path = store.objects.path(digest)
    if fault == "remove":
        os.unlink(path)
        return path
    data = bytearray(Path(path).read_bytes())
    os.unlink(path)
    if fault == "cut":
        del data[-1]
    else:
        data[len(data) // 2] ^= 1
    Path(path).write_bytes(data)
    return path


def test_a_healed_object_is_read_again(store: Store, tmp_path: Path, mounter: Mounter) -> None:
    """The kernel's cached pages are those of the file that was there before: they must go."""
    store = Store.create(str(tmp_path / "store"))
    version = publish(store, "v1", 1)
    shard = version.partitions[0].shards[0]
    good = store.objects.read(shard)
    path = spoil(store, shard.digest, "flip")
    root = mounter(request_for(store))
    assert Path(root, "shards/p/000000.tar").read_bytes() != good
    os.unlink(path)
    Path(path).write_bytes(good)
    assert Path(root, "shards/p/000000.tar").read_bytes() == good


def test_help_tells_units_and_defaults() -> None:
    text = fsmount("mount", "--help").stdout
    for word in ("STORE[@REF]", "default: size", "default: auto", "umask", "0444", "read-only"):
        assert word in text
