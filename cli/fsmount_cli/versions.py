"""`fsmount versions` and `fsmount show`: what a store holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from fsmount.errors import one_line
from fsmount.formats import document as documents
from fsmount.model import LatestRef, Partition, Version, VersionDocument
from fsmount.store import Store
from fsmount_cli.common import human_bytes, parse_store_ref, print_json, print_table

_JSON_HELP = "Print JSON; sizes in bytes."


@click.command()
@click.argument("store")
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def versions(store: str, as_json: bool) -> None:
    """List the versions in STORE, oldest first.

    RAW is what the samples have uncompressed, in binary units (1 KiB = 1024 bytes). CREATED is UTC.
    The version that `latest` names is marked with '*'.
    """
    opened = Store.open(store)
    found, latest = opened.survey(), opened.latest()
    if as_json:
        listed = [_document(document) for document in found.versions]
        print_json({"latest": latest, "versions": listed})
    else:
        head = ("", "TAG", "CREATED", "PARTITIONS", "SAMPLES", "RAW", "MESSAGE")
        rows = [_row(document, latest) for document in found.versions]
        print_table(head, rows, numbers={"PARTITIONS", "SAMPLES", "RAW"})
    for error in found.faults.values():  # the first is said; the others are of its kind
        raise error


@click.command()
@click.argument("version", metavar="STORE[@REF]")
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def show(version: str, as_json: bool) -> None:
    """Show one version and its partitions.

    REF is a tag, 'latest' (the default) or sha256:DIGITS, 8 or more digits of a partition table's
    digest. Sizes are in binary units (1 KiB = 1024 bytes): RAW uncompressed, STORED in the store.
    """
    path, ref = parse_store_ref(version)
    found = Store.open(path).version(ref or LatestRef())
    if as_json:
        partitions = [asdict(partition) for partition in found.partitions]
        print_json({"document": _document(found.document), "partitions": partitions})
        return
    for name, value in _facts(found):
        click.echo(f"{name:<17} {one_line(value)}")
    click.echo()
    head = ("PARTITION", "SAMPLES", "SHARDS", "RAW", "STORED", "DATA", "METADATA")
    rows = [_partition_row(partition) for partition in found.partitions]
    print_table(head, rows, numbers={"SAMPLES", "SHARDS", "RAW", "STORED"})


def _document(document: VersionDocument) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(documents.encode(document))
    return value


def _row(document: VersionDocument, latest: str | None) -> tuple[str, ...]:
    totals = document.totals
    return (
        "*" if document.tag == latest else "",
        str(document.tag),
        document.created_at,
        str(totals.partitions),
        str(totals.samples),
        human_bytes(totals.raw_bytes),
        document.message,
    )


def _facts(version: Version) -> list[tuple[str, str]]:
    document, totals = version.document, version.document.totals
    parent = document.parent
    return [
        ("tag", document.tag or "(none)"),
        ("created", document.created_at),
        ("message", document.message),
        ("content revision", document.content_revision),
        ("table", f"sha256:{document.table.digest}"),
        ("parent", f"{parent.tag or '(no tag)'} sha256:{parent.table}" if parent else "(none)"),
        ("partition rule", str(document.rule)),
        ("source namespace", document.source_namespace),
        ("recipe", str(document.recipe)),
        ("packed with", ", ".join(f"{k} {v}" for k, v in sorted(document.provenance.items()))),
        ("partitions", str(totals.partitions)),
        ("samples", str(totals.samples)),
        ("shards", str(totals.shards)),
        ("raw", f"{human_bytes(totals.raw_bytes)} ({totals.raw_bytes} bytes)"),
        ("stored", f"{human_bytes(totals.stored_bytes)} ({totals.stored_bytes} bytes)"),
    ]


def _partition_row(partition: Partition) -> tuple[str, ...]:
    return (
        partition.id,
        str(partition.samples),
        str(len(partition.shards)),
        human_bytes(partition.raw_bytes),
        human_bytes(sum(ref.size for ref in partition.objects())),
        partition.data_revision[:12],
        partition.metadata_revision[:12],
    )
