"""`fsmount bench mixing` on a small version: its result, its errors, its plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fsmount_cli.bench import mixing, results
from fsmount_cli.main import run

sys.path.append(str(Path(__file__).parents[1] / "loader"))
from small_versions import build, numbered


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> str:
    """240 samples in 12 partitions of two shards."""
    root = tmp_path_factory.mktemp("mixing") / "v"
    samples = {f"p{n:02d}": numbered(20, n, town="Ulm") for n in range(12)}
    return str(build(root, {name: [some[:15], some[15:]] for name, some in samples.items()}))


def bench(*arguments: object) -> int:
    return run(["bench", "mixing", *map(str, arguments)])


def test_the_result_is_printed_and_kept(
    version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    options = ["--batch-size", 4, "--world-size", 3, "--where", "n % 1000 < 19", "--window", 2]
    assert bench(version, *options, "--column", "n", "--json", "--output", output) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(output.read_text())
    assert result["settings"]["samples"] == 12 * 19
    assert result["settings"]["partitions"] == 12
    assert result["settings"]["global_batch_size"] == 12
    assert result["options"]["window"] == 2
    for scope, size in (("rank", 4), ("global", 12)):
        assert 1 < result[scope]["partitions"]["ours"] <= size
        assert result[scope]["column_variance"]["independent"] == pytest.approx(1 / size)
        for one in result[scope].values():
            assert one["ratio"] == pytest.approx(one["ours"] / one["independent"])
    assert result["worst_ratio"] == max(
        result[scope][name]["ratio"]
        for scope in ("rank", "global")
        for name in ("js_distance", "variance")
    )
    assert result["defaults"]["suffices"] is (result["defaults"]["worst_ratio"] <= 1.1)
    assert {one["chunk_size"] for one in result["suggestions"]} == {16, 32, 64}
    shards = Path(version, "shards")
    stored = sum(path.stat().st_size for path in shards.rglob("*.tar"))
    assert 0 < result["options"]["page_cache_bytes"] < stored


def test_it_prints_a_table(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(version, "--global-batch-size", 12, "--world-size", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "240 samples in 12 partitions"
    assert sum(line.startswith("a rank's batch") for line in lines) == 3
    assert sum(line.startswith("global batch ") for line in lines) == 3
    assert "The defaults suffice: their worst ratio is at most 1.10." in lines


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--streams", 0], "streams"),
        (["--chunk-size", 2**31], "chunk_size"),
        (["--seed", -1], "seed"),
        (["--epoch", -1], "epoch"),
        (["--batch-size", 4, "--global-batch-size", 4], "batch_size"),
        (["--global-batch-size", 4, "--world-size", 3], "3 ranks"),
        (["--world-size", 0], "world_size"),
        (["--batch-size", 241], "241"),
        (["--where", "nope = 1"], "nope"),
        (["--column", "nope"], "nope"),
        (["--column", "town"], "town"),
        (["--column", "n", "--where", "n = 1", "--batch-size", 1], "'n'"),
    ],
)
def test_bad_input_is_one_line(
    version: str, options: list[object], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(version, *options) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert named in err
    assert err.count("\n") == 1


def test_it_says_what_is_missing(
    version: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(results, "find_spec", lambda _: None)
    plot = tmp_path / "plot.png"
    assert bench(version, "--plot", plot) == 0
    assert capsys.readouterr().err == "no plot: matplotlib is not installed\n"
    assert not plot.exists()
    monkeypatch.setattr(mixing, "find_spec", lambda _: None)
    assert bench(version) == 1
    assert "fsmount[train]" in capsys.readouterr().err


def test_it_draws(version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.png"
    assert bench(version, "--world-size", 2, "--plot", plot) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert bench(version, "--plot", tmp_path / "plot.unheard") == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/plot.unheard: Format")
