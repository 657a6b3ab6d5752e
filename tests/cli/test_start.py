"""Commands are imported when they are called, and what lists them imports none."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from fsmount_cli import main
from fsmount_cli.bench import command as bench
from fsmount_cli.lazy import LazyGroup

HEAVY = {"duckdb", "numpy", "pyarrow", "rich", "torch", "zstandard"}
PROGRAM = """
import sys
from fsmount_cli import main
sys.argv[0] = "fsmount"
try:
    main.main()
except SystemExit as end:
    print(end.code, *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def imported(*args: str, **environment: str) -> set[str]:
    """The top-level modules that the command line `args` imports; it has to succeed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *args],
        check=True, capture_output=True, text=True, timeout=60, env=environment or None,
    )  # fmt: skip
    code, *names = done.stderr.splitlines()[-1].split()
    assert code == "0"
    assert done.stdout
    return set(names)


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["bench", "--help"]])
def test_what_needs_no_numpy_imports_none(args: list[str]) -> None:
    names = imported(*args)
    assert "click" in names
    assert not HEAVY & names


def test_completion_imports_no_command() -> None:
    complete = {"_FSMOUNT_COMPLETE": "bash_complete", "COMP_WORDS": "fsmount m", "COMP_CWORD": "1"}
    assert not HEAVY & imported(**complete)


@pytest.mark.parametrize("group", [main.cli, bench.bench])
def test_every_command_that_is_listed_is_there(group: LazyGroup) -> None:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        assert found.name == name
        assert found.help
    assert group.get_command(context, "none") is None
