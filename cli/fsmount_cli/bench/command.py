"""`fsmount bench`: measure on your own data and machine."""

from __future__ import annotations

import click

from fsmount_cli.lazy import LazyCommand, LazyGroup

_COMMANDS = {
    "load": LazyCommand("bench.load", "load", "Measure the loader against its alternatives."),
    "mixing": LazyCommand("bench.mixing", "mixing", "Measure how well batches are mixed."),
    "mount": LazyCommand("bench.mount", "mount", "Measure mounts against the file below."),
    "pack": LazyCommand("bench.pack", "pack", "Measure packing, and packing again."),
}


@click.group(cls=LazyGroup, lazy=_COMMANDS)
def bench() -> None:
    """Measure how fast things are on this machine, and how well batches are mixed."""
