"""`fsmount bench`: measure on your own data and machine."""

from __future__ import annotations

import click

from fsmount_cli.bench.load import load
from fsmount_cli.bench.mixing import mixing
from fsmount_cli.bench.mount import mount
from fsmount_cli.bench.pack import pack


@click.group()
def bench() -> None:
    """Measure how fast things are on this machine, and how well batches are mixed."""


bench.add_command(load)
bench.add_command(mixing)
bench.add_command(mount)
bench.add_command(pack)
