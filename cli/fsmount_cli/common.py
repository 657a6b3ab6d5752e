"""What several commands share: `STORE[@REF]`, byte counts, one-line texts, JSON and tables."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import click

from fsmount.errors import InvalidNameError, one_line
from fsmount.model import Ref, parse_ref

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def parse_store_ref(text: str) -> tuple[str, Ref | None]:
    """Split `STORE[@REF]` at its last '@'; the reference is None where there is none.

    The whole text is the store if it is an existing directory, or if what follows the '@' has a
    '/' and so can't be a reference. Raises InvalidNameError.
    """
    store, at, ref = text.rpartition("@")
    if not at or "/" in ref or os.path.isdir(text):
        return text, None
    if not store:
        raise InvalidNameError(f"no store before the '@' of {text!r}")
    return store, parse_ref(ref)


def human_bytes(count: int) -> str:
    """`count` bytes in binary units, three or four digits: "512 B", "1.50 GiB"."""
    if count < 1024:
        return f"{count} B"
    value, units = count / 1024, iter(_UNITS)
    unit = next(units)
    while value >= 1023.5 and unit != _UNITS[-1]:
        value, unit = value / 1024, next(units)
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def print_json(value: object) -> None:
    """Print `value` as JSON for machines: ASCII, sorted keys, indented."""
    click.echo(json.dumps(value, indent=2, sort_keys=True))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: set[str]) -> None:
    """Print `rows` under `head` in aligned columns; those named in `numbers` to the right."""
    lines = [list(head), *[[one_line(cell) for cell in row] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = [
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for cell, width, name in zip(line, widths, head, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())
