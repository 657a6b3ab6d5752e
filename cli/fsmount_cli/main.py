"""The command `fsmount`: its subcommands, and what becomes of their errors.

Results go to stdout, log and errors to stderr. Exit codes: 0 done; 1 one `error:` line; 2 usage;
130 interrupted. An error that is neither ours nor the system's is a bug and shows its traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

import click

from fsmount.errors import FsmountError, one_line
from fsmount_cli import interrupts
from fsmount_cli.fstab import from_mount8
from fsmount_cli.lazy import LazyCommand, LazyGroup
from fsmount_cli.streams import drop_stdout, drop_stdout_if_full, open_closed

_INTERRUPTED = 130
_ENVIRONMENT = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EIO,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
        errno.ESTALE,
    }
)
_WITHOUT_A_PATH = frozenset({errno.EDQUOT, errno.EIO, errno.ENOSPC})  # of an open stream


_COMMANDS = {
    "bench": LazyCommand("bench.command", "bench", "Measure how fast things are on this machine."),
    "demo": LazyCommand("demo.command", "demo", "Pack, mount and train on handwritten digits."),
    "mount": LazyCommand("mount", "mount", "Show a version, or all, as a read-only directory."),
    "mounts": LazyCommand("mount", "mounts", "List what is mounted, from what and since when."),
    "pack": LazyCommand("pack", "command", "Pack a tree of samples and publish it as a version."),
    "show": LazyCommand("versions", "show", "Show one version and its partitions."),
    "umount": LazyCommand("mount", "umount", "Unmount, and wait until the server has ended."),
    "versions": LazyCommand("versions", "versions", "List the versions in a store, oldest first."),
}


@click.group(
    cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="fsmount", message="%(prog)s %(version)s")
def cli() -> None:
    """Training sets as versioned, verified, mountable directories."""


def main() -> None:
    """Run the command line of this process and exit. SIGTERM is taken as an interrupt."""
    interrupts.install()
    open_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a name that the locale can't show is no error
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run the command `args` and return its exit code; a bug passes as an exception."""
    try:
        return _invoke(args)
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except BrokenPipeError:
        drop_stdout()
        return 1
    except FsmountError as error:
        return _fail(str(error), error.exit_code, getattr(error, "__notes__", ()))
    except OSError as error:
        if _is_environment(error):
            return _fail(_describe(error), 1)
        if _is_nowhere():
            return _fail("the working directory is gone: change to one that exists", 1)
        raise


def _invoke(args: Sequence[str]) -> int:
    """Run the command and return its exit code: what it returns if that is an int, else 0."""
    try:
        words = from_mount8(args, sys.argv[0])
        result = cli.main(words, prog_name="fsmount", standalone_mode=False)
    except click.UsageError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    sys.stdout.flush()
    return result if isinstance(result, int) else 0


def _fail(text: str, code: int, notes: Sequence[str] = ()) -> int:
    """Print one line that begins with `error:`, and each note in an indented line below."""
    for line in (f"error: {text}", *(f"  {note}" for note in notes)):
        print(one_line(line), file=sys.stderr)
    drop_stdout_if_full()
    return code


def _is_environment(error: OSError) -> bool:
    """Whether the user's files or disks are to blame, and not this program."""
    if error.filename is None:
        return error.errno in _WITHOUT_A_PATH
    return error.errno in _ENVIRONMENT


def _describe(error: OSError) -> str:
    paths = [
        os.fsdecode(p) for p in (error.filename, error.filename2) if isinstance(p, str | bytes)
    ]
    return ": ".join([*paths, error.strerror or str(error)])


def _is_nowhere() -> bool:
    """Whether the working directory was removed: no relative path means anything then."""
    try:
        os.getcwd()
    except OSError:
        return True
    return False


if __name__ == "__main__":
    main()
