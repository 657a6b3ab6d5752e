"""Processes that publish into one store at once: both succeed, or one is told clearly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import Agent, agents
from handmade import verify_version

from fsmount.model import LatestRef, TagRef
from fsmount.store import Store

ROUNDS = 15


@pytest.fixture(scope="module")
def two() -> Iterator[list[Agent]]:
    with agents(2) as both:
        yield both


def race(two: list[Agent], root: Path, *orders: tuple[str, dict[str, str]]) -> list[str]:
    """Let both publish into a store that is not there yet; their answers, the error's name only."""
    for agent, (tag, content) in zip(two, orders, strict=True):
        agent.order(root, tag, content)
    answers = [agent.answer().partition(":")[0] for agent in two]
    store = Store.open(str(root))
    for document in store.versions():
        assert document.tag
        verify_version(store, store.version(TagRef(document.tag)))
    assert store.latest() == store.resolve(LatestRef()).tag
    assert list((root / "staging").iterdir()) == []
    return sorted(answers)


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_same_tag_same_content(two: list[Agent], tmp_path: Path, round_: int) -> None:
    order = ("v1", {"a": f"a {round_}", "b": "b"})
    assert race(two, tmp_path / "store", order, order) in (["True", "True"], ["False", "True"])
    assert [d.tag for d in Store.open(str(tmp_path / "store")).versions()] == ["v1"]


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_same_tag_other_content(two: list[Agent], tmp_path: Path, round_: int) -> None:
    first, second = ("v1", {"a": f"a {round_}", "b": "b"}), ("v1", {"a": "other", "b": "b"})
    answers = race(two, tmp_path / "store", first, second)
    assert answers == ["True", "VersionExistsError"]


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_two_tags(two: list[Agent], tmp_path: Path, round_: int) -> None:
    answers = race(two, tmp_path / "store", ("v1", {"a": "a"}), ("v2", {"a": f"b {round_}"}))
    assert answers == ["LatestMovedError", "True"]
    store = Store.open(str(tmp_path / "store"))
    assert {document.tag for document in store.versions()} == {"v1", "v2"}
