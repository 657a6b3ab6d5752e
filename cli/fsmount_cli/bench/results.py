"""Giving out the result of a measurement."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import click

from fsmount_cli.bench.scratch import BenchError
from fsmount_cli.common import print_json

Result = Mapping[str, Any]

JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
OUTPUT_OPTION = click.option(
    "--output", type=click.Path(dir_okay=False), help="Write the JSON to a file."
)
PLOT_OPTION = click.option(
    "--plot", type=click.Path(dir_okay=False), help="Draw it; needs fsmount[plot]."
)


def give(result: Result, output: str | None, show: Callable[[Result], None] | None) -> None:
    """Write `result` as JSON to the file `output`, if any, and `show` it, or print it as JSON."""
    if output is not None:
        with open(output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
            file.write("\n")
    if show is None:
        print_json(result)
    else:
        show(result)


def draw(path: str, size: tuple[float, float], paint: Callable[[Any], None]) -> None:
    """Let `paint` draw on the axes of a figure of `size` inches, and save it as `path`.

    A note on stderr if matplotlib is missing; BenchError if it does not know the file's kind.
    """
    if find_spec("matplotlib") is None:
        click.echo("no plot: matplotlib is not installed", err=True)
        return
    figure = import_module("matplotlib.figure").Figure(figsize=size, layout="tight")
    paint(figure.subplots())
    try:
        figure.savefig(path)
    except ValueError as error:
        raise BenchError(f"{path}: {error}") from None
