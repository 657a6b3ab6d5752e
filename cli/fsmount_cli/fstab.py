"""What mount(8) calls for the type fuse.fsmount.

Either it has a helper of its own, this program by the name of mount.fuse.fsmount, which gets
`SOURCE MOUNTPOINT [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`; or mount.fuse3 calls
`fsmount SOURCE MOUNTPOINT -o OPTIONS`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from getopt import GetoptError, gnu_getopt

import click

HELPER = "mount.fuse.fsmount"
_FLAGS = {
    "allow_other": "--allow-other",
    "no_passthrough": "--no-passthrough",
    "passthrough": "--passthrough",
    "samples": "--samples",
    "xattrs": "--xattrs",
}
_VALUES = frozenset({"driver", "gid", "log", "uid", "umask", "verify"})
_OTHERS = frozenset(  # what is true of every mount of ours, or meant for others
    {
        "async", "atime", "auto", "default_permissions", "defaults", "dev", "diratime", "exec",
        "group", "noatime", "noauto", "nodev", "nodiratime", "noexec", "nofail", "nosuid",
        "nofollow", "nouser", "owner", "relatime", "ro", "rw", "suid", "user", "users", "_netdev",
    }
)  # fmt: skip


def from_mount8(args: Sequence[str], program: str = "fsmount") -> list[str]:
    """`args`, or the arguments of `fsmount mount` that a call by mount(8) means; UsageError.

    `program` is the path that was called.
    """
    if os.path.basename(program) == HELPER:
        return _as_helper(args)
    match list(args):
        case [source, mountpoint, "-o", options] if mountpoint.startswith("/"):
            return _mount(source, mountpoint, [options])
    return list(args)


def _as_helper(args: Sequence[str]) -> list[str]:
    try:
        found, rest = gnu_getopt(list(args), "sfnvN:o:t:")
    except GetoptError as error:
        raise click.UsageError(str(error)) from error
    if len(rest) != 2:
        raise click.UsageError(f"{HELPER} is called by mount(8), with a source and a mountpoint")
    flags = dict(found)
    if "-N" in flags:
        raise click.UsageError("fsmount can't mount in another namespace")
    if "-f" in flags:  # only as if
        raise SystemExit(0)
    texts = [value for flag, value in found if flag == "-o"]
    return _mount(rest[0], rest[1], texts, sloppy="-s" in flags)


def _mount(
    source: str, mountpoint: str, texts: Sequence[str], *, sloppy: bool = False
) -> list[str]:
    """`sloppy`: what is unknown is left out."""
    options = [option for text in texts for option in text.split(",")]
    words = [word for option in options for word in _option(option, sloppy=sloppy)]
    return ["mount", *words, "--", source, mountpoint]


def _option(text: str, *, sloppy: bool) -> list[str]:
    name, equals, value = text.partition("=")
    if name in _VALUES and equals:
        return [f"--{name}", value]
    if text in _FLAGS:
        return [_FLAGS[text]]
    if not text or text in _OTHERS or name.startswith(("x-", "X-", "comment")) or sloppy:
        return []
    raise click.UsageError(f"unknown mount option {text!r}")
