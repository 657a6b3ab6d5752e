"""What mount(8) calls for the type fuse.fsmount: `fsmount SOURCE MOUNTPOINT -o OPTIONS`."""

from __future__ import annotations

from collections.abc import Sequence

import click

_FLAGS = {"allow_other": "--allow-other", "samples": "--samples"}
_VALUES = frozenset({"driver", "gid", "log", "uid", "umask", "verify"})
_OTHERS = frozenset(  # what is true of every mount of ours, or meant for others
    {
        "async", "atime", "auto", "default_permissions", "defaults", "dev", "diratime", "exec",
        "group", "noatime", "noauto", "nodev", "nodiratime", "noexec", "nofail", "nosuid",
        "nouser", "owner", "relatime", "ro", "rw", "suid", "user", "users", "_netdev",
    }
)  # fmt: skip


def from_mount8(args: Sequence[str]) -> list[str]:
    """`args`, or the arguments of `fsmount mount` that a call by mount(8) means; UsageError."""
    match list(args):
        case [source, mountpoint, "-o", options] if not source.startswith("-"):
            words = [word for text in options.split(",") for word in _option(text)]
            return ["mount", *words, "--", source, mountpoint]
    return list(args)


def _option(text: str) -> list[str]:
    name, equals, value = text.partition("=")
    if name in _VALUES and equals:
        return [f"--{name}", value]
    if text in _FLAGS:
        return [_FLAGS[text]]
    if not text or text in _OTHERS or name.startswith(("x-", "comment")):
        return []
    raise click.UsageError(f"unknown mount option {text!r}")
