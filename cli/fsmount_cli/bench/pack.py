"""`fsmount bench pack`: how fast a source is packed, and packed again when nothing has changed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import click

from fsmount.pack.source import NpzTree
from fsmount_cli.bench.memory import Peak
from fsmount_cli.bench.results import JSON_OPTION, OUTPUT_OPTION, give
from fsmount_cli.bench.scratch import run, scratch_directory
from fsmount_cli.bench.served import FSMOUNT
from fsmount_cli.common import print_table

_MEDIANS = (
    "seconds",
    "samples_per_second",
    "raw_mb_per_second",
    "source_mb_per_second",
    "peak_rss_mb",
    "unchanged_seconds",
    "unchanged_peak_rss_mb",
)


@dataclass(frozen=True, slots=True)
class _Job:
    source: str
    store: str
    workers: int
    deadline: float  # by the monotonic clock


@click.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=lambda: len(os.sched_getaffinity(0)),
    show_default="one a core",
    metavar="N",
    help="Processes that build partitions.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--seconds",
    type=click.IntRange(1),
    default=3600,
    show_default=True,
    help="No round but the first begins later. After twice as long it is an error.",
)
@click.option(
    "--scratch",
    type=click.Path(exists=True, file_okay=False),
    help="Where a directory is made for the store; it needs room for the packed source.  "
    "[default: where temporary files go]",
)
@JSON_OPTION
@OUTPUT_OPTION
def pack(
    source: str,
    *,
    workers: int,
    rounds: int,
    seconds: int,
    scratch: str | None,
    as_json: bool,
    output: str | None,
) -> None:
    """Measure how fast SOURCE is packed on this machine.

    Each of ROUNDS packs it into a new store in a temporary directory and then again, with nothing
    changed, as a second version. Times are those of the whole command; the first round may have to
    read files from disk. RAW is what samples have uncompressed, SOURCE the .npz and .json files as
    they are. RSS is the peak of all processes together; what they share counts for each.
    """
    if not sys.platform.startswith("linux"):
        raise click.UsageError("bench pack needs Linux")
    root = os.path.abspath(source)
    begin, size = time.monotonic(), _source_bytes(root)
    runs: list[dict[str, float]] = []
    with scratch_directory(scratch, 2 * seconds) as directory:
        job = _Job(root, f"{directory}/store", workers, begin + 2 * seconds)
        for number in range(rounds):
            if number and time.monotonic() > begin + seconds:
                break
            click.echo(f"round {number + 1} of {rounds}", err=True)
            runs.append(_round(job, size))
            shutil.rmtree(job.store)
    settings = {"source": root, "source_bytes": size, "workers": workers, "rounds": rounds}
    give(_summary(settings, runs), output, None if as_json else _print)


def _source_bytes(root: str) -> int:
    samples = NpzTree(root).scan().samples
    return sum(one.file.size + (one.sidecar.size if one.sidecar else 0) for one in samples)


def _round(job: _Job, size: int) -> dict[str, float]:
    """Pack into a new store, and once more."""
    with Peak() as peak:
        seconds, report = _pack(job, "v1", peak)
    with Peak() as again:
        unchanged, _ = _pack(job, "v2", again)
    totals = report["document"]["totals"]
    return {
        "seconds": seconds,
        "samples_per_second": totals["samples"] / seconds,
        "raw_mb_per_second": totals["raw_bytes"] / 1e6 / seconds,
        "source_mb_per_second": size / 1e6 / seconds,
        "peak_rss_mb": peak.rss / 1e6,
        "unchanged_seconds": unchanged,
        "unchanged_peak_rss_mb": again.rss / 1e6,
    }


def _pack(job: _Job, tag: str, peak: Peak) -> tuple[float, dict[str, Any]]:
    options = ("--tag", tag, "--workers", str(job.workers), "--quiet", "--json")
    command = [*FSMOUNT, "pack", *options, "--", job.source, job.store]
    begin = time.monotonic()
    env = {**os.environ, "XDG_CACHE_HOME": f"{os.path.dirname(job.store)}/cache"}
    out = run(command, job.deadline - begin, env=env, began=peak.watch)
    return time.monotonic() - begin, json.loads(out)


def _summary(settings: Mapping[str, Any], runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    medians = {name: median(run[name] for run in runs) for name in _MEDIANS}
    return {
        "settings": {**settings, "cpus": len(os.sched_getaffinity(0))},
        "medians": medians,
        "ratios": {
            "pack / unchanged": median(run["seconds"] / run["unchanged_seconds"] for run in runs)
        },
        "runs": list(runs),
    }


def _print(result: Mapping[str, Any]) -> None:
    medians = result["medians"]
    units = {
        "seconds": ("pack", "s", 2),
        "samples_per_second": ("samples", "/s", 0),
        "raw_mb_per_second": ("raw", "MB/s", 1),
        "source_mb_per_second": ("source", "MB/s", 1),
        "peak_rss_mb": ("peak RSS", "MB", 0),
        "unchanged_seconds": ("pack again, unchanged", "s", 2),
        "unchanged_peak_rss_mb": ("peak RSS of that", "MB", 0),
    }
    rows = [
        (label, f"{medians[name]:.{digits}f}", unit)
        for name, (label, unit, digits) in units.items()
    ]
    print_table(("MEASURE", "MEDIAN", ""), rows, numbers={"MEDIAN"})
