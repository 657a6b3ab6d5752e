"""Two ranks under torchrun: they share out the samples, or all of them say why they can't."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from small_versions import build, numbered
from test_dataset import ALL
from torchrun import torchrun


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two ranks saw, step by step."""
    root = tmp_path_factory.mktemp("ranks")
    parts = {"a": [numbered(10)], "b/c": [numbered(1, 1)], "d": [numbered(7, 2)]}
    one = build(root / "one", parts)
    other = build(root / "other", {**parts, "d": [numbered(7, 3)]})
    return torchrun(2, "rank_program.py", root, one, other)


def test_ranks_share_out_the_samples(outcomes: list[dict[str, Any]]) -> None:
    first, second = (outcome["train"] for outcome in outcomes)
    assert [len(batch) for batch in first] == [len(batch) for batch in second] == [3, 3, 3]
    assert sorted(chain.from_iterable(first + second)) == ALL


def test_a_metric_counts_each_sample_once(outcomes: list[dict[str, Any]]) -> None:
    expected = pytest.approx(sum(ALL) / len(ALL))
    assert [outcome["evaluate"] for outcome in outcomes] == [expected] * 2


def test_a_process_group_can_be_given(outcomes: list[dict[str, Any]]) -> None:
    assert [outcome["group"] for outcome in outcomes] == [3, 3]


def test_a_rank_outside_of_the_group_is_told_so(outcomes: list[dict[str, Any]]) -> None:
    inside, outside = (outcome["outside"] for outcome in outcomes)
    assert inside == 6
    assert outside.startswith("PlanError: process_group must be a group that this rank is in")


def test_another_version_is_an_error_on_all(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["version"].startswith("RankMismatchError: ranks disagree: selection: ")


def test_another_option_is_an_error_that_names_it(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["seed"] == "RankMismatchError: ranks disagree: seed: 0 on rank 0, 1 on 1"
        assert outcome["shapes"].endswith("disagree: shapes: 'pad' on rank 0, 'list' on 1")
        assert outcome["buckets"].endswith(
            "disagree: bucket_size: 4 on rank 0, 8 on 1; bucket_window: 64 on rank 0, 128 on 1"
        )


def test_a_rank_that_can_t_plan_is_told_to_the_others(outcomes: list[dict[str, Any]]) -> None:
    told, own = (outcome["missing"] for outcome in outcomes)
    assert told.startswith("RankMismatchError: rank 1 can't load: not a mounted version")
    assert own.startswith("PlanError: not a mounted version")


def test_an_explicit_rank_opts_out(outcomes: list[dict[str, Any]]) -> None:
    assert [outcome["alone"] for outcome in outcomes] == [6, None]


def test_a_rank_that_does_not_come_is_named(outcomes: list[dict[str, Any]]) -> None:
    assert outcomes[0]["late"] == "RankMismatchError: rank 1 did not come to agree within 1 s"
