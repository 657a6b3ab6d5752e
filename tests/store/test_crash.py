"""Publishing, killed at every step, leaves a valid store that the next run completes."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from agents import Agent
from disk import Disk
from handmade import publish_version, put_version, verify_version

from fsmount.model import LatestRef, TagRef, VersionDocument
from fsmount.store import Store

OLD = {"a": b"old a", "b": b"same"}
NEW = {"a": b"new a", "b": b"same", "c": b"new c"}
NEW_TEXT = {name: data.decode() for name, data in NEW.items()}


def files(root: Path) -> dict[str, bytes]:
    """Whatever a version of the store rests on, by path."""
    kept = [path for part in ("objects", "versions") for path in (root / part).rglob("*")]
    return {str(p.relative_to(root)): p.read_bytes() for p in kept if p.is_file()}


def check_valid(store: Store) -> tuple[VersionDocument, ...]:
    """Every version that is listed, and latest, can be read in full."""
    listed = store.versions()
    for document in listed:
        assert document.tag is not None
        verify_version(store, store.version(TagRef(document.tag)))
    if store.latest() is not None:
        assert store.version(LatestRef()).document in listed
    return listed


def complete(
    root: Path, before: Path, replaces: str | None, monkeypatch: pytest.MonkeyPatch
) -> Store:
    """Run again what was killed; whatever the version rests on must be durable then."""
    with monkeypatch.context() as patch:
        disk = Disk(root, patch, before)
        store = Store.create(str(root))
        publish_version(store, "new", NEW, replaces=replaces)
        for name in [*files(root), "latest.json", "store.json"]:
            assert disk.has(root / name), name
    assert not publish_version(store, "new", NEW, replaces=replaces)  # it is complete
    return store


def old_store(root: Path) -> str | None:
    publish_version(Store.create(str(root)), "old", OLD)
    return "old"


def no_store(root: Path) -> str | None:
    return None


@pytest.mark.parametrize("begin", [old_store, no_store])
def test_kill_at_every_step(begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tmp_path / "before"
    replaces = begin(before)
    kept = files(before)
    seen: set[tuple[int, str | None]] = set()
    with Agent() as agent:
        for step in itertools.count():
            root = tmp_path / "store"
            shutil.rmtree(root, ignore_errors=True)
            if before.exists():
                shutil.copytree(before, root)
            agent.order(root, "new", NEW_TEXT, replaces=replaces, kill_at=step)
            answer = agent.answer()
            if answer != "killed":
                break
            if (root / "store.json").exists():
                store = Store.open(str(root))
                seen.add((len(check_valid(store)), store.latest()))
            store = complete(root, before, replaces, monkeypatch)
            assert store.latest() == "new"
            assert len(check_valid(store)) == (1 if replaces is None else 2)
            assert kept.items() <= files(root).items()
            assert not (root / "quarantine").exists()
    assert answer == "True"
    assert step > 80  # else the steps were not counted
    old = 0 if replaces is None else 1
    assert seen == {(old, replaces), (old + 1, replaces), (old + 1, "new")}


def test_nothing_names_what_a_power_cut_would_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    disk = Disk(root, monkeypatch, before=tmp_path / "nothing")
    store = Store.create(str(root))
    publish_version(store, "old", OLD)
    publish_version(store, "new", NEW, replaces="old")
    assert disk.checked > 10
    assert all(disk.has(root / name) for name in [*files(root), "latest.json", "store.json"])


def test_an_object_is_durable_when_it_is_committed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(Path(store.path), monkeypatch, before=Path(store.path))
    with store.staging() as staging:
        path = store.objects.path(store.objects.put(b"bytes", staging).digest)
    assert disk.has(Path(path))


def test_a_run_that_reuses_objects_makes_them_durable(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = put_version(store, "new", NEW)
    for _ in ("first", "again"):
        disk = Disk(Path(store.path), monkeypatch, before=tmp_path / "nothing")
        with store.staging() as staging:
            store.publish(document, staging)
        for name in [*files(Path(store.path)), "latest.json"]:
            assert disk.has(Path(store.path, name)), name
