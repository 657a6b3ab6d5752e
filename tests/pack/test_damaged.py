"""Damage in what a pack would take over is found, and healed where the source has the samples."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from npz_tree import (
    Content,
    numbered,
    objects,
    read_version,
    run_pack,
    tags,
    write_numbered,
    write_sample,
)

from fsmount.errors import IntegrityError
from fsmount.model import Digest, LatestRef
from fsmount.store import Store

KEYS = {f"{p}/{i}": 10 * n + i for n, p in enumerate("ab") for i in range(3)}
MANIFEST, SHARD = 0, 1
each_object = pytest.mark.parametrize("place", [MANIFEST, SHARD], ids=["manifest", "shard"])


@pytest.fixture
def contents(source: Path, store: Path) -> dict[str, Content]:
    """What the source holds; version v1 is packed from it."""
    found = write_numbered(source, KEYS)
    run_pack(source, store)
    return found


def damage(store: Path, partition: str, place: int) -> Path:
    """Change one byte of an object of v1; its size and time of modification stay."""
    digest = objects(store, "v1")[partition][place]
    path = Path(Store.open(str(store)).objects.path(Digest(digest)))
    before, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


@each_object
def test_what_would_be_reused_is_built_again(
    source: Path, store: Path, contents: dict[str, Content], place: int
) -> None:
    before = objects(store, "v1")
    path = damage(store, "a", place)
    report = run_pack(source, store, "v2")
    assert "b" in report.reused
    assert objects(store, "v2") == before
    assert read_version(store, "v1") == read_version(store, "v2") == contents
    (kept,) = (store / "quarantine").iterdir()
    assert kept.name.startswith(path.name)


def test_a_shard_under_a_changed_sidecar_is_written_again(
    source: Path, store: Path, contents: dict[str, Content]
) -> None:
    damage(store, "a", SHARD)
    key = "a/1"
    (source / f"{key}.json").write_bytes(b'{"new": 1}')
    del contents
    run_pack(source, store, "v2")
    assert read_version(store, "v2")[key].sidecar == b'{"new": 1}'
    assert objects(store, "v2")["a"][SHARD] == objects(store, "v1")["a"][SHARD]


@each_object
def test_what_is_kept_without_its_source_is_an_error(
    source: Path, store: Path, contents: dict[str, Content], place: int
) -> None:
    path = damage(store, "a", place)
    shutil.rmtree(source / "a")
    write_sample(source, "b/9", numbered(9))
    del contents
    with pytest.raises(IntegrityError, match=f"partition 'a' is kept.*{path.name}.*--sync"):
        run_pack(source, store, "v2")
    assert tags(store) == ["v1"]
    path.unlink()
    with pytest.raises(IntegrityError, match=f"partition 'a' is kept.*{path.name} is missing"):
        run_pack(source, store, "v2")
    assert run_pack(source, store, "v2", sync=True).dropped == ("a",)


def test_shards_beside_a_changed_one_are_written_again(source: Path, store: Path) -> None:
    keys = {f"a/{number}": number for number in range(12)}
    write_numbered(source, keys)
    run_pack(source, store, shard_bytes=700)
    shards = objects(store, "v1")["a"][SHARD:]
    for place in range(len(shards)):
        damage(store, "a", SHARD + place)
    write_sample(source, "a/3", numbered(99))
    run_pack(source, store, "v2")
    assert len(set(shards) & set(objects(store, "v2")["a"])) >= len(shards) - 2 > 1
    assert read_version(store, "v2").keys() == keys.keys()
    checked = Store.open(str(store))
    for part in checked.version(LatestRef()).partitions:
        for ref in part.objects():
            checked.objects.verify(ref)


REPLACE = """
set -e
head -c "$(stat -c %s "$1")" /dev/zero > "$1.new"
touch -r "$1" "$1.new"
mv -f "$1.new" "$1"
"""
ANOTHER = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
MAY_PASS = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
@each_object
def test_what_another_user_has_put_in_its_place(
    source: Path, store: Path, contents: dict[str, Content], place: int
) -> None:
    """Other bytes of the same size and time, by somebody who may write the store."""
    before = objects(store, "v1")
    path = Store.open(str(store)).objects.path(Digest(before["a"][place]))
    os.chmod(os.path.dirname(path), 0o777)  # noqa: S103
    subprocess.run([*ANOTHER, *MAY_PASS, "sh", "-c", REPLACE, "sh", path], check=True)
    assert os.stat(path).st_uid == 65534
    run_pack(source, store, "v2")
    assert objects(store, "v2") == before
    assert read_version(store, "v2") == contents
