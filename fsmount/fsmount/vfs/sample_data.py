"""What the files below `samples/` hold, for all versions of a mount, within one bound of memory.

A decoded file belongs to no open file: it is in a cache, the least recently read going first, and
is decoded again when somebody reads on. So however many files are open, the bound holds, and no
read fails because of the others. What a file holds follows from its manifest, so one that was
decoded once is opened without being decoded again: the kernel may have all of its pages. What is
kept takes a part of the descriptors that the process may have, however small the files are.
"""

from __future__ import annotations

import resource
from contextlib import closing
from dataclasses import dataclass, field

from fsmount.errors import FormatError, LoadError
from fsmount.model import Digest, Partition, ShardRef, VersionDocument
from fsmount.paths import manifest_path, shard_path
from fsmount.vfs.cache import BoundedCache
from fsmount.vfs.decoder import Decoder
from fsmount.vfs.filesystem import Handle
from fsmount.vfs.form import LARGEST, Form
from fsmount.vfs.layout import SAMPLES
from fsmount.vfs.memory_file import MemoryFile
from fsmount.vfs.reads import BytesHandle, ObjectReader
from fsmount.vfs.sample_list import DESCRIPTORS, SampleList

LIST_BYTES = 256 << 20  # of lists of samples that are kept
FILE_BYTES = 512 << 20  # of decoded files that are kept
_REMEMBERED = 1 << 18  # nodes
_MOST = 1 << 14  # values of a kind that are kept: each takes a descriptor, and a page at least


@dataclass(frozen=True, slots=True)
class Part:
    """A partition, and what stands before its paths in messages; equal if its manifest is."""

    manifest: Digest
    partition: Partition = field(compare=False)
    prefix: str = field(compare=False)

    @classmethod
    def of(cls, partition: Partition, prefix: str) -> Part:
        return cls(partition.manifest.digest, partition, prefix)


@dataclass(frozen=True, slots=True)
class File:
    """One file below `samples/`."""

    part: Part
    row: int
    form: Form


class SampleData:
    """Lists of samples, and decoded files. Safe in any thread."""

    def __init__(
        self, decoder: Decoder, reader: ObjectReader, *, file_bytes: int = FILE_BYTES
    ) -> None:
        self._decoder = decoder
        self._reader = reader
        most = _quarter_of_descriptors()
        self._lists = BoundedCache(
            self._load, lambda found: found.nbytes, LIST_BYTES, most // DESCRIPTORS
        )
        self._files = BoundedCache(self._unpack, lambda found: found.size, file_bytes, most)
        self._good: dict[int, None] = {}  # nodes whose files were decoded, the latest at the end

    def partitions(self, store: str, document: VersionDocument) -> tuple[Partition, ...]:
        """The partitions of a version; raises as `Store.version`."""
        return self._decoder.partitions(store, document)

    def samples(self, part: Part) -> SampleList:
        """The samples of a partition; FormatError, StoreError."""
        return self._lists.get(part)

    def is_loaded(self, part: Part) -> bool:
        """Whether `samples` has its answer in memory."""
        return self._lists.peek(part) is not None

    def size(self, file: File) -> int:
        """The size in bytes of a file, which need not be decoded; FormatError."""
        found = self.samples(file.part)
        match file.form:
            case Form.SAFETENSORS:
                return found.raw_size(file.row)
            case Form.JSON:
                return found.sidecar_size(file.row) or 0
            case Form.NPZ:
                try:
                    return found.npz_size(file.row)
                except FormatError as error:
                    raise FormatError(f"{_about(file, found)}: {error}") from error

    def open(self, node: int, file: File) -> Handle:
        """A handle of the file that is shown as `node`, which is decoded if it never was.

        IntegrityError, FormatError, StoreError, LoadError.
        """
        if file.form is Form.JSON:
            return BytesHandle(node, self.samples(file.part).sidecar(file.row))
        if node not in self._good:
            self._files.get(file)
            self._good[node] = None
            if len(self._good) > _REMEMBERED:
                del self._good[next(iter(self._good))]
        return SampleHandle(node, self, file)

    def is_ready(self, node: int, file: File) -> bool:
        """Whether `open` needs nothing but memory."""
        return self.is_loaded(file.part) and (file.form is Form.JSON or node in self._good)

    def is_decoded(self, file: File) -> bool:
        """Whether what a file holds is in memory."""
        return self._files.peek(file) is not None

    def decoded(self, file: File) -> MemoryFile:
        """What a file holds; raises as `open`."""
        return self._files.get(file)

    def _shard_of(self, file: File) -> tuple[ShardRef, str]:
        found = self.samples(file.part)
        partition, location = file.part.partition, found.location(file.row)
        where = f"{shard_path(partition.id, location.shard)} at byte {location.offset}"
        return partition.shards[location.shard], f"{_about(file, found)} in {where}"

    def _load(self, part: Part) -> SampleList:
        partition = part.partition
        about = part.prefix + manifest_path(partition.id)
        with closing(self._reader.open(partition.manifest, about, 0)) as manifest:
            return self._decoder.samples(manifest, partition)

    def _unpack(self, file: File) -> MemoryFile:
        found, size = self.samples(file.part), self.size(file)
        shard, about = self._shard_of(file)
        if found.raw_size(file.row) > LARGEST:
            raise LoadError(
                f"{about}: a sample of {found.raw_size(file.row)} bytes; those of more than "
                f"{LARGEST >> 20} MiB can be read from their shards only"
            )
        with closing(self._reader.open(shard, about, 0)) as opened:
            made = self._decoder.unpack(opened, found, file.row, file.form)
        if made.size != size:
            raise FormatError(f"{about}: {made.size} bytes instead of the {size} announced")
        return made


@dataclass(slots=True)
class SampleHandle:
    """An open file below `samples/`. It holds nothing: what it reads is taken from the cache."""

    node: int
    data: SampleData
    file: File
    keep_cache: bool = True  # a file's bytes follow from its manifest

    @property
    def descriptor(self) -> int | None:
        return None

    @property
    def ready(self) -> bool:
        return self.data.is_decoded(self.file)

    def read(self, size: int, offset: int) -> bytes:
        return self.data.decoded(self.file).read(size, offset)

    def close(self) -> None:
        pass


def _quarter_of_descriptors() -> int:
    """So many descriptors may be kept of each kind; the rest is for what is open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, soft // 4))


def _about(file: File, found: SampleList) -> str:
    return f"{file.part.prefix}{SAMPLES}: sample {found.key(file.row)!r}"
