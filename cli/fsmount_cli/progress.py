"""How a pack goes along: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fsmount.pack import Observer, Silent
from fsmount.pack.plan import Plan
from fsmount_cli import interrupts
from fsmount_cli.common import human_bytes

_EVERY = 10.0  # seconds between lines
_MANY = 100  # manifests that take seconds to write
_NARROW = 80  # columns of a terminal that has no room for all


class PackProgress(Observer, Protocol):
    """An observer that knows how far the pack is, and leaves the terminal as it was."""

    samples: int  # that have been looked at
    of: int  # that have to be

    def stop(self) -> None:
        """Leave the terminal as it was."""
        ...


def progress() -> PackProgress:
    """A bar if stderr is a terminal that can show one, else lines."""
    if sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown"):
        return Bar(Console(stderr=True))
    return Lines()


class Quiet(Silent):
    """Says nothing."""

    def advanced(self, samples: int, source_bytes: int) -> None:
        """Raise KeyboardInterrupt if there was an interrupt."""
        interrupts.check()


class Bar:
    """A bar: samples, bytes of source files, rate, time to go; what fits."""

    def __init__(self, console: Console) -> None:
        self.samples = self.of = 0
        self._rewriting = False
        narrow = console.width < _NARROW
        self._progress = Progress(*(_narrow() if narrow else _wide()), console=console)

    def planned(self, plan: Plan, samples: int, source_bytes: int) -> None:
        """Show the bar, if there is anything to do."""
        _say_resumed(plan)
        self.of = samples
        if samples:
            self._task = self._progress.add_task("", total=source_bytes, samples=0, of=samples)
            self._progress.start()

    def advanced(self, samples: int, source_bytes: int) -> None:
        """Move the bar; KeyboardInterrupt if there was an interrupt."""
        interrupts.check()
        self.samples = samples
        self._progress.update(self._task, completed=source_bytes, samples=samples)

    def rewriting(self, manifests: int) -> None:
        """Say it above the bar, once, if it takes a while."""
        if not self._rewriting and manifests >= _MANY:
            self._progress.console.print(_rewriting(manifests))
        self._rewriting = True

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self.of:  # else rich would print an empty line
            self._progress.stop()


def _wide() -> tuple[ProgressColumn, ...]:
    return (
        TextColumn("packing"),
        BarColumn(),
        TextColumn("{task.fields[samples]}/{task.fields[of]} samples"),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )


def _narrow() -> tuple[ProgressColumn, ...]:
    return (
        BarColumn(bar_width=10),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(compact=True),
    )


class Lines:
    """A line at the beginning of the work, and then one every ten seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.samples = self.of = 0
        self._rewriting = False
        self._clock = clock

    def planned(self, plan: Plan, samples: int, source_bytes: int) -> None:
        """Say what there is to do, if there is anything."""
        _say_resumed(plan)
        self.of, self._bytes = samples, source_bytes
        self._began = self._told = self._clock()
        if samples:
            _say(f"packing {samples} samples, {human_bytes(source_bytes)} of source files")

    def advanced(self, samples: int, source_bytes: int) -> None:
        """Say how far it is, if nothing was said for a while; KeyboardInterrupt as the bar."""
        interrupts.check()
        self.samples = samples
        now = self._clock()
        if now - self._told < _EVERY:
            return
        self._told = now
        rate = source_bytes / (now - self._began)
        left = f", {_minutes((self._bytes - source_bytes) / rate)} to go" if rate else ""
        _say(
            f"packed {samples}/{self.of} samples, {human_bytes(source_bytes)} of "
            f"{human_bytes(self._bytes)}, {human_bytes(round(rate))}/s{left}"
        )

    def rewriting(self, manifests: int) -> None:
        """Say how many there are, if that takes a while, and now and then how many are left."""
        now = self._clock()
        begins, self._rewriting = not self._rewriting, True
        if (begins and manifests >= _MANY) or (not begins and now - self._told >= _EVERY):
            self._told = now
            _say(_rewriting(manifests))

    def stop(self) -> None:
        """Nothing: lines are complete."""


def _say_resumed(plan: Plan) -> None:
    done = []
    if plan.resumed:
        samples = sum(part.samples for part in plan.resumed)
        done.append(f"{len(plan.resumed)} partitions with {samples} samples")
    if plan.resumed_shards:
        done.append(f"{plan.resumed_shards} shards of partitions to be built")
    if done:
        _say(f"resuming: {' and '.join(done)} were finished by an earlier run")


def _rewriting(manifests: int) -> str:
    return f"the fields of the version changed: {manifests} manifests to be written anew"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _say(text: str) -> None:
    click.echo(text, err=True)
