"""Lightning, Accelerate and transformers: the recipes of docs/frameworks.md, and the defaults that
would divide or skip batches a second time. In one process, and in two ranks under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from small_versions import build, numbered

PROGRAM = Path(__file__).with_name("frameworks_program.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ALL = sorted([*range(10), *range(1000, 1006)])


@pytest.fixture(scope="module", params=[1, 2])
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank saw."""
    ranks: int = request.param
    out = tmp_path_factory.mktemp("frameworks")
    root = build(out / "version", {"a": [numbered(10)], "b": [numbered(6, 1)]})
    launcher = [*TORCHRUN, f"--log-dir={out}/log"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), str(root), str(out)],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=out,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_the_recipe_trains_on_each_sample_once_and_resumes(
    outcomes: list[dict[str, Any]], framework: str
) -> None:
    batches = 8 // len(outcomes)  # of an epoch
    for outcome in outcomes:
        plain, runs = outcome["plain"], outcome[framework]
        assert runs["whole"] == plain
        assert runs["middle"] == plain[2:]
        assert runs["end"] == plain[batches:]
    for epoch in (slice(0, batches), slice(batches, None)):
        parts = chain.from_iterable(outcome[framework]["whole"][epoch] for outcome in outcomes)
        assert sorted(chain.from_iterable(parts)) == ALL


@pytest.mark.parametrize(
    "default",
    ["prepared", "prepared, not dispatched", "skipped", "skipped in a worker", "train_dataset"],
)
def test_what_would_divide_or_skip_again_is_refused(
    outcomes: list[dict[str, Any]], default: str
) -> None:
    for outcome in outcomes:
        message = outcome["defaults"][default]
        assert "PlanError: Accelerate would divide or skip this rank's batches" in message


def test_a_shard_loader_can_not_be_skipped_through(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        for message in (outcome["defaults"]["ours skipped"], outcome["transformers"]["skipping"]):
            assert message.startswith("AttributeError: a ShardLoader is not divided")
            assert "ignore_data_skip=True" in message


def test_a_shard_loader_is_left_as_it_is(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["defaults"]["ours prepared"] == "True"
        assert outcome["defaults"]["afterwards"] == f"{8 // len(outcomes)} batches"
