"""The steps of `fsmount demo`. Each is a command that is shown, run and must succeed."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import click
import duckdb

from fsmount.errors import FsmountError

_QUERY = """SELECT split, count(*) AS samples, round(avg(label), 2) AS mean_label
FROM read_parquet('{}/manifests/*.parquet') GROUP BY split ORDER BY split"""


@click.command()
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Work in DIR, which must not exist, and leave it there.  [default: a temporary directory]",
)
def demo(keep: Path | None) -> None:
    """Pack, mount, inspect and train on 1,797 handwritten digits.

    Takes about a minute. Needs the extra `fsmount[demo]` and FUSE; everything it mounts is
    unmounted again.
    """
    for module in ("sklearn", "torch"):
        if find_spec(module) is None:
            raise FsmountError(
                f"no {module} here: install the extra with pip install 'fsmount[demo]'"
            )
    with _workplace(keep) as place:
        _run_all(place)


def _run_all(place: Path) -> None:
    from fsmount_cli.demo.digits import change_tree, write_tree  # noqa: PLC0415 - optional extra

    source, store, v1, v2 = (str(place / name) for name in ("digits", "store", "v1", "v2"))
    os.mkdir(v1)
    os.mkdir(v2)
    _say(f"A tree of {write_tree(place / 'digits')} samples: an .npz and a .json each")
    _fsmount("pack", source, store, "--tag", "v1", "--message", "as collected")
    with _mounted(f"{store}@v1", v1):
        _say("Standard tools see plain files")
        _command("ls", v1, f"{v1}/shards")
        _command("tar", "tf", f"{v1}/shards/digits00/000000.tar", lines=3)
        _command("sha256sum", "--check", "--quiet", "SHA256SUMS", cwd=v1)
        _query(v1)
        _say("Train from the mounted path on two ranks")
        _train(v1)
        before = _first_epoch(v1)
        _say("The source changes: a new directory, a sample withdrawn, a note in a sidecar")
        change_tree(place / "digits")
        _fsmount("pack", source, store, "--tag", "v2", "--message", "shifted digits added")
        _fsmount("versions", store)
        with _mounted(f"{store}@v2", v2):
            _fsmount("mounts")
            _query(v2)
            if _first_epoch(v1) != before:
                raise FsmountError("the batches of v1 changed")
            _say(f"v1's batches did not change: {before[:16]} before and after")


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="fsmount-demo-") as directory:
            yield Path(directory)


@contextmanager
def _mounted(what: str, mountpoint: str) -> Iterator[None]:
    _fsmount("mount", what, mountpoint)
    try:
        yield
    finally:
        _fsmount("umount", mountpoint)


def _train(mounted: str) -> None:
    _command(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--log-dir", f"{os.path.dirname(mounted)}/log", "-m", "fsmount_cli.demo.train", mounted),
        shown=f"torchrun --standalone --nproc-per-node 2 -m fsmount_cli.demo.train {mounted}",
    )


def _first_epoch(mounted: str) -> str:
    """A digest of all batches of the first training epoch."""
    from fsmount_loader import ShardDataset  # noqa: PLC0415 - optional extra

    digest = hashlib.sha256()
    for batch in ShardDataset(mounted, batch_size=64, seed=0, rank=0, world_size=1):
        for name in sorted(batch):
            digest.update(name.encode() + batch[name].numpy().tobytes())
    return digest.hexdigest()


def _query(mounted: str) -> None:
    query = _QUERY.format(mounted)
    click.echo(f"duckdb> {query}")
    click.echo(str(duckdb.sql(query)))


def _fsmount(*args: str) -> None:
    quiet = ("--quiet",) if args[0] == "pack" else ()
    _command(
        *(sys.executable, "-m", "fsmount_cli.main", *args, *quiet),
        shown=shlex.join(("fsmount", *args)),
    )


def _command(
    *args: str, shown: str | None = None, cwd: str | None = None, lines: int | None = None
) -> None:
    """Show a command, run it, show its output (or its first `lines`), insist that it succeeds."""
    click.echo(f"$ {shown or shlex.join(args)}" + (f" | head -n {lines}" if lines else ""))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    stdout = None if lines is None else subprocess.PIPE
    result = subprocess.run(args, cwd=cwd, env=environment, stdout=stdout, text=True, check=False)
    if result.returncode:
        raise FsmountError(f"{shown or shlex.join(args)} failed with exit code {result.returncode}")
    if lines is not None:
        click.echo("".join(result.stdout.splitlines(keepends=True)[:lines]), nl=False)


def _say(text: str) -> None:
    click.secho(f"\n# {text}", bold=True)
