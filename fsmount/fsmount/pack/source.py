"""Sources: where samples come from. So far a tree of `.npz` files with `.json` sidecars.

A source lists its samples once, cheaply, by name and stat; a worker then reads them one at a time.
Between the two, and while a file is read, the file must not change.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from fsmount.errors import InvalidNameError, SidecarError, SourceChangedError, SourceError
from fsmount.formats import manifest
from fsmount.formats.fields import parse_sidecar
from fsmount.model import check_key
from fsmount.pack.npz import Arrays, read_npz

_SAMPLE = ".npz"
_SIDECAR = ".json"


@dataclass(frozen=True, slots=True)
class FileStat:
    """What tells a file that was read before from one that wasn't; time in nanoseconds."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileStat:
        """The part of `found` that counts."""
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


@dataclass(frozen=True, slots=True)
class SourceSample:
    """A sample as a listing has it."""

    key: str
    file: FileStat
    sidecar: FileStat | None


@dataclass(frozen=True, slots=True)
class Listing:
    """All samples of a source, sorted by key, and the number of files that are none."""

    samples: tuple[SourceSample, ...]
    ignored: int


@dataclass(frozen=True, slots=True)
class NpzTree:
    """A directory of `.npz` files, each with an optional `<stem>.json`; links are followed."""

    root: str

    def scan(self, skip: str | None = None) -> Listing:
        """List the samples below the root, except below the directory `skip`.

        Raises SourceError for a root that is no directory, a loop of links, an entry that can't be
        looked at, or a name that can't be a key.
        """
        if not os.path.isdir(self.root):
            raise SourceError(f"{self.root}: not a directory")
        files = dict(_walk(self.root, "", skip, ()))
        stems = sorted(
            (path.removesuffix(_SAMPLE) for path in files if path.endswith(_SAMPLE)),
            key=os.fsencode,
        )
        samples = tuple(
            SourceSample(self._key(stem), files[stem + _SAMPLE], files.get(stem + _SIDECAR))
            for stem in stems
            if stem and not stem.endswith("/")
        )
        used = len(samples) + sum(sample.sidecar is not None for sample in samples)
        return Listing(samples, len(files) - used)

    def read_arrays(self, sample: SourceSample) -> Arrays:
        """The arrays of `sample`; SourceError or SourceChangedError naming the file otherwise."""
        path = self.path(sample.key)
        data = _read_unchanged(path, sample.file)
        try:
            return read_npz(data)
        except SourceError as error:
            raise SourceError(f"{path}: {error}") from error

    def read_sidecar(self, sample: SourceSample) -> bytes | None:
        """The sidecar's bytes, or None; SidecarError or SourceChangedError naming the file."""
        if sample.sidecar is None:
            return None
        path = self.sidecar_path(sample.key)
        data = _read_unchanged(path, sample.sidecar)
        try:
            manifest.check_fields(parse_sidecar(data), ())
        except SidecarError as error:
            raise SidecarError(f"{path}: {error}") from error
        return data

    def path(self, key: str) -> str:
        """The path of a sample's archive."""
        return os.path.join(self.root, key + _SAMPLE)

    def sidecar_path(self, key: str) -> str:
        """The path of a sample's sidecar."""
        return os.path.join(self.root, key + _SIDECAR)

    def _key(self, stem: str) -> str:
        try:
            return check_key(stem)
        except InvalidNameError as error:
            raise SourceError(f"{self.root}: a file name can't be a key: {error}") from error


def fingerprint(samples: tuple[SourceSample, ...]) -> str:
    """Name a listing: keys, sizes, times and inodes of a partition's files, in 64 hex digits."""
    digest = hashlib.sha256(b"fsmount source fingerprint 1\n")
    for sample in samples:
        digest.update(repr((sample.key, _numbers(sample.file), _numbers(sample.sidecar))).encode())
    return digest.hexdigest()


def _numbers(file: FileStat | None) -> tuple[int, int, int] | None:
    return None if file is None else (file.size, file.mtime_ns, file.inode)


def _walk(
    root: str, directory: str, skip: str | None, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, FileStat]]:
    """All files below `root/directory`: relative path, stat. `above`: ids of the directories."""
    path = os.path.join(root, directory)
    try:
        here = os.stat(path)
        if (here.st_dev, here.st_ino) in above:
            raise SourceError(f"{path}: a link to a directory above it")
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                relative = os.path.join(directory, entry.name)
                if not entry.is_dir():
                    if found := _stat(entry):
                        yield relative, found
                elif skip is None or os.path.realpath(entry.path) != skip:
                    ids = (*above, (here.st_dev, here.st_ino))
                    yield from _walk(root, relative, skip, ids)
    except OSError as error:
        raise SourceError(f"{error.filename or path}: {error.strerror}") from error


def _stat(entry: os.DirEntry[str]) -> FileStat | None:
    """The stat of a regular file; None for anything else that could not be a sample or sidecar."""
    ours = entry.name.endswith((_SAMPLE, _SIDECAR))
    try:
        found = entry.stat()
    except OSError:
        if ours:
            raise
        return None
    if stat.S_ISREG(found.st_mode):
        return FileStat.of(found)
    if ours:
        raise SourceError(f"{entry.path}: not a regular file")
    return None


def _read_unchanged(path: str, listed: FileStat) -> bytes:
    try:
        with open(path, "rb") as file:
            before = FileStat.of(os.fstat(file.fileno()))
            data = file.read()
            after = FileStat.of(os.fstat(file.fileno()))
    except FileNotFoundError as error:
        raise SourceChangedError(f"{path}: vanished while it was packed") from error
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error
    if not before == after == listed or len(data) != listed.size:
        raise SourceChangedError(f"{path}: changed while it was packed")
    return data
