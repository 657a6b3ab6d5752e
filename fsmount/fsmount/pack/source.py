"""Sources: where samples come from. So far a tree of `.npz` files with `.json` sidecars.

A source lists its samples once, cheaply, by name and stat; a worker then reads them one at a time.
Between the two, and while a file is read, the file must not change.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import astuple, dataclass
from io import BytesIO

from fsmount.errors import IntegrityError, InvalidNameError, SidecarError, SourceError
from fsmount.formats import manifest
from fsmount.formats.fields import parse_sidecar
from fsmount.model import check_key
from fsmount.pack.faults import Faults
from fsmount.pack.files import FileStat, Links, Walk, open_unchanged
from fsmount.pack.npz import Arrays, read_npz

_SAMPLE = ".npz"
_SIDECAR = ".json"
_OVERHEAD = 32 << 20  # bytes of an archive beside its arrays: at most two directories of members
_WHOLE = 16 << 20  # bytes up to which an archive is read in one go
_SIDECAR_MAX = 64 << 20  # bytes
MAX_SAMPLE_BYTES = 2 << 30  # of a sample's arrays, unless told otherwise


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
    misnamed: str | None  # a file that would be a sample if its suffix were in lower case


@dataclass(frozen=True, slots=True)
class NpzTree:
    """A directory of `.npz` files, each with an optional `<stem>.json`."""

    root: str  # a real path
    links: Links = Links.FOLLOW

    def scan(self, skip: str | None = None) -> Listing:
        """List the samples below the root, except below the directory `skip`.

        Raises SourceError for a root that is no directory, a directory that can't be listed, a loop
        of links; and, with a note for each, for files that can't be used and names that can't be
        keys.
        """
        if not os.path.isdir(self.root):
            raise SourceError(f"{self.root}: not a directory")
        faults: list[SourceError] = []
        files = dict(Walk(self.root, (_SAMPLE, _SIDECAR), self.links, skip, faults).files())
        stems = sorted(
            (path.removesuffix(_SAMPLE) for path in files if path.endswith(_SAMPLE)),
            key=os.fsencode,
        )
        stems = [stem for stem in stems if stem and not stem.endswith("/")]
        faults += [fault for stem in stems if (fault := self._fault_of_name(stem))]
        Faults.of(faults).raise_any()
        samples = tuple(
            SourceSample(stem, files[stem + _SAMPLE], files.get(stem + _SIDECAR)) for stem in stems
        )
        used = len(samples) + sum(sample.sidecar is not None for sample in samples)
        misnamed = (p for p in files if not p.endswith(_SAMPLE) and p.lower().endswith(_SAMPLE))
        return Listing(samples, len(files) - used, next(misnamed, None))

    def read_arrays(self, sample: SourceSample, limit: int = MAX_SAMPLE_BYTES) -> Arrays:
        """The arrays of `sample`, which have `limit` bytes at most.

        Raises SourceError, SourceChangedError or IntegrityError, which name the file.
        """
        path, size = self.path(sample.key), sample.file.size
        if size > limit + _OVERHEAD:
            raise SourceError(
                f"{path}: the file has {size:,} bytes, more than the {limit:,} that a sample may "
                "have (--max-sample-size)"
            )
        with open_unchanged(path, sample.file) as file:
            try:
                return read_npz(file if size > _WHOLE else BytesIO(file.read()), limit)
            except (SourceError, IntegrityError) as error:
                raise type(error)(f"{path}: {error}") from error

    def read_sidecar(self, sample: SourceSample) -> bytes | None:
        """The sidecar's bytes, or None; SidecarError or SourceChangedError naming the file."""
        if sample.sidecar is None:
            return None
        path = self.sidecar_path(sample.key)
        if sample.sidecar.size > _SIDECAR_MAX:
            raise SidecarError(
                f"{path}: the file has {sample.sidecar.size:,} bytes, more than the "
                f"{_SIDECAR_MAX:,} that a sidecar may have: store what is large as arrays"
            )
        with open_unchanged(path, sample.sidecar) as file:
            data = file.read()
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

    def _fault_of_name(self, stem: str) -> SourceError | None:
        try:
            check_key(stem)
        except InvalidNameError as error:
            return SourceError(
                f"{self.path(stem)}: this name can't be a sample's key: {error}; rename the file "
                "or directory (convmv turns the names of a tree into UTF-8)"
            )
        return None


def fingerprint(samples: tuple[SourceSample, ...]) -> str:
    """Name a listing: keys, sizes, times and inodes of a partition's files, in 64 hex digits."""
    digest = hashlib.sha256(b"fsmount source fingerprint 2\n")
    for sample in samples:
        numbers = [None if f is None else astuple(f) for f in (sample.file, sample.sidecar)]
        digest.update(repr((sample.key, *numbers)).encode())
    return digest.hexdigest()
