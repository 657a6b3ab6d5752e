"""The files of a source: listed by name and stat, and read only as they were listed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import BinaryIO

from fsmount.errors import SourceChangedError, SourceError


class Links(Enum):
    """What becomes of symbolic links in a source."""

    FOLLOW = "follow"  # wherever they lead
    INSIDE = "inside"  # those that lead out of the source are errors
    REFUSE = "refuse"  # each is an error


@dataclass(frozen=True, slots=True)
class FileStat:
    """What tells a file that was read before from one that wasn't; times in nanoseconds.

    The ctime counts because a program can put an mtime back, and tar, cp and rsync do.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileStat:
        """The part of `found` that counts."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk through the files below the real path `root`, where those with `suffixes` count.

    Nothing below the real path `skip` is looked at. What is wrong with a single file that counts,
    or a link, goes to `faults`.
    """

    root: str
    suffixes: tuple[str, ...]
    links: Links
    skip: str | None
    faults: list[SourceError]

    def files(
        self, directory: str = "", above: tuple[tuple[int, int], ...] = ()
    ) -> Iterator[tuple[str, FileStat]]:
        """All regular files below `directory`: relative path and stat.

        `above` has the ids of the directories above it. Raises SourceError for a directory that
        can't be listed, and for a loop of links.
        """
        path = os.path.join(self.root, directory)
        try:
            here = os.stat(path)
            if (here.st_dev, here.st_ino) in above:
                raise SourceError(f"{path}: a link to a directory above it")
            ids = (*above, (here.st_dev, here.st_ino))
            with os.scandir(path) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    relative = os.path.join(directory, entry.name)
                    if not entry.is_dir():
                        if found := self._stat(entry):
                            yield relative, found
                    elif self._is_entered(entry):
                        yield from self.files(relative, ids)
        except OSError as error:
            raise SourceError(f"{error.filename or path}: {error.strerror}") from error

    def _is_entered(self, entry: os.DirEntry[str]) -> bool:
        if self.skip is not None and os.path.realpath(entry.path) == self.skip:
            return False
        return self._is_allowed(entry)

    def _stat(self, entry: os.DirEntry[str]) -> FileStat | None:
        """The stat of a regular file; None for anything else, a fault if it should be one."""
        counts = entry.name.endswith(self.suffixes)
        try:
            found = entry.stat()
        except OSError as error:
            if counts:
                self.faults.append(SourceError(f"{entry.path}: {error.strerror}"))
            return None
        if stat.S_ISREG(found.st_mode):
            return FileStat.of(found) if not counts or self._is_allowed(entry) else None
        if counts:
            self.faults.append(SourceError(f"{entry.path}: not a regular file"))
        return None

    def _is_allowed(self, entry: os.DirEntry[str]) -> bool:
        """Whether it may be used: it is no symbolic link, or one that `links` allows."""
        if self.links is Links.FOLLOW or not entry.is_symlink():
            return True
        target = os.path.realpath(entry.path)
        if self.links is Links.INSIDE and os.path.commonpath([target, self.root]) == self.root:
            return True
        what = "a symbolic link"
        if self.links is Links.INSIDE:
            what = f"a link out of the source, to {target}"
        self.faults.append(
            SourceError(f"{entry.path}: {what}, which --links {self.links.value} does not allow")
        )
        return False


@contextmanager
def open_unchanged(path: str, listed: FileStat) -> Iterator[BinaryIO]:
    """The file at `path`, which must be as it was `listed` before and after the block.

    A FIFO or a device that has taken its place does not block. Raises SourceChangedError, also in
    place of a SourceError of the block; SourceError where the file can't be read.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check_unchanged(path, file, listed)
            try:
                yield file
            finally:
                _check_unchanged(path, file, listed)
    except FileNotFoundError as error:
        raise SourceChangedError(f"{path}: vanished while it was packed") from error
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error


def _check_unchanged(path: str, file: BinaryIO, listed: FileStat) -> None:
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or FileStat.of(found) != listed:
        raise SourceChangedError(f"{path}: changed while it was packed; pack again")
