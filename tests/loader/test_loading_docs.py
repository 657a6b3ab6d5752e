"""The examples of docs/loading.md run, and its tables are complete."""

from __future__ import annotations

import gc
import inspect
import re
from pathlib import Path

import pytest
from pages import run_examples

from fsmount_loader import ShardDataset

PAGE = (Path(__file__).parents[2] / "docs" / "loading.md").read_text()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_examples_run(tmp_path: Path) -> None:
    names = run_examples(PAGE, tmp_path)
    assert len(names["rest"]) == 2
    assert names["result"] == 3 / 8
    assert names["state"]["position"] == 8
    names.clear()
    gc.collect()  # ends the DataLoader's persistent workers, before other tests look for workers


def test_every_option_is_told_with_its_default() -> None:
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", PAGE, re.MULTILINE)
    told = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    parameters = inspect.signature(ShardDataset).parameters
    assert told.keys() == parameters.keys() - {"path"}
    for name, parameter in parameters.items():
        if isinstance(parameter.default, str):
            assert told[name] == f'`"{parameter.default}"`'
        elif isinstance(parameter.default, int | float):
            assert told[name] == f"{parameter.default:g}" or told[name] == str(parameter.default)
