"""Two packs of one store at once: neither takes the other's work for its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from npz_tree import (
    Content,
    numbered,
    partitions,
    read_version,
    run_pack,
    task_of,
    write_numbered,
    write_sample,
)

from fsmount.model import LatestRef
from fsmount.pack import build
from fsmount.pack.build import build_partition
from fsmount.pack.source import NpzTree
from fsmount.store import Store

KEYS = {f"{p}/{i}": 10 * n + i for n, p in enumerate("abc") for i in range(5)}


@pytest.fixture
def contents(source: Path, store: Path) -> dict[str, Content]:
    """What the source holds; version v1 is packed from it."""
    found = write_numbered(source, KEYS)
    run_pack(source, store)
    return found


def test_what_another_pack_remembers_is_not_mistaken_for_ours(
    source: Path, store: Path, contents: dict[str, Content]
) -> None:
    """Two packs run at once. One plans, the other builds a newer state and remembers its files;
    the first must not take those files for the ones its old shard was made of.
    """
    tree, target = NpzTree(str(source)), Store.open(str(store))
    previous = task_of(tree, target, store, "a")[0].previous
    contents["a/1"] = write_sample(source, "a/1", numbered(99))
    task, context = task_of(tree, target, store, "a")
    stale = replace(task, previous=previous)
    run_pack(source, store, "v2")
    with target.staging() as staging:
        built = build_partition(stale, replace(context, staging=staging), lambda n, b: None)
    assert built.partition == partitions(store, "v2")["a"]
    assert built.partition.data_revision != partitions(store, "v1")["a"].data_revision


def test_latest_that_moves_meanwhile_is_not_overrun(
    source: Path, store: Path, contents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pack publishes between our plan and our publish: ours stays, under its tag."""
    write_numbered(tmp_path / "two", {"z/1": 1})
    write_sample(source, "a/1", numbered(99))
    real: Callable[..., Any] = build.build_partition

    def meanwhile(*args: Any) -> Any:
        monkeypatch.undo()
        run_pack(tmp_path / "two", store, "other", replace_all=True)
        return real(*args)

    monkeypatch.setattr("fsmount.pack.workers.build_partition", meanwhile)
    report = run_pack(source, store, "v2")
    assert (report.published, report.latest) == (True, "other")
    opened = Store.open(str(store))
    assert opened.latest() == "other"
    assert len(read_version(store, "v2")) == 15
    assert opened.version(LatestRef()).partitions[0].id == "z"
