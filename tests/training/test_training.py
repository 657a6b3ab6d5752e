"""The tutorial in docs/training.md shows what comes, and its runs have the losses they should."""

from __future__ import annotations

import csv
import json
import os
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tutorial import DOCS, PAGE, Example, Place, place_at, run_page

pytestmark = pytest.mark.mounted
MANY_RUNS = Path(__file__).with_name("many_runs.py")
SEEDS = range(1, 9)
K = 4  # docs/training.md says why
STEPS, STEPS_AN_EPOCH = 184, 23
CLOSE = 1e-5  # nothing but the order of additions differs

Floats = NDArray[np.float64]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place_at(tmp_path_factory.mktemp("training")) as place:
        yield place


@pytest.fixture(scope="module")
def session(place: Place) -> list[Example]:
    """The page's commands; what they leave is in `place`."""
    return run_page(place)


@pytest.fixture(scope="module")
def done(session: list[Example]) -> int:
    """The steps that the killed run had done when its last checkpoint was saved."""
    [resumed] = [example.came for example in session if "--resume" in example.command]
    return int(re.findall(r"(\d+) steps done", resumed)[0])


@pytest.fixture(scope="module")
def further(place: Place, session: list[Example]) -> Path:
    """Where the runs from files with other seeds are, and those from two faulty trees.

    One rank runs them all. The global batches are those of two ranks.
    """
    write_faulty_trees(place.path)
    runs = [
        ["--files", "digits", "--out", f"further/{seed}", "--seed", str(seed)] for seed in SEEDS
    ]
    runs += [["--files", tree, "--out", f"further/{tree}"] for tree in ("labels", "pixels")]
    (place.path / "runs.json").write_text(json.dumps(runs))
    place.run("torchrun", "--standalone", "--nproc-per-node=1", str(MANY_RUNS), "runs.json")
    return place.path / "further"


def write_faulty_trees(path: Path) -> None:
    """Beside `digits`: one training label in twenty wrong; pixels not scaled as all others are."""
    for tree in ("labels", "pixels"):
        shutil.copytree(path / "digits", path / tree, copy_function=os.link)
    for number, digit in enumerate(sorted((path / "digits").rglob("*.npz"))):
        image, label = (np.load(digit)[name] for name in ("image", "label"))
        pixels = image * np.float32(16 / 255)
        rewrite(path / "pixels" / digit.relative_to(path / "digits"), pixels, label)
        if number % 20 == 1:
            rewrite(path / "labels" / digit.relative_to(path / "digits"), image, (label + 1) % 10)


def rewrite(path: Path, image: NDArray[np.float32], label: NDArray[np.int64]) -> None:
    path.unlink()  # it is a link to the good one
    np.savez(path, image=image, label=label)


def table(path: Path) -> Floats:
    """The rows of a CSV file of numbers."""
    with path.open(newline="") as file:
        return np.array([[float(cell) for cell in row] for row in list(csv.reader(file))[1:]])


def curves(run: Path) -> Floats:
    """Training and validation loss of each epoch [2, epochs]."""
    steps, epochs = table(run / "steps.csv"), table(run / "epochs.csv")
    trained = [steps[steps[:, 1] == epoch, 2].mean() for epoch in epochs[:, 0]]
    return np.array([trained, epochs[:, 1]])


def deviation(run: Path, further: Path) -> Floats:
    """How many standard deviations of the band `run` is off [2, epochs]."""
    band = np.array([curves(further / str(seed)) for seed in SEEDS])
    off: Floats = np.abs(curves(run) - band.mean(0)) / band.std(0, ddof=1)
    return off


def test_the_page_shows_what_comes(session: list[Example]) -> None:
    wrong = [example for example in session if not example.holds()]
    assert not wrong


def test_the_page_quotes_the_script() -> None:
    quotes = re.findall(r"```python\n(?!# \w+\.py\n)(.*?)```", PAGE, re.DOTALL)
    script = (DOCS / "train_ddp.py").read_text(encoding="utf-8")
    assert len(quotes) == 1
    assert all(quote in script for quote in quotes)


@pytest.mark.parametrize("run", ["from-mount", "from-files"])
def test_mount_and_files_train_alike(run: str, place: Place, further: Path) -> None:
    assert deviation(place.path / run, further).max() < K


@pytest.mark.parametrize("tree", ["labels", "pixels"])
def test_a_faulty_run_is_seen(tree: str, further: Path) -> None:
    trained, validated = deviation(further / tree, further)
    assert trained.max() > 2 * K
    assert validated.max() > K


def test_ranks_are_killed_within_an_epoch(place: Place, session: list[Example], done: int) -> None:
    log = (place.path / "cut.log").read_text()
    assert len(re.findall(r"exitcode *: -9 ", log)) == 2, log
    assert done < STEPS
    assert done % STEPS_AN_EPOCH


def test_two_micro_batches_have_the_losses_of_one_batch(place: Place, done: int) -> None:
    assert done > STEPS_AN_EPOCH, "an epoch's last step, of one micro-batch alone, is among them"
    one, other = (table(place.path / run / "steps.csv")[:done] for run in ("from-mount", "cut"))
    assert np.abs(one - other).max() < CLOSE


@pytest.mark.parametrize("log", ["steps.csv", "epochs.csv"])
def test_a_resumed_run_goes_on_at_the_same_losses(log: str, place: Place, done: int) -> None:
    one, other = (table(place.path / run / log) for run in ("from-mount", "cut"))
    assert len(one) == (STEPS if log == "steps.csv" else STEPS / STEPS_AN_EPOCH)
    assert np.abs(one - other).max() < CLOSE


def test_the_last_checkpoint_has_all_steps(place: Place, done: int) -> None:
    checkpoint = torch.load(place.path / "cut" / "checkpoint.pt", weights_only=True)
    assert checkpoint["step"] == STEPS
    assert checkpoint["loader"]["position"] == checkpoint["loader"]["samples"]


def test_a_log_goes_on_behind_what_the_checkpoint_knew(tmp_path: Path) -> None:
    open_log = runpy.run_path(str(DOCS / "train_ddp.py"))["open_log"]
    path = tmp_path / "log.csv"
    with open_log(path, "step", 0) as log:
        print(1, file=log)
        kept = log.tell()
        print("2\n3", file=log)
    with open_log(path, "step", kept) as log:
        assert log.tell() == kept
        print(2, file=log)
    assert path.read_text() == "step\n1\n2\n"
