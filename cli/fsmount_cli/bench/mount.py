"""`fsmount bench mount`: a mount beside the files that it shows."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import click

from fsmount.errors import one_line
from fsmount.model import LatestRef
from fsmount.store import Store
from fsmount_cli.bench.measures import MEASURES, Bench
from fsmount_cli.bench.reading import Rounds
from fsmount_cli.bench.results import JSON_OPTION, OUTPUT_OPTION, give
from fsmount_cli.bench.scratch import scratch_directory
from fsmount_cli.bench.served import largest
from fsmount_cli.common import parse_store_ref, print_table

_GIB = 1 << 30


@click.command()
@click.argument("version", metavar="STORE[@REF]")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(MEASURES),
    help="Measure only this; may be given several times.",
)
@click.option(
    "--bytes",
    "limit",
    type=click.IntRange(1),
    default=_GIB,
    show_default=True,
    help="Bytes that a run reads, at most: of the largest shard, and of further ones that fit.",
)
@click.option(
    "--seconds",
    type=click.IntRange(1),
    default=600,
    show_default=True,
    help="No round begins later, but each measure's first. After twice as long it is an error.",
)
@click.option(
    "--drop-caches",
    is_flag=True,
    help="Before each cold run and each first find, drop the whole machine's caches; needs root.",
)
@click.option(
    "--scratch",
    type=click.Path(exists=True, file_okay=False),
    help="Where a directory for mountpoints is made.  [default: where temporary files go]",
)
@JSON_OPTION
@OUTPUT_OPTION
def mount(
    version: str,
    *,
    rounds: int,
    only: Sequence[str],
    limit: int,
    seconds: int,
    drop_caches: bool,
    scratch: str | None,
    as_json: bool,
    output: str | None,
) -> None:
    """Measure how fast a mount of a version is on this machine. REF is 'latest' by default.

    \b
    start       seconds from the command until the mount serves; its server's memory
    warm, cold  reads of 1 MiB, with the objects in the page cache or out of it
    page_cache  what one read of a shard takes of it, in shares of the bytes read
    recovery    seconds from a server's SIGKILL to the next answered request
    metadata    find and ls -lR, beside the same tree of empty real files

    Reads go, in turn, to the object itself; through the kernel driver with and without passthrough;
    through the fusepy driver; and through loopback, a file system on fusepy that only calls pread.
    A mount's own pages are dropped before each run. Each value is the median of ROUNDS; each ratio
    is the median of the rounds' ratios. Mounts are made in a temporary directory and taken off
    again. To the store nothing is written but what any mount writes: its lease, and the version's
    path list in cache/.
    """
    if not sys.platform.startswith("linux"):
        raise click.UsageError("bench mount needs Linux")
    if drop_caches and os.geteuid() != 0:
        raise click.UsageError("--drop-caches needs root")
    path, ref = parse_store_ref(version)
    store = Store.open(os.path.abspath(path))
    target = largest(store, store.version(ref or LatestRef()), limit)
    repeat = Rounds(rounds, time.monotonic() + seconds)
    with scratch_directory(scratch, 2 * seconds) as directory, ExitStack() as stack:
        bench = Bench(target, directory, repeat, stack, _note, drop_caches=drop_caches)
        result = bench.run([name for name in MEASURES if name in (only or MEASURES)])
    give(result, output, None if as_json else _print)


def _note(text: str) -> None:
    click.echo(one_line(text), err=True)


def _print(result: Mapping[str, Any]) -> None:
    print_table(("MEASURE", "VALUE", ""), [*_rows(result)], numbers={"VALUE"})
    for name, reason in result["left_out"].items():
        click.echo(f"left out: {name}: {one_line(reason)}")


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    if "start" in result:
        yield from _start_rows(result["start"])
    for heat in ("warm", "cold"):
        if heat in result:
            yield from _read_rows(heat, result[heat])
    for name, share in result.get("page_cache", {}).items():
        yield f"page cache of a read, {name}", f"{share:.2f}", "÷ bytes read"
    if "recovery" in result:
        yield "SIGKILL to next answer", f"{result['recovery']['seconds']:.3f}", "s"
    if "metadata" in result:
        yield from _metadata_rows(result["metadata"])


def _start_rows(start: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    driver = start["driver"]
    yield f"command to served, {driver}, first", f"{start['first_seconds']:.2f}", "s"
    yield f"command to served, {driver}", f"{start['seconds']:.2f}", "s"
    for role in ("server", "supervisor"):
        if f"{role}_rss_mb" in start:
            yield f"memory of the {role}", f"{start[f'{role}_rss_mb']:.0f}", "MB"


def _read_rows(heat: str, found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, rate in found["mb_per_second"].items():
        note = "" if name != "passthrough" or found["passthrough_used"] else " (refused: copied)"
        yield f"{heat} read, {name}", f"{rate:.0f}", f"MB/s{note}"
    for name, ratio in found["ratios"].items():
        yield f"{heat} read, {name}", f"{ratio:.2f}", ""


def _metadata_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    labels = {"find_first": "find, first", "find": "find, again", "ls": "ls -lR, again"}
    for name, label in labels.items():
        mounted, real = (found["seconds"][where][name] for where in ("mount", "real"))
        yield f"{label}, {found['files']} files", f"{mounted:.3f}", f"s; real files {real:.3f} s"
        yield f"{label}, mount / real files", f"{found['ratios'][name]:.2f}", ""
    yield "memory of the server after that", f"{found['server_rss_mb']:.0f}", "MB"
