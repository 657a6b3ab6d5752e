"""`fsmount bench load`: our loader beside others and beside what zstd alone can do."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import click

from fsmount_cli.bench.results import JSON_OPTION, OUTPUT_OPTION, PLOT_OPTION, draw, give
from fsmount_cli.bench.scratch import BenchError
from fsmount_cli.common import print_table

_PROGRAM = "fsmount_cli.bench.contestants"
CONTESTANTS = (
    "ours-0", "ours-1", "ours-2", "dataloader-2", "webdataset-0", "webdataset-2", "npz-0", "npz-2",
    "limit-1", "limit-2", "stored-1", "stored-2",
)  # fmt: skip
RATIOS = (
    ("ours-0", ("limit-1",)),
    ("ours-0", ("stored-1",)),
    ("ours-2", ("limit-2",)),
    ("ours-2", ("stored-2",)),
    ("ours-0", ("webdataset-0",)),
    ("ours-2", ("webdataset-0", "webdataset-2")),
    ("ours-0", ("npz-0",)),
    ("ours-2", ("npz-0", "npz-2")),
    ("dataloader-2", ("webdataset-2",)),
)
_MEASURED = ("samples_per_second", "cpu_us_per_sample", "first_batch_seconds", "rss_mb")

Run = Mapping[str, float]


@click.command()
@click.argument("version")
@click.option("--npz", help="Directory of .npz files to read too, one sample each.")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=20_000,
    show_default=True,
    help="Samples in a run, at most.",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--shapes",
    type=click.Choice(["error", "pad", "list"]),
    default="error",
    show_default=True,
    help="What ours and dataloader make of samples that differ in shape.",
)
@click.option(
    "--fields",
    metavar="NAME,NAME",
    help="Arrays that ours and dataloader deliver.  [default: all]",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(CONTESTANTS),
    help="Measure only this one; may be given several times.",
)
@JSON_OPTION
@OUTPUT_OPTION
@PLOT_OPTION
def load(
    version: str,
    *,
    npz: str | None,
    batch_size: int,
    samples: int,
    rounds: int,
    shapes: str,
    fields: str | None,
    only: Sequence[str],
    as_json: bool,
    output: str | None,
    plot: str | None,
) -> None:
    """Measure how fast VERSION, a mounted one, loads.

    Each is run in its own process, in turn, ROUNDS times after one run to warm up; medians count.
    The number behind a name is its worker processes. ours is ShardLoader, dataloader is torch's
    over the same dataset, webdataset reads and decodes the same shards, npz is torch's DataLoader
    over files. limit is zstd alone, in 1 or 2 threads, decompressing each payload into one buffer;
    stored is that with the check of zstd's own checksum, which the loader passes over. With
    --shapes pad or list, webdataset and npz make lists of samples.

    CPU is of all processes together, user and system. FIRST is the time from nothing but imports
    to the first batch. RSS is the largest process's peak. Needs fsmount[train].
    """
    settings = {
        "version": os.path.abspath(version),
        "npz": None if npz is None else os.path.abspath(npz),
        "batch_size": batch_size,
        "samples": samples,
        "shapes": shapes,
        "fields": None if fields is None else [name for name in fields.split(",") if name],
    }
    names = [name for name in only or CONTESTANTS if npz is not None or not name.startswith("npz")]
    if any(name.startswith("webdataset") for name in names) and find_spec("webdataset") is None:
        click.echo("webdataset is not installed: left out", err=True)
        names = [name for name in names if not name.startswith("webdataset")]
    result = summary(settings, measure(names, settings, rounds))
    give(result, output, None if as_json else _print)
    if plot is not None:
        size = (8, 0.4 * len(result["medians"]) + 1.5)
        draw(plot, size, lambda axes: _paint(axes, result))


def measure(names: Sequence[str], settings: Mapping[str, Any], rounds: int) -> dict[str, list[Run]]:
    """Run each of `names` once to warm up and then `rounds` times, in turn; BenchError."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with ExitStack() as stack:
        asked = {name: stack.enter_context(_contestant(name, settings)) for name in names}
        for number in range(rounds + 1):
            for name, contestant in asked.items():
                click.echo(f"round {number} of {rounds}: {name}", err=True)
                run = _run(name, contestant)
                if number:
                    runs[name].append(run)
    return runs


def summary(settings: Mapping[str, Any], runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """The medians of `runs` and their ratios, with the runs themselves."""
    medians = {
        name: {key: statistics.median(run[key] for run in some) for key in _MEASURED}
        for name, some in runs.items()
    }
    ratios = {}
    for name, others in RATIOS:
        there = [other for other in others if other in medians]
        if name in medians and there:
            best = max(there, key=lambda other: medians[other]["samples_per_second"])
            rate = medians[name]["samples_per_second"] / medians[best]["samples_per_second"]
            ratios[f"{name} / {' or '.join(there)}"] = rate
    return {
        "settings": dict(settings),
        "cpus": len(os.sched_getaffinity(0)),
        "medians": medians,
        "ratios": ratios,
        "runs": {name: list(some) for name, some in runs.items()},
    }


@contextmanager
def _contestant(name: str, settings: Mapping[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """A process that makes one run for each line it is sent."""
    command = [sys.executable, "-m", _PROGRAM, name, json.dumps(settings)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
            process.stdin.close()  # type: ignore[union-attr]
        except BaseException:
            process.kill()
            raise


def _run(name: str, contestant: subprocess.Popen[str]) -> Run:
    assert contestant.stdin is not None  # noqa: S101 - it was made with pipes
    assert contestant.stdout is not None  # noqa: S101
    try:
        contestant.stdin.write("run\n")
        contestant.stdin.flush()
    except BrokenPipeError:
        pass  # its answer, or the lack of one, tells
    line = contestant.stdout.readline()
    answer: Any = json.loads(line) if line else {"error": f"exited with code {contestant.wait()}"}
    if "error" in answer:
        raise BenchError(f"{name}: {answer['error']}")
    run: Run = answer
    return run


def _print(result: Mapping[str, Any]) -> None:
    head = ("LOADER", "SAMPLES/S", "CPU US/SAMPLE", "FIRST S", "RSS MB")
    rows = [
        (
            name,
            f"{m['samples_per_second']:.0f}",
            f"{m['cpu_us_per_sample']:.1f}",
            f"{m['first_batch_seconds']:.2f}",
            f"{m['rss_mb']:.0f}",
        )
        for name, m in result["medians"].items()
    ]
    print_table(head, rows, numbers=set(head[1:]))
    click.echo()
    ratios = [(name, f"{ratio:.2f}") for name, ratio in result["ratios"].items()]
    print_table(("RATE / RATE", "RATIO"), ratios, numbers={"RATIO"})


def _paint(axes: Any, result: Mapping[str, Any]) -> None:
    names = list(result["medians"])[::-1]
    axes.barh(names, [result["medians"][name]["samples_per_second"] for name in names])
    for name, runs in result["runs"].items():
        axes.plot([run["samples_per_second"] for run in runs], [name] * len(runs), "k.")
    axes.set_xlabel("samples per second: median, and each run")
