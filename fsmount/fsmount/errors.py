"""Every error that fsmount raises on purpose.

FsmountError                    exit 1, EIO
├── InvalidNameError            EINVAL   a tag, key, partition id or reference that is no valid name
├── SourceError                 EIO      the source can't be packed as it is; names file and part
│   ├── SidecarError                     a sidecar that is not one JSON object
│   ├── SourceChangedError               a source file changed while it was packed
│   └── PartitionError                   a rule that leaves samples out, or ids that clash
├── FormatError                 EIO      bytes that are not what their format says
│   └── IntegrityError                   bytes that differ from their digest or checksum
├── StoreError                  EIO
│   ├── NotAStoreError          EIO      no store at this path, or one of another format
│   ├── VersionNotFoundError    ENOENT
│   ├── VersionExistsError      EEXIST   the tag is taken by other content, or was pruned
│   ├── LatestMovedError        EAGAIN   `latest` moved while a version was published
│   ├── KeysetExistsError       EEXIST
│   ├── ObjectMissingError      EIO
│   └── StoreWriteError         EIO      the store can't be written (full, read-only, no rights)
├── PackError                   EIO
│   ├── RuleMismatchError                the base has another partition rule or namespace
│   └── PackWorkerError                  a worker process died
├── MountError                  EIO      mounting or unmounting failed
├── PlanError                   EINVAL   a selection, or loader options, that can't be planned
│   ├── StateMismatchError               a saved state belongs to other rows or options
│   └── RankMismatchError                ranks disagree on rows or options
└── LoadError                   EIO      a sample can't be delivered

`IntegrityError` is raised wherever bytes are checked: in the store, under a mount, in the loader.
An error's text is one printable line that names what it is about, whatever names a store, a source
or an archive has brought into it; the CLI prints it behind `error: `.
"""

from __future__ import annotations

import errno
from typing import ClassVar

_LONGEST = 4000  # characters of an error's text


def one_line(text: str) -> str:
    """`text` with everything escaped that would break the line or steer a terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def shortened(text: str, longest: int = 200) -> str:
    """`text`, with its middle left out where it has over `longest` characters."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


class FsmountError(Exception):
    """Base of all; `errno` is what a file operation answers, `exit_code` what a command returns."""

    errno: ClassVar[int] = errno.EIO
    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        return one_line(shortened(super().__str__(), _LONGEST))


class InvalidNameError(FsmountError):
    """A tag, key, partition id or reference that is not a valid name."""

    errno = errno.EINVAL


class SourceError(FsmountError):
    """The source can't be packed as it is."""


class SidecarError(SourceError):
    """A sidecar that is not one JSON object, or that can't become manifest columns."""


class SourceChangedError(SourceError):
    """A source file changed while it was packed."""


class PartitionError(SourceError):
    """A partition rule that leaves samples out, or partition ids that clash in a mounted tree."""


class FormatError(FsmountError):
    """Bytes that are not what their format says."""


class IntegrityError(FormatError):
    """Bytes that differ from their digest or checksum."""


class StoreError(FsmountError):
    """Something about a store."""


class NotAStoreError(StoreError):
    """No store at this path, or one of another format."""


class VersionNotFoundError(StoreError):
    """No version by this reference."""

    errno = errno.ENOENT


class VersionExistsError(StoreError):
    """The tag is taken by other content, or was pruned and is never used again."""

    errno = errno.EEXIST


class LatestMovedError(StoreError):
    """`latest` moved to another version while this one was published."""

    errno = errno.EAGAIN


class KeysetExistsError(StoreError):
    """A key-set of this name exists with other content."""

    errno = errno.EEXIST


class ObjectMissingError(StoreError):
    """An object that a version needs is not in the store."""


class StoreWriteError(StoreError):
    """The store can't be written: full, read-only or without rights."""


class PackError(FsmountError):
    """Packing failed."""


class RuleMismatchError(PackError):
    """The base version has another partition rule or source namespace."""


class PackWorkerError(PackError):
    """A worker process died while it built partitions."""


class MountError(FsmountError):
    """Mounting or unmounting failed."""


class PlanError(FsmountError):
    """A selection, or a set of loader options, that can't be planned."""

    errno = errno.EINVAL


class StateMismatchError(PlanError):
    """A saved state belongs to other rows or other order options."""


class RankMismatchError(PlanError):
    """Ranks disagree on the rows or options they are about to load."""


class LoadError(FsmountError):
    """A sample can't be delivered."""
