"""What is published follows from the source alone, whoever wrote the store or the base."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from npz_tree import Content, objects, partitions, read_version, run_pack, write_sample

from fsmount.formats import manifest, parquet, sample, shard
from fsmount.formats.kinds import NO_FIELDS
from fsmount.formats.table import PartitionTable
from fsmount.model import ShardRef, TagRef
from fsmount.pack.conform import schema_for
from fsmount.pack.publish import publish
from fsmount.store import Store

Edit = Callable[["Forgery"], None]


@pytest.fixture
def contents(source: Path, store: Path) -> dict[str, Content]:
    """What the source holds; version v1 is packed from it."""
    found = {
        f"p/{i}": write_sample(source, f"p/{i}", arrays(i), b'{"label": %d}' % i) for i in range(3)
    }
    run_pack(source, store)
    return found


def arrays(number: int) -> dict[str, Any]:
    return {"label": np.array(number), "x": np.full(64, float(number))}


class Forgery:
    """Partition `p` of a version, taken apart; `publish` makes it the latest version."""

    def __init__(self, store: Path) -> None:
        self.store = Store.open(str(store))
        self.version = self.store.version(TagRef("v1"))
        (self.partition,) = self.version.partitions
        found = manifest.decode(self.store.objects.read(self.partition.manifest))
        self.rows, self.meta = found.rows(), found.meta
        self.shard = self.store.objects.read(self.partition.shards[0])
        self.payloads = [self.shard[row.offset :][: row.size] for row in self.rows]
        self.encoded: bytes | None = None
        self.between, self.end = b"", shard.END

    def publish(self) -> None:
        document = self.version.document
        with self.store.staging() as staging:
            self._write(staging)
            content = PartitionTable(
                document.rule, document.source_namespace, document.recipe, (self.partition,)
            )
            publish(
                self.store, content, tag="forged", parent=None, message="", replaces="v1",
                staging=staging,
            )  # fmt: skip

    def _write(self, staging: str) -> None:
        data, rows = b"", []
        for row, payload in zip(self.rows, self.payloads, strict=True):
            data += self.between + shard.member_header(shard.member_name(row.key), len(payload))
            rows.append(
                replace(row, offset=len(data), size=len(payload), checksum=sample.checksum(payload))
            )
            data += payload + shard.padding(len(payload))
        ref = self.store.objects.put(data + self.end, staging)
        shards = (ShardRef(ref.digest, ref.size, len(rows)),)
        meta = replace(self.meta, shards=shards)
        encoded = self.encoded or manifest.encode(
            rows, meta, schema_for(NO_FIELDS, manifest.fields_of(rows))
        )
        self.partition = replace(
            self.partition, shards=shards, manifest=self.store.objects.put(encoded, staging)
        )


def other_payloads(forged: Forgery) -> None:
    """The rows have the source's fingerprints; what lies in the shard has others."""
    member = sample.encode(arrays(666))
    forged.payloads = [sample.compress(member, 3) for _ in forged.rows]


def other_order(forged: Forgery) -> None:
    forged.rows.reverse()
    forged.payloads.reverse()
    forged.rows = [replace(row, index=i) for i, row in enumerate(forged.rows)]


def more_in_the_tar(forged: Forgery) -> None:
    forged.between = shard.member_header("evil", 0)


def more_behind_the_tar(forged: Forgery) -> None:
    forged.end = shard.END + bytes(512)


def other_columns(forged: Forgery) -> None:
    """The sidecars are the source's; the columns that queries read say something else."""
    data = forged.store.objects.read(forged.partition.manifest)
    found, metadata = parquet.read(data, "manifest")
    place = found.schema.get_field_index("label")
    labels = pa.array([666] * len(found), found.schema.field(place).type)
    forged.encoded = parquet.write(found.set_column(place, "label", labels), metadata)


def other_schemas(forged: Forgery) -> None:
    """The header that the loader decodes by names the tensors otherwise."""
    header = forged.meta.schemas[0].replace(b'"x"', b'"y"')
    forged.meta = replace(forged.meta, schemas=(header,))


def other_compressor(forged: Forgery) -> None:
    forged.meta = replace(forged.meta, compressor="\x1b[31m")


@pytest.mark.parametrize(
    "edit",
    [
        *(other_payloads, other_order, more_in_the_tar, more_behind_the_tar),
        *(other_columns, other_schemas, other_compressor),
    ],
)
def test_nothing_of_a_forged_base_is_published(
    edit: Edit,
    store: Path,
    contents: dict[str, Content],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither by its owner, who remembers another partition, nor by one who knows none."""
    source, honest = store.with_name("source"), objects(store, "v1")
    forged = Forgery(store)
    edit(forged)
    forged.publish()
    assert objects(store, "forged") != honest
    assert run_pack(source, store, "mine").samples_read == 0
    assert objects(store, "mine") == honest
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-user"))
    report = run_pack(source, store, "theirs", base=TagRef("forged"))
    assert report.samples_read >= 3
    assert objects(store, "theirs") == honest
    assert read_version(store, "theirs") == contents


def test_an_honest_base_is_read_once_and_written_never(
    source: Path,
    store: Path,
    contents: dict[str, Content],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-user"))
    before = partitions(store, "v1")
    report = run_pack(source, store, "v2")
    assert (report.reused, report.samples_read) == (("p",), 3)
    assert partitions(store, "v2") == before
    assert run_pack(source, store, "v3").samples_read == 0


def test_nothing_that_decides_lies_in_the_store(
    source: Path, store: Path, contents: dict[str, Content], cache: Path
) -> None:
    assert os.listdir(store / "cache") == []
    (kept,) = cache.rglob("*.parquet")
    assert kept.is_relative_to(cache / "fsmount" / "builds")
    assert kept.parent.stat().st_mode & 0o077 == 0


def test_a_memory_of_another_store_or_source_is_none_of_ours(
    source: Path, store: Path, contents: dict[str, Content], cache: Path, tmp_path: Path
) -> None:
    """Even where its file lies at the place of ours."""
    (mine,) = cache.rglob("*.parquet")
    write_sample(tmp_path / "evil", "p/0", arrays(666))
    run_pack(tmp_path / "evil", tmp_path / "other")
    (theirs,) = set(cache.rglob("*.parquet")) - {mine}
    theirs.replace(mine)
    assert run_pack(source, store, "v2").samples_read == 3
    assert read_version(store, "v2") == contents


def test_without_a_private_cache_every_file_is_read(
    store: Path,
    contents: dict[str, Content],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, shared = store.with_name("source"), tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    caplog.set_level(logging.INFO)
    for tag in ("v2", "v3"):
        caplog.clear()
        assert run_pack(source, store, tag).samples_read == 3
        assert objects(store, tag) == objects(store, "v1")
        assert [r.message.count("XDG_CACHE_HOME") for r in caplog.records] == [1]


def test_a_memory_that_cannot_be_written_is_no_failure(
    source: Path, store: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        write_sample(source, f"{name}/0", arrays(0))
    run_pack(source, store)
    caplog.set_level(logging.INFO)
    for memory in (cache / "fsmount" / "builds").rglob("*.parquet"):
        memory.unlink()
        (memory / "in the way").mkdir(parents=True)
    report = run_pack(source, store, "v2")
    assert (report.published, report.samples_read) == (True, 2)
    assert [r.message.count("could not be remembered") for r in caplog.records] == [1]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def giant(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50 << 30)


def other_text(path: Path) -> None:
    """A key that is no UTF-8, in a file that is ours otherwise."""
    found, metadata = parquet.read(path.with_suffix(".old").read_bytes(), "memory")
    keys = pa.array([b"\xff\xfe"] * len(found)).view(pa.string())
    path.write_bytes(parquet.write(found.set_column(0, "key", keys), metadata))


def other_number(path: Path) -> None:
    """A sidecar with a size and no time."""
    found, metadata = parquet.read(path.with_suffix(".old").read_bytes(), "memory")
    place = found.schema.get_field_index("file_ctime_ns")
    nulls = pa.nulls(len(found), pa.int64())
    path.write_bytes(parquet.write(found.set_column(place, "file_ctime_ns", nulls), metadata))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [fifo, device, giant, other_text, other_number, Path.mkdir])
def test_what_is_no_memory_is_as_if_it_were_not_there(
    make: Callable[[Path], None], source: Path, store: Path, contents: Any, cache: Path
) -> None:
    (path,) = cache.rglob("*.parquet")
    path.rename(path.with_suffix(".old"))
    make(path)
    (source / "p/0.npz").touch()  # else the listing alone says that nothing changed
    assert run_pack(source, store, "v2").samples_read in (1, 3)
    assert read_version(store, "v2") == contents
