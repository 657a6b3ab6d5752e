"""Commands that are imported when they are called.

The command line answers at once: listing commands, completing a name and telling the version import
none of them, and a command imports no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command is, and the line that lists it."""

    module: str  # below this package
    name: str
    help: str

    def load(self) -> click.Command:
        """Import the command."""
        found: click.Command = getattr(import_module(f"fsmount_cli.{self.module}"), self.name)
        return found


class LazyGroup(click.Group):
    """A group of commands that are imported when they are called."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **more: Any) -> None:
        super().__init__(*args, **more)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands, sorted."""
        return sorted(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, imported; None if there is none."""
        found = self._lazy.get(cmd_name)
        return super().get_command(ctx, cmd_name) if found is None else found.load()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands' names and lines, as click does for commands that are there."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._lazy[name].help) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands, or this group's options, that begin with `incomplete`."""
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        commands = [CompletionItem(name, help=self._lazy[name].help) for name in names]
        return commands + click.Command.shell_complete(self, ctx, incomplete)
