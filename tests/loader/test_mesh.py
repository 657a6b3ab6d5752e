"""Four ranks under torchrun: which of them see the same samples, by their device mesh."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from small_versions import build, numbered
from torchrun import torchrun

ALL = sorted([*range(10), *range(1000, 1006)])


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the four ranks saw with each mesh."""
    out = tmp_path_factory.mktemp("mesh")
    root = build(out / "version", {"a": [numbered(10)], "b": [numbered(6, 1)]})
    return torchrun(4, "mesh_program.py", out, root)


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


@pytest.mark.parametrize("mesh", ["tensor", "both", "group"])
def test_tensor_parallel_ranks_see_the_same(outcomes: list[dict[str, Any]], mesh: str) -> None:
    ranks = [outcome[mesh] for outcome in outcomes]
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert len(ranks[0]) == len(ranks[2]) == 4
    assert sorted(flat(ranks[0]) + flat(ranks[2])) == ALL


@pytest.mark.parametrize("mesh", ["hybrid", "flat"])
def test_replicas_and_shards_see_different_samples(
    outcomes: list[dict[str, Any]], mesh: str
) -> None:
    ranks = [outcome[mesh] for outcome in outcomes]
    assert [len(rank) for rank in ranks] == [2] * 4
    assert sorted(flat(flat(ranks))) == ALL  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("whole", "has the dimension 'tp', not known to be data-parallel; give "),
        ("whole", 'give device_mesh=mesh["dp"], or process_group='),
        ("all three", 'give device_mesh=mesh["dp_replicate", "dp_shard"], or process_group='),
        ("tensor alone", "give the data-parallel part of the mesh, or process_group="),
        ("nameless", "has several dimensions without names; give mesh_dim_names"),
        ("no mesh", "must be a DeviceMesh, not 'dp'"),
        ("twice", "PlanError: give process_group, or device_mesh, not both"),
    ],
)
def test_what_can_t_be_told_apart(outcomes: list[dict[str, Any]], mesh: str, message: str) -> None:
    for outcome in outcomes:
        assert outcome[mesh].startswith("PlanError: ")
        assert message in outcome[mesh]


def test_a_mesh_s_order_is_the_ranks(outcomes: list[dict[str, Any]]) -> None:
    """Global rank 1 comes first in it, and is rank 0 of 2."""
    second, first, *others = (outcome["part"] for outcome in outcomes)
    assert first == outcomes[0]["tensor"]
    assert second == outcomes[2]["tensor"]
    assert others == ["PlanError: device_mesh must be a mesh that this rank is in"] * 2


def test_data_parallel_ranks_agree(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["seed"] == "RankMismatchError: ranks disagree: seed: 0 on rank 0, 1 on 1"


def test_a_dataset_made_before_its_rank_is_known(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["early"].startswith("PlanError: this dataset was made for rank 0 of 1 ")
        assert "so all 4 ranks would load the same" in outcome["early"]
