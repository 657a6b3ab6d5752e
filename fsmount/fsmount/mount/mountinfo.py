"""What the kernel says is mounted: /proc/self/mountinfo (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

FSTYPE = "fuse.fsmount"
_PATH = "/proc/self/mountinfo"
_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class KernelMount:
    """One line of mountinfo."""

    number: int  # of this mount
    parent: int  # of the mount that it lies on
    device: str  # "major:minor", the st_dev of all its files
    mountpoint: str
    fstype: str
    source: str


def parse(text: bytes) -> list[KernelMount]:
    """The mounts in `text`, each behind those that it covers.

    A line ends at its newline alone: a path may have any other byte in it.
    """
    found = []
    for line in text.split(b"\n")[:-1]:
        fields = line.split(b" ")
        behind = fields.index(b"-", 6)
        found.append(
            KernelMount(
                number=int(fields[0]),
                parent=int(fields[1]),
                device=fields[2].decode(),
                mountpoint=unescape(fields[4]),
                fstype=os.fsdecode(fields[behind + 1]),
                source=unescape(fields[behind + 2]),
            )
        )
    return found


def unescape(field: bytes) -> str:
    r"""A path as it is: space, tab, newline and backslash are written `\040` and so on."""
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))


def all_mounts() -> list[KernelMount]:
    """All mounts that this process sees, the uppermost last."""
    with open(_PATH, "rb") as file:
        return parse(file.read())


def mount_at(mountpoint: str) -> KernelMount | None:
    """The uppermost mount on the absolute path `mountpoint`, None if there is none."""
    found = [mount for mount in all_mounts() if mount.mountpoint == mountpoint]
    return found[-1] if found else None


def lying_on(mount: KernelMount) -> list[KernelMount]:
    """The mounts on `mount` itself or on directories in it, the uppermost last."""
    return [one for one in all_mounts() if one.parent == mount.number]


def is_mounted_anywhere(device: str) -> bool:
    """Whether a file system is mounted at all, also in containers, as far as /proc shows them."""
    seen = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            space = os.readlink(f"/proc/{name}/ns/mnt")
            if space in seen:
                continue
            with open(f"/proc/{name}/mountinfo", "rb") as file:
                found = parse(file.read())
        except OSError:  # it has ended, or is somebody else's
            continue
        seen.add(space)
        if any(mount.device == device for mount in found):
            return True
    return False
