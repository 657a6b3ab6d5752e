"""A pack killed at every step leaves all versions whole, and the next run completes it."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from npz_tree import (
    Content,
    check_nothing_left,
    numbered,
    objects,
    read_version,
    run_pack,
    tags,
    write_numbered,
    write_sample,
)

from fsmount.store import Store

Ask = Callable[[Path, Path, int | None], Any]


@contextmanager
def agent() -> Iterator[Ask]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("pack_agent.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(source: Path, store: Path, kill_at: int | None) -> Any:
        order = {"source": str(source), "store": str(store), "tag": "v2", "kill_at": kill_at}
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    with process:
        yield ask
        assert process.stdin
        process.stdin.close()


def check_versions(store: Path, expected: dict[str, dict[str, Content]]) -> None:
    """Every version that is listed is whole, and the old one is what it was."""
    if (store / "store.json").exists():
        for tag in tags(store):
            assert read_version(store, str(tag)) == expected[str(tag)]


def old_version(source: Path, store: Path) -> dict[str, dict[str, Content]]:
    """An older version: one partition changes, one's sidecar, and with it the columns of all."""
    old = write_numbered(source, {"a/1": 1, "b/2": 2, "c/3": 3})
    run_pack(source, store, "v1")
    new = {
        "a/1": write_sample(source, "a/1", numbered(3)),
        "b/2": write_sample(source, "b/2", numbered(2), b'{"changed": 1}'),
        "c/3": old["c/3"],
    }
    return {"v1": old, "v2": new}


def no_version(source: Path, store: Path) -> dict[str, dict[str, Content]]:
    return {"v2": write_numbered(source, {"a/1": 1, "a/2": 2})}


@pytest.mark.parametrize("begin", [old_version, no_version])
def test_kill_at_every_step(
    begin: Callable[[Path, Path], dict[str, dict[str, Content]]], tmp_path: Path
) -> None:
    source, before, store = (tmp_path / name for name in ("source", "before", "store"))
    expected = begin(source, before)
    seen: set[tuple[str | None, ...]] = set()
    revisions, manifests, reads = set(), set(), []
    with agent() as ask:
        for step in itertools.count():
            shutil.rmtree(store, ignore_errors=True)
            if before.exists():
                shutil.copytree(before, store)
            answer = ask(source, store, step)
            if answer != "killed":
                break
            check_versions(store, expected)
            if (store / "store.json").exists():
                seen.add((*tags(store), Store.open(str(store)).latest()))
            revision, samples_read = ask(source, store, None)
            revisions.add(revision)
            manifests.add(str(objects(store, "v2")))
            reads.append(samples_read)
            assert tags(store) == list(expected)
            assert Store.open(str(store)).latest() == "v2"
            check_versions(store, expected)
    assert revisions == {answer[0]}
    assert len(manifests) == 1
    check_nothing_left(store)
    assert step > 50  # else the steps were not counted
    assert (reads[0], reads[-1]) == (answer[1], 0)
    assert reads == sorted(reads, reverse=True)  # what was finished once is not done again
    old = tuple(tag for tag in expected if tag != "v2")
    latest = old[-1] if old else None
    assert seen >= {(*old, latest), (*old, "v2", latest), (*old, "v2", "v2")}
