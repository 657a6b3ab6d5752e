"""`fsmount bench mixing`: how well the loader's order mixes a version, and options that do."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import click

from fsmount.errors import FsmountError
from fsmount_cli.bench.results import JSON_OPTION, OUTPUT_OPTION, PLOT_OPTION, draw, give
from fsmount_cli.common import human_bytes, print_table

_DEFAULT_BATCH = 64
_LABELS = {
    "partitions": "partitions in a batch",
    "js_distance": "Jensen-Shannon distance",
    "variance": "variance of batch means",
    "column_variance": "the same, of the column",
}
_SCOPES = {"rank": "a rank's batch", "global": "global batch"}


@click.command()
@click.argument("version")
@click.option("--where", metavar="SQL", help="Measure the samples that this selects.")
@click.option(
    "--batch-size",
    type=int,
    metavar="N",
    help=f"Samples in each rank's batch.  [default: {_DEFAULT_BATCH}]",
)
@click.option("--global-batch-size", type=int, metavar="N", help="Samples in all ranks' together.")
@click.option("--world-size", type=int, metavar="W", default=1, show_default=True, help="Ranks.")
@click.option("--streams", type=int, metavar="N", help="As ShardDataset's, and its default.")
@click.option("--window", type=int, metavar="N", help="As ShardDataset's, and its default.")
@click.option("--chunk-size", type=int, metavar="N", help="As ShardDataset's, and its default.")
@click.option("--seed", type=int, metavar="N", default=0, show_default=True)
@click.option("--epoch", type=int, metavar="N", default=0, show_default=True)
@click.option("--column", metavar="NAME", help="A column of numbers whose batch means count too.")
@JSON_OPTION
@OUTPUT_OPTION
@PLOT_OPTION
def mixing(
    version: str,
    *,
    world_size: int,
    epoch: int,
    column: str | None,
    as_json: bool,
    output: str | None,
    plot: str | None,
    **given: Any,
) -> None:
    """Measure how well batches of VERSION, a mounted one, are mixed when it is shuffled.

    Each measure is a mean over batches, beside that of batches of samples drawn independently; a
    ratio of 1.00 is as good as those. The Jensen-Shannon distance (base 2, 0 to 1) is that of a
    batch's mix of partitions from the version's. The variance is that of the batch means of a value
    which all samples of a partition share, of variance 1; and of a column, scaled to variance 1.

    Then options are tried: for some chunk sizes, the longest reads first, those that need the least
    page cache. Worst is the largest ratio of distance and variance, of a rank's batch and of the
    global one. No sample is read. Needs fsmount[train].
    """
    if find_spec("torch") is None:
        raise FsmountError("no torch here: install the extra with pip install 'fsmount[train]'")
    from fsmount_cli.bench.mixed import measured  # noqa: PLC0415 - optional extra

    options = {name: value for name, value in given.items() if value is not None}
    if "global_batch_size" not in options:
        options.setdefault("batch_size", _DEFAULT_BATCH)
    result = measured(version, options, world_size, epoch, column)
    give(result, output, None if as_json else _print)
    if plot is not None:
        draw(plot, (8, 4), lambda axes: _paint(axes, result))


def _print(result: Mapping[str, Any]) -> None:
    about, used = result["settings"], result["options"]
    size, ranks = about["global_batch_size"], about["world_size"]
    click.echo(f"{about['samples']} samples in {about['partitions']} partitions")
    click.echo(f"global batches of {size}, ranks' batches of {size // ranks}, world size {ranks}")
    click.echo(", ".join(f"{name} {used[name]}" for name in ("streams", "window", "chunk_size")))
    click.echo()
    head = ("OF", "MEASURE", "OURS", "INDEPENDENT", "RATIO")
    rows = [
        (of, _LABELS[name], _short(one["ours"]), _short(one["independent"]), f"{one['ratio']:.2f}")
        for scope, of in _SCOPES.items()
        if ranks > 1 or scope == "global"
        for name, one in result[scope].items()
    ]
    print_table(head, rows, numbers=set(head[2:]))
    click.echo()
    _print_options(result)


def _print_options(result: Mapping[str, Any]) -> None:
    most = f"{result['tolerance']:.2f}"
    if result["defaults"]["suffices"]:
        click.echo(f"The defaults suffice: their worst ratio is at most {most}.")
    elif any(one["suffices"] for one in result["suggestions"]):
        click.echo(
            f"The defaults do not suffice. Take options whose worst ratio is at most {most}:"
        )
    else:
        click.echo(f"No options that were tried have a worst ratio of at most {most}.")
    head = ("", "STREAMS", "WINDOW", "CHUNK_SIZE", "WORST", "PAGE CACHE")
    named = [("defaults", result["defaults"]), *(("tried", s) for s in result["suggestions"])]
    rows = [
        (
            name,
            str(one["streams"]),
            str(one["window"]),
            str(one["chunk_size"]),
            f"{one['worst_ratio']:.2f}",
            human_bytes(one["page_cache_bytes"]),
        )
        for name, one in named
    ]
    print_table(head, rows, numbers=set(head[1:]))


def _short(value: float) -> str:
    """Three digits, or all that stand before the point and two behind it."""
    return f"{value:.2f}" if value >= 10 else f"{value:.3g}"


def _paint(axes: Any, result: Mapping[str, Any]) -> None:
    """Bars of the ratios; 1 is independent draws."""
    names = [(scope, name) for scope in _SCOPES for name in result[scope]][::-1]
    labels = [f"{_LABELS[name]}, {_SCOPES[scope]}" for scope, name in names]
    axes.barh(labels, [result[scope][name]["ratio"] for scope, name in names])
    axes.axvline(1, color="k", linewidth=1)
    axes.axvline(result["tolerance"], color="k", linewidth=1, linestyle=":")
    axes.set_xlabel("÷ independent draws")
