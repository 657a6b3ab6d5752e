from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from handmade import publish_version, put_version, verify_version

from fsmount.errors import (
    FormatError,
    IntegrityError,
    InvalidNameError,
    KeysetExistsError,
    LatestMovedError,
    NotAStoreError,
    ObjectMissingError,
    VersionExistsError,
    VersionNotFoundError,
)
from fsmount.formats.keyset import Keyset
from fsmount.formats.table import EPOCH
from fsmount.model import Digest, LatestRef, TableRef, TagRef, VersionDocument
from fsmount.store import Store

ONE = {"a": b"one", "b": b"same"}
TWO = {"a": b"two", "b": b"same"}


def publish(store: Store, document: VersionDocument) -> bool:
    with store.staging() as staging:
        return store.publish(document, staging)


def write(path: Path, value: object) -> None:
    path.unlink(missing_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def document_path(store: Store, tag: str) -> Path:
    return Path(store.path, "versions", f"{tag}.json")


def edit(store: Store, name: str, /, **changes: Any) -> None:
    path = document_path(store, name)
    write(path, json.loads(path.read_text()) | changes)


def test_a_published_version_is_found_by_every_reference(store: Store) -> None:
    assert publish_version(store, "v1", ONE)
    document = store.resolve(TagRef("v1"))
    assert store.resolve(LatestRef()) == document
    assert store.versions() == (document,)
    assert store.latest() == "v1"
    version = store.version(TagRef("v1"))
    assert [part.id for part in version.partitions] == ["a", "b"]
    verify_version(store, version)
    by_table = store.version(TableRef(document.table.digest[:8]))
    assert by_table.partitions == version.partitions
    assert (by_table.document.tag, by_table.document.created_at) == (None, EPOCH)


def test_files_are_as_the_format_says(store: Store) -> None:
    publish_version(store, "v1", ONE)
    assert json.loads(Path(store.path, "store.json").read_text()) == {"format": 1}
    table = store.resolve(TagRef("v1")).table.digest
    assert Path(store.path, "latest.json").read_text() == (
        f'{{\n  "format": 1,\n  "table": "{table}",\n  "tag": "v1"\n}}\n'
    )
    assert document_path(store, "v1").stat().st_mode & 0o777 == 0o444


def test_versions_share_what_is_the_same(store: Store) -> None:
    publish_version(store, "v1", ONE)
    before = sum(1 for path in Path(store.path, "objects").rglob("*") if path.is_file())
    publish_version(store, "v2", TWO, replaces="v1")
    after = sum(1 for path in Path(store.path, "objects").rglob("*") if path.is_file())
    assert after - before == 3  # a shard, a manifest, a table


def test_versions_are_sorted_by_time_then_tag(store: Store) -> None:
    replaces = None
    for tag, second in [("b", 2), ("a", 2), ("c", 1)]:
        time = f"2024-01-01T00:00:0{second}Z"
        publish(store, put_version(store, tag, ONE, replaces=replaces, created_at=time))
        replaces = tag
    assert [version.tag for version in store.versions()] == ["c", "a", "b"]


def test_the_same_again_does_nothing(store: Store) -> None:
    assert publish_version(store, "v1", ONE)
    text = document_path(store, "v1").read_bytes()
    document = put_version(store, "v1", ONE, message="later", created_at=EPOCH)
    assert not publish(store, document)
    assert document_path(store, "v1").read_bytes() == text


def test_a_tag_with_other_content_is_refused(store: Store) -> None:
    publish_version(store, "v1", ONE)
    with pytest.raises(VersionExistsError, match=r"'v1' exists with other content.*another tag"):
        publish_version(store, "v1", TWO, replaces="v1")
    assert store.version(TagRef("v1")) == store.version(LatestRef())


def test_latest_that_moved_meanwhile_stays(store: Store) -> None:
    publish_version(store, "v1", ONE)
    made_on_v1 = put_version(store, "v3", TWO, replaces="v1")
    publish_version(store, "v2", TWO, replaces="v1")
    with pytest.raises(LatestMovedError, match="'v3' is published, but latest names v2 now"):
        publish(store, made_on_v1)
    assert store.latest() == "v2"
    verify_version(store, store.version(TagRef("v3")))
    assert not publish(store, made_on_v1)  # what was told once is no error when it is repeated


def test_a_crashed_run_is_completed_with_its_own_document(store: Store) -> None:
    publish_version(store, "v1", ONE)
    latest = Path(store.path, "latest.json").read_bytes()
    publish_version(store, "v2", TWO, replaces="v1")
    path = Path(store.path, "latest.json")
    path.unlink()
    path.write_bytes(latest)  # as if killed before latest moved
    assert publish_version(store, "v2", TWO, replaces=None)
    assert store.latest() == "v2"


def test_a_rerun_leaves_a_latest_that_has_moved_on(store: Store) -> None:
    publish_version(store, "v1", ONE)
    publish_version(store, "v2", TWO, replaces="v1")
    assert not publish_version(store, "v1", ONE)
    assert store.latest() == "v2"


def test_a_pruned_tag_is_never_used_again(store: Store) -> None:
    publish_version(store, "v1", ONE)
    publish_version(store, "v2", TWO, replaces="v1")
    write(document_path(store, "v1"), {"format": 1, "tag": "v1", "pruned": True, "by": "someone"})
    assert [version.tag for version in store.versions()] == ["v2"]
    with pytest.raises(VersionNotFoundError, match="was pruned"):
        store.resolve(TagRef("v1"))
    with pytest.raises(VersionExistsError, match=r"pruned.*another tag"):
        publish_version(store, "v1", ONE, replaces="v2")


def test_nothing_is_published_that_misses_an_object(store: Store) -> None:
    document = put_version(store, "v1", ONE)
    partition = store.version(TableRef(document.table.digest)).partitions[0]
    for ref in (partition.shards[0], partition.manifest, document.table):
        path = store.objects.path(ref.digest)
        os.rename(path, path + ".away")
        with pytest.raises(ObjectMissingError, match=ref.digest):
            publish(store, document)
        assert store.versions() == ()
        os.rename(path + ".away", path)
    assert publish(store, document)


def test_an_object_that_vanishes_after_the_link_is_told(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = put_version(store, "v1", ONE)
    shard = store.version(TableRef(document.table.digest)).partitions[0].shards[0]
    real = os.link

    def link_and_collect(source: str, target: str, **options: Any) -> None:
        real(source, target, **options)
        os.unlink(store.objects.path(shard.digest))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link_and_collect)
        with pytest.raises(ObjectMissingError, match=f"'v1' is published but .*{shard.digest}"):
            publish(store, document)
    assert store.latest() is None
    assert publish_version(store, "v1", ONE)  # the same content heals and completes it
    verify_version(store, store.version(LatestRef()))


def test_a_document_that_disagrees_with_its_table_is_refused(store: Store) -> None:
    one = put_version(store, "v1", ONE)
    two = put_version(store, "v1", TWO)
    changes: list[dict[str, Any]] = [
        {"table": two.table},
        {"content_revision": two.content_revision},
        {"source_namespace": "other"},
        {"recipe": dataclasses.replace(one.recipe, level=9)},
        {"totals": dataclasses.replace(one.totals, samples=9)},
    ]
    for change in changes:
        with pytest.raises(IntegrityError, match="its table"):
            publish(store, dataclasses.replace(one, **change))
    assert store.versions() == ()
    publish(store, one)
    edit(store, "v1", source_namespace="other")
    with pytest.raises(IntegrityError, match="source namespace is other"):
        store.version(LatestRef())


def test_a_version_without_a_tag_can_not_be_published(store: Store) -> None:
    document = dataclasses.replace(put_version(store, "v1", ONE), tag=None)
    with pytest.raises(InvalidNameError):
        publish(store, document)


def test_what_is_not_there_is_told_with_what_is(store: Store) -> None:
    with pytest.raises(VersionNotFoundError, match="no versions yet"):
        store.resolve(LatestRef())
    publish_version(store, "v1", ONE)
    for ref in (TagRef("v9"), TableRef("0123456789")):
        with pytest.raises(VersionNotFoundError, match="it has v1"):
            store.resolve(ref)


def test_a_table_is_found_without_any_version(store: Store) -> None:
    table = put_version(store, "v1", ONE).table
    assert store.resolve(TableRef(table.digest[:8])).table == table
    shard = store.version(TableRef(table.digest)).partitions[0].shards[0]
    with pytest.raises(VersionNotFoundError):  # an object, but no table
        store.resolve(TableRef(shard.digest))


def test_an_ambiguous_prefix_names_the_candidates(store: Store) -> None:
    publish_version(store, "v1", ONE)
    publish_version(store, "v2", TWO, replaces="v1")
    digests = [Digest("0123456789" + c * 54) for c in "ab"]
    for tag, digest in zip(("v1", "v2"), digests, strict=True):
        edit(store, tag, table={"digest": digest, "size": 1})
    with pytest.raises(VersionNotFoundError, match=f"{digests[0]}.*{digests[1]}"):
        store.resolve(TableRef("01234567"))


HOSTILE = [
    {"tag": "v2"},
    {"tag": None},
    {"tag": "../v1"},
    {"format": 2},
    {"format": True},
    {"table": {"digest": "../../../etc/passwd", "size": 1}},
    {"table": {"digest": "ab" * 32, "size": -1}},
    {"table": []},
    {"rule": {"kind": "regex", "pattern": "a" * 1001}},
    {"content_revision": None},
]


@pytest.mark.parametrize("changes", HOSTILE)
def test_a_hostile_document_is_refused_by_name(store: Store, changes: dict[str, Any]) -> None:
    publish_version(store, "v1", ONE)
    edit(store, "v1", **changes)
    for read in (store.versions, lambda: store.resolve(TagRef("v1"))):
        with pytest.raises(FormatError, match=r"versions/v1\.json"):
            read()


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "[" * 100_000, "\ud800", " " * (17 << 20)])
def test_what_is_no_document_is_refused_by_name(store: Store, text: str) -> None:
    for path in (document_path(store, "v1"), Path(store.path, "latest.json")):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(FormatError, match=path.name):
            (store.versions if path.parent.name == "versions" else store.latest)()


def test_odd_files_beside_documents(store: Store, tmp_path: Path) -> None:
    publish_version(store, "v1", ONE)
    for name in (".nfs0001.json", "._v1.json", "v1.json~"):
        Path(store.path, "versions", name).write_text("left behind")
    assert [version.tag for version in store.versions()] == ["v1"]
    for name in ("latest.json", "a b.json", "-.json"):
        odd = Path(store.path, "versions", name)
        odd.write_text("{}")
        with pytest.raises(FormatError, match=name):
            store.versions()
        odd.unlink()
    secret = tmp_path / "secret"
    secret.write_bytes(document_path(store, "v1").read_bytes())
    document_path(store, "v1").unlink()
    document_path(store, "v1").symlink_to(secret)
    with pytest.raises(FormatError, match="not a regular file"):
        store.versions()
    document_path(store, "v1").unlink()
    os.mkfifo(document_path(store, "v1"))
    with pytest.raises(FormatError, match="not a regular file"):
        store.versions()


def test_latest_that_leads_nowhere(store: Store) -> None:
    publish_version(store, "v1", ONE)
    publish_version(store, "v2", TWO, replaces="v1")
    latest = Path(store.path, "latest.json")
    table = store.resolve(TagRef("v1")).table.digest
    write(latest, {"format": 1, "tag": "v2", "table": table})
    with pytest.raises(IntegrityError, match="latest names"):
        store.resolve(LatestRef())
    write(latest, {"format": 1, "tag": "v3", "table": table})
    with pytest.raises(VersionNotFoundError, match="'v3'"):
        store.resolve(LatestRef())
    write(latest, {"format": 1, "tag": "../x", "table": table})
    with pytest.raises(FormatError, match=r"latest\.json"):
        store.resolve(LatestRef())


def test_keysets_are_bound_to_their_table_and_never_change(store: Store) -> None:
    document = put_version(store, "v1", ONE)
    table = document.table.digest
    with store.staging() as staging:
        keys = store.objects.put(b"keys", staging)
        keyset = Keyset("train", table, keys, 3, "label = 1")
        assert store.put_keyset(keyset, staging)
        assert not store.put_keyset(keyset, staging)
        with pytest.raises(KeysetExistsError, match="'train'"):
            store.put_keyset(dataclasses.replace(keyset, where=None), staging)
        lost = dataclasses.replace(keyset, keys=dataclasses.replace(keys, digest=Digest("0" * 64)))
        with pytest.raises(ObjectMissingError):
            store.put_keyset(lost, staging)
    assert store.keysets(table) == {"train": keyset}
    assert store.keysets(Digest("0" * 64)) == {}
    pointer = Path(store.path, "keysets", table, "train.json")
    os.rename(pointer, pointer.with_name("valid.json"))
    with pytest.raises(FormatError, match=r"valid\.json: it is key-set 'train'"):
        store.keysets(table)


def test_what_is_no_store(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(NotAStoreError, match=str(path)):
            Store.open(str(path))
    (tmp_path / "file").write_text("")
    for attempt in (Store.open, Store.create):
        with pytest.raises(NotAStoreError, match="file"):
            attempt(str(tmp_path / "file"))
    with pytest.raises(NotAStoreError, match="'file'"):
        Store.create(str(tmp_path))
    (tmp_path / "mine" / "objects").mkdir(parents=True)
    (tmp_path / "mine" / "objects" / "bottle").write_text("")
    with pytest.raises(NotAStoreError, match="'objects'"):
        Store.create(str(tmp_path / "mine"))
    assert os.listdir(tmp_path / "mine") == ["objects"]


@pytest.mark.parametrize("text", ['{"format": 2}', "{}", "", "[1]"])
def test_a_store_of_another_format(store: Store, text: str) -> None:
    write(Path(store.path, "store.json"), text)
    for attempt in (Store.open, Store.create):
        with pytest.raises(NotAStoreError, match=store.path):
            attempt(store.path)


def test_create_makes_parents_and_opens_what_is_there(tmp_path: Path) -> None:
    path = str(tmp_path / "a" / "b")
    assert Store.create(path) == Store.create(path) == Store.open(path)


def test_staging_is_fresh_and_goes_away(store: Store) -> None:
    with store.staging() as one, store.staging() as other:
        assert one != other
        Path(one, "file").write_text("")
    assert os.listdir(f"{store.path}/staging") == []
    os.rmdir(f"{store.path}/staging")
    with store.staging() as again:
        assert os.listdir(again) == []
