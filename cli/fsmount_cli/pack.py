"""`fsmount pack`: from a tree of samples to a published version."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from fsmount.diff import Changes
from fsmount.errors import one_line
from fsmount.formats import document as documents
from fsmount.model import DepthRule, Ref, RegexRule, Rule, check_tag, parse_ref
from fsmount.pack import PackOptions, PackReport, pack
from fsmount.pack.files import Links
from fsmount.pack.source import MAX_SAMPLE_BYTES
from fsmount_cli.common import human_bytes, print_json
from fsmount_cli.progress import Quiet, progress

_SHOWN = 5  # names on a line
_SIZE = re.compile(r"(\d+)(KiB|MiB|GiB|TiB|)")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _size(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """A number of bytes, or a number with KiB, MiB, GiB or TiB."""
    match = None if value is None else _SIZE.fullmatch(value)
    if value is not None and (match is None or not int(match[1])):
        raise click.BadParameter(f"{value!r} is not a size such as 4GiB, 512MiB or 1000000")
    return None if match is None else int(match[1]) * _UNITS[match[2]]


@click.command(name="pack")
@click.argument("source", type=click.Path())
@click.argument("store", type=click.Path())
@click.option("--tag", required=True, help="Name of the new version.")
@click.option(
    "--base",
    default="latest",
    show_default=True,
    metavar="REF|none",
    help="Version to build on: its partitions that SOURCE doesn't have are kept.",
)
@click.option(
    "--partition-depth",
    type=click.IntRange(min=1),
    metavar="N",
    help="A partition is what shares its first N directories.  [default: as the base, else the "
    "sample's directory]",
)
@click.option(
    "--partition-regex",
    metavar="RE",
    help="A partition is what shares the text that RE (RE2's syntax) finds in the key: group "
    "'partition', or group 1, or the whole match.",
)
@click.option(
    "--source-namespace",
    metavar="NAME",
    help="What SOURCE is called, for data that moves about.  [default: its real path]",
)
@click.option(
    "--replace-all", is_flag=True, help="The new version is SOURCE alone, whatever the base has."
)
@click.option("--sync", is_flag=True, help="Drop partitions of the base that SOURCE doesn't have.")
@click.option(
    "--force",
    is_flag=True,
    help="Read every file, also those that look unchanged by size, mtime, ctime and inode, and "
    "every shard that is reused. For file systems without a ctime, or after a clock was set back.",
)
@click.option(
    "--links",
    type=click.Choice([links.value for links in Links]),
    default=Links.FOLLOW.value,
    show_default=True,
    help="Symbolic links in SOURCE: follow them wherever they lead, those that stay inside SOURCE, "
    "or none; others are errors.",
)
@click.option(
    "--max-sample-size",
    metavar="SIZE",
    callback=_size,
    default=f"{MAX_SAMPLE_BYTES >> 30}GiB",
    show_default=True,
    help="Largest sample, by the bytes of its arrays; a larger one is an error.",
)
@click.option("--require-sidecars", is_flag=True, help="Refuse if a sample has no .json sidecar.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes that build partitions.  [default: one a core, where starting them pays]",
)
@click.option(
    "--level",
    type=click.IntRange(1, 22),
    metavar="N",
    help="zstd compression level, 1 to 22.  [default: as the base, else 3]",
)
@click.option(
    "--shard-size",
    metavar="SIZE",
    callback=_size,
    help="Most raw bytes of samples in a shard.  [default: as the base, else 256MiB]",
)
@click.option(
    "--order-seed",
    type=click.IntRange(0, (1 << 64) - 1),
    metavar="N",
    help="Seed of the order of samples in shards.  [default: as the base, else 0]",
)
@click.option("--message", default="", help="A line that `versions` and `show` print.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON; sizes in bytes.")
@click.pass_context
def command(
    context: click.Context,
    /,
    source: str,
    store: str,
    quiet: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Pack the .npz tree SOURCE into STORE and publish it as a version.

    A sample is an .npz file, with an optional .json sidecar of the same stem. STORE is made if it
    does not exist. Only what changed since your last pack is read, and what changed since the base
    is written; your packs are remembered below XDG_CACHE_HOME (~/.cache). Each worker needs memory
    for about twice its largest sample. Sizes are in binary units (1 KiB = 1024 bytes).
    """
    options = _options(context.params)
    report = pack(source, store, options, Quiet()) if quiet else _watched(source, store, options)
    _warn(report)
    if as_json:
        print_json(_json(report))
    else:
        _print(report)


def _watched(source: str, store: str, options: PackOptions) -> PackReport:
    observer = progress()
    try:
        return pack(source, store, options, observer)
    except KeyboardInterrupt:
        observer.stop()
        at = f" after {observer.samples} of {observer.of} samples" if observer.of else ""
        _say(
            f"interrupted{at}: nothing is published; finished partitions and shards are kept, and "
            "the next run goes on from there"
        )
        raise
    finally:
        observer.stop()


def _warn(report: PackReport) -> None:
    """Say what the user may not have meant."""
    tag = report.document.tag
    if report.published and report.latest != tag:
        _say(f"note: {tag} is published, but `latest` is {report.latest}: another pack moved it")
    lost = [
        f"{name!r} lost {changes.removed}"
        for name, changes in report.changes.items()
        if changes.removed and name not in report.dropped
    ]
    if lost:
        _say(f"warning: samples are gone: partition {_some(lost)}")


def _say(text: str) -> None:
    click.echo(one_line(text), err=True)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more (--json lists them)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _options(given: dict[str, Any]) -> PackOptions:
    return PackOptions(
        tag=check_tag(given["tag"]),
        base=_base(given["base"]),
        rule=_rule(given["partition_depth"], given["partition_regex"]),
        level=given["level"],
        shard_bytes=given["shard_size"],
        order_seed=given["order_seed"],
        source_namespace=given["source_namespace"],
        replace_all=given["replace_all"],
        sync=given["sync"],
        force=given["force"],
        links=Links(given["links"]),
        max_sample_bytes=given["max_sample_size"],
        require_sidecars=given["require_sidecars"],
        workers=given["workers"],
        message=given["message"],
    )


def _base(text: str) -> Ref | None:
    return None if text == "none" else parse_ref(text)


def _rule(depth: int | None, pattern: str | None) -> Rule | None:
    if depth is not None and pattern is not None:
        raise click.UsageError("--partition-depth and --partition-regex exclude each other")
    if depth is not None:
        return DepthRule(depth)
    return None if pattern is None else RegexRule(pattern)


def _json(report: PackReport) -> dict[str, Any]:
    value = asdict(report)
    value["document"] = json.loads(documents.encode(report.document))
    return value


def _print(report: PackReport) -> None:
    totals = report.document.totals
    done = "published" if report.published else "already there:"
    click.echo(
        f"{done} {report.document.tag}: {totals.samples} samples in {totals.partitions} "
        f"partitions, {human_bytes(totals.raw_bytes)} raw, {human_bytes(totals.stored_bytes)} "
        f"stored, sha256:{report.document.table.digest}"
    )
    counts = (
        ("built", report.built),
        ("new metadata only", report.refreshed),
        ("reused", report.reused),
        ("kept from the base", report.kept),
        ("dropped", report.dropped),
    )
    parts = [f"{len(names)} {word}" for word, names in counts if names]
    click.echo(
        f"partitions: {', '.join(parts)}; {report.samples_read} samples read in "
        f"{report.seconds:.1f} s; {report.ignored_files} other files ignored"
    )
    changes = sum(report.changes.values(), Changes())
    click.echo(
        f"samples: +{changes.added} -{changes.removed} ~{changes.changed} "
        f"(added, removed, changed), {changes.metadata} with new metadata only"
    )
    if report.kept:
        click.echo(
            "kept from the base though the source doesn't have them (--sync drops them): "
            f"{_some([one_line(name) for name in report.kept])}"
        )
