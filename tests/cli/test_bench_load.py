"""`fsmount bench load` on a small version: every contestant runs, and the result is whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsmount_cli.bench.load import RATIOS, summary

sys.path.append(str(Path(__file__).parents[1] / "loader"))
from small_versions import build, numbered


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsmount_cli.main", "bench", "load", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return build(tmp_path / "v", {"a": [numbered(20)], "b": [numbered(9, 1)]})


def test_each_contestant_runs_and_the_result_is_kept(version: Path, tmp_path: Path) -> None:
    folder = tmp_path / "npz" / "a"
    folder.mkdir(parents=True)
    for one in numbered(20):
        np.savez_compressed(folder / f"{one.name}.npz", **one.arrays)  # type: ignore[arg-type]
    output = tmp_path / "result.json"
    names = ["ours-0", "ours-1", "dataloader-2", "webdataset-0", "npz-0", "limit-2", "stored-1"]
    only = [part for name in names for part in ("--only", name)]
    options = ["--batch-size", 4, "--samples", 12, "--rounds", 1, "--npz", folder.parent]
    done = bench(version, *options, *only, "--json", "--output", output)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert result == json.loads(done.stdout)
    assert list(result["medians"]) == names
    for name in names:
        (run,) = result["runs"][name]
        assert run["samples"] >= 12
        assert min(result["medians"][name].values()) > 0
    assert "ours-0 / stored-1" in result["ratios"]
    assert "ours-0 / npz-0" in result["ratios"]


def test_samples_that_differ_in_shape(tmp_path: Path) -> None:
    samples = numbered(12)
    samples[5].arrays["x"].resize(5, refcheck=False)
    version = build(tmp_path / "v", {"a": [samples]})
    options = ["--batch-size", 4, "--samples", 12, "--rounds", 1]
    for more in (
        ["--shapes", "pad", "--only", "webdataset-0", "--only", "limit-1"],
        ["--shapes", "list", "--fields", "x,label"],
        ["--fields", "label"],
    ):
        done = bench(version, *options, *more, "--only", "ours-0", "--json")
        assert done.returncode == 0, done.stderr
        assert min(json.loads(done.stdout)["medians"]["ours-0"].values()) > 0
    done = bench(version, *options, "--fields", "lable", "--only", "ours-0")
    assert "fields: no 'lable' (did you mean label?)" in done.stderr


def test_a_contestant_that_fails_is_an_error(tmp_path: Path) -> None:
    done = bench(tmp_path, "--only", "ours-0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: ours-0: PlanError: not a mounted version"
    )


def test_ratios_are_to_the_best_of_several() -> None:
    def runs(*rates: float) -> list[dict[str, float]]:
        other = {"cpu_us_per_sample": 1.0, "first_batch_seconds": 1.0, "rss_mb": 1.0}
        return [{"samples_per_second": rate, **other} for rate in rates]

    made: dict[str, Any] = {
        "ours-2": runs(9, 60, 61),
        "webdataset-0": runs(10),
        "limit-2": runs(80),
    }
    assert summary({}, made)["ratios"] == {"ours-2 / webdataset-0": 6.0, "ours-2 / limit-2": 0.75}
    made["webdataset-2"] = runs(20)
    assert summary({}, made)["ratios"]["ours-2 / webdataset-0 or webdataset-2"] == 3.0
    assert {name for name, _ in RATIOS} >= set(made) & {"ours-2"}
