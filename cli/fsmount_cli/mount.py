"""`fsmount mount`, `umount` and `mounts`."""

from __future__ import annotations

import click

from fsmount.errors import one_line
from fsmount.mount import ending, lifecycle, records
from fsmount.mount.records import Mounted
from fsmount.mount.request import AUTO, DRIVERS, MountRequest
from fsmount.vfs.reads import Verify
from fsmount_cli.common import parse_store_ref, print_json, print_table

_ID = click.IntRange(0, (1 << 32) - 2)  # the last one means "no id" to the kernel


def _octal(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """Permission bits as chmod takes them."""
    if not text or set(text) - set("01234567") or int(text, 8) > 0o777:
        raise click.BadParameter(f"{text!r} is not an octal number from 0 to 777", ctx, param)
    return int(text, 8)


@click.command()
@click.argument("version", metavar="STORE[@REF]")
@click.argument("mountpoint")
@click.option(
    "--driver",
    type=click.Choice(DRIVERS),
    default=AUTO,
    show_default=True,
    help="What speaks FUSE: kernel is fast and outlives its server, on Linux; fusepy needs "
    "libfuse 2; 'auto' takes the first of them that can be had.",
)
@click.option("--foreground", is_flag=True, help="Serve until SIGTERM, SIGINT or umount.")
@click.option(
    "--verify",
    type=click.Choice([verify.value for verify in Verify]),
    default=Verify.SIZE.value,
    show_default=True,
    help="What is checked when an object is opened: that it is there and of the right size, or its "
    "digest as well, once for each object.",
)
@click.option(
    "--passthrough/--no-passthrough",
    default=True,
    show_default=True,
    help="Let the kernel read the objects itself, where it can.",
)
@click.option(
    "--xattrs",
    is_flag=True,
    help="Show where files come from as extended attributes; makes `ls -l` slower.",
)
@click.option("--samples", is_flag=True, help="List samples/; it can be opened in any case.")
@click.option("--allow-other", is_flag=True, help="Let other users in; default: only you.")
@click.option("--uid", type=_ID, help="Owner of the files; default: you.")
@click.option("--gid", type=_ID, help="Group of the files; default: yours.")
@click.option(
    "--umask",
    callback=_octal,
    default="0",
    show_default=True,
    help="Octal; taken from the modes 0444 of files and 0555 of directories.",
)
@click.option(
    "--log",
    metavar="FILE",
    help="Log of the server in the background; default: a file in "
    "$XDG_STATE_HOME/fsmount or ~/.local/state/fsmount.",
)
def mount(  # noqa: PLR0917 - click passes them by name
    version: str,
    mountpoint: str,
    driver: str,
    foreground: bool,
    verify: str,
    passthrough: bool,
    xattrs: bool,
    samples: bool,
    allow_other: bool,
    uid: int | None,
    gid: int | None,
    umask: int,
    log: str | None,
) -> None:
    """Show a version, or all of STORE, as a read-only directory.

    REF is a tag, 'latest' (resolved once) or sha256:DIGITS, 8 or more digits of a partition table's
    digest. Without REF all versions are shown under versions/, new ones as they appear. MOUNTPOINT
    is an empty directory, or /dev/fd/N, an open descriptor of /dev/fuse that somebody else mounts.
    The command ends when the mount serves.
    """
    if not mountpoint or log == "":
        raise click.UsageError("MOUNTPOINT and --log can't be empty")
    store, ref = parse_store_ref(version)
    request = MountRequest(
        store=store,
        ref=None if ref is None else str(ref),
        mountpoint=mountpoint,
        verify=Verify(verify),
        list_samples=samples,
        allow_other=allow_other,
        uid=uid,
        gid=gid,
        umask=umask,
        log=log,
        driver=driver,
        xattrs=xattrs,
        passthrough=passthrough,
    )
    if foreground:
        lifecycle.serve_in_foreground(request, _note)
    started = lifecycle.mount(request)
    try:
        for note in started.notes:
            _note(note)
        click.echo(f"{one_line(started.shown or store)} on {one_line(mountpoint)}")
    except (OSError, KeyboardInterrupt):  # nobody learns that it is mounted, so it is not to be
        ending.umount(mountpoint, lazy=True)
        raise


@click.command()
@click.argument("mountpoint")
@click.option("--lazy", is_flag=True, help="Detach at once, whoever uses it.")
def umount(mountpoint: str, lazy: bool) -> None:
    """Unmount MOUNTPOINT and wait until its server has ended; one that hangs is killed."""
    note = ending.umount(mountpoint, lazy=lazy)
    if note is not None:
        _note(note)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def mounts(as_json: bool) -> None:
    """List what is mounted, from what and since when (UTC)."""
    found = records.mounted()
    if as_json:
        print_json([one.to_json() for one in found])
        return
    head = ("MOUNTPOINT", "STORE", "VERSION", "DRIVER", "SINCE", "SERVER")
    print_table(head, [_row(one) for one in found], numbers=set())


def _row(mounted: Mounted) -> tuple[str, ...]:
    record = mounted.record
    shown = record.tag or (f"sha256:{record.table[:12]}" if record.table else "(all)")
    server = "dead" if mounted.dead else str(record.server_pid or "?")
    return (
        record.mountpoint,
        record.store,
        shown,
        record.driver or "?",
        record.since or "?",
        server,
    )


def _note(text: str) -> None:
    click.echo(f"note: {one_line(text)}", err=True)
