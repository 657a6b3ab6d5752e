"""`samples/`: each sample as plain files, for scripts that read one file per sample.

`samples/<partition id>/<rest of the key>` with `.safetensors` (the decoded member), `.npz` (rebuilt
from it) and, where the sample has a sidecar, `.json` (the sidecar, verbatim). Names are resolved
through the manifests, which are loaded when first needed. A payload is checked when it is opened.

A file's place is made of the sample's number in the version (its row in the manifest, behind the
samples of all partitions before it) and the kind of file. A directory's place is made of the number
of a sample in it and its depth. So both are the same after a restart.

Where a directory has the name of one of the files, the directory is shown. Where two samples want
one path, opening it is an error that names both.
"""

from __future__ import annotations

import errno
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate

from fsmount.errors import FormatError, FsmountError, IntegrityError
from fsmount.formats import sample as samples
from fsmount.formats.manifest import Row
from fsmount.model import DepthRule, DirectoryRule, Partition, RegexRule, Version
from fsmount.paths import manifest_path, shard_path
from fsmount.vfs import npz, sample_index
from fsmount.vfs.attrs import UNKNOWN_LINKS, Attrs
from fsmount.vfs.cache import BoundedCache
from fsmount.vfs.filesystem import (
    DirEntry,
    Entry,
    Handle,
    Kind,
    absent,
    node_number,
    not_a_directory,
    os_error,
    slot_and_place,
    stale,
)
from fsmount.vfs.layout import SAMPLES
from fsmount.vfs.reads import BytesHandle, ObjectReader
from fsmount.vfs.sample_index import SampleIndex

INDEX_BYTES = 256 << 20  # of manifests that are kept
_LISTED_NAMES = 1 << 20  # of listings that are kept
_KINDS = 4  # places a sample; one is spare
_DEPTHS = 2048  # more components than a path can have


class Form(IntEnum):
    """The forms a sample is shown in."""

    SAFETENSORS = 0
    NPZ = 1
    JSON = 2

    @property
    def suffix(self) -> str:
        return f".{self.name.lower()}"


_FORMS = {form.suffix: form for form in Form}
_Names = list[tuple[str, int, Kind]]


class SampleFiles:
    """The tree below `samples`, in two slots: one of files, one of directories (root: place 0)."""

    def __init__(
        self,
        version: Version,
        *,
        file_slot: int,
        directory_slot: int,
        attrs: Attrs,
        reader: ObjectReader,
        prefix: str,
    ) -> None:
        self._partitions = version.partitions
        self._rule = version.document.rule
        self._ids = [part.id for part in version.partitions]
        self._starts = [0, *accumulate(part.samples for part in version.partitions)]
        self._file_slot = file_slot
        self._directory_slot = directory_slot
        self._attrs = attrs
        self._reader = reader
        self._prefix = prefix
        self._indexes = BoundedCache(self._load, lambda index: index.nbytes, INDEX_BYTES)
        self._listings: BoundedCache[int, _Names] = BoundedCache(self._list, len, _LISTED_NAMES)
        self.root = node_number(directory_slot, 0)

    def lookup(self, parent: int, name: str) -> Entry:
        directory = self._directory_path(parent)
        path = f"{directory}/{name}" if directory else name
        found = self._find_directory(path)
        if found is not None:
            return self._attrs.directory(found, UNKNOWN_LINKS)
        return self.getattr(self._find_file(directory, name))

    def getattr(self, node: int) -> Entry:
        if self._is_directory(node):
            self._directory_path(node)
            return self._attrs.directory(node, UNKNOWN_LINKS)
        number, form = self._sample(node)
        part, row = self._locate(number, node)
        return self._attrs.file(node, self._size(part, row, form))

    def parent(self, node: int) -> int:
        found = self._find_directory(self._directory_path(node).rpartition("/")[0])
        if found is None:
            raise stale(node)
        return found

    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]:
        self._directory_path(node)
        names = self._listings.get(node)
        return (
            DirEntry(name, child, kind, at)
            for at, (name, child, kind) in enumerate(names[offset:], offset + 1)
        )

    def open(self, node: int) -> Handle:
        if self._is_directory(node):
            raise os_error(errno.EISDIR, self._directory_path(node))
        number, form = self._sample(node)
        part, place = self._locate(number, node)
        row = self._indexes.get(part).row(place)
        about = f"{self._prefix}{SAMPLES}: sample {row.key!r}"
        data = self._bytes(part, row, form, about)
        if len(data) != self._size(part, place, form):
            raise FormatError(f"{about}: {len(data)} bytes of {form.suffix}, other than announced")
        return BytesHandle(node, data)

    def _bytes(self, part: int, row: Row, form: Form, about: str) -> bytes:
        if form is Form.JSON:
            return row.sidecar or b""
        member = self._member(self._partitions[part], row, about)
        if form is Form.SAFETENSORS:
            return member
        return npz.build(samples.decode(member), row.texts)

    def _member(self, part: Partition, row: Row, about: str) -> bytes:
        about = f"{about} in {shard_path(part.id, row.shard)} at byte {row.offset}"
        shard = part.shards[row.shard]
        payload = self._reader.read_range(shard, row.size, row.offset, about)
        if samples.checksum(payload) != row.checksum:
            raise IntegrityError(f"{about}: object {shard.digest} is damaged: wrong checksum")
        try:
            return samples.decompress(payload, row.raw_size)
        except FormatError as error:
            raise IntegrityError(f"{about}: object {shard.digest}: {error}") from error

    def _size(self, part: int, row: int, form: Form) -> int:
        index = self._indexes.get(part)
        if form is Form.SAFETENSORS:
            return index.raw_size(row)
        if form is Form.JSON:
            return index.sidecar_size(row) or 0
        size = index.npz_size(row)
        return len(self._bytes(part, index.row(row), form, SAMPLES)) if size is None else size

    # Names to nodes.

    def _find_directory(self, path: str) -> int | None:
        """The node of the directory `path` below `samples`, None if there is none."""
        if not path:
            return self.root
        depth = path.count("/") + 1
        first = bisect_left(self._ids, path)
        if not self._is_at(first, path):
            first = bisect_left(self._ids, f"{path}/")
            if first == len(self._ids) or not self._ids[first].startswith(f"{path}/"):
                return self._find_inner_directory(path, depth)
        return self._directory_node(self._starts[first], depth)

    def _find_inner_directory(self, path: str, depth: int) -> int | None:
        for part, rest in self._holders(path):
            row = self._indexes.get(part).first_below(rest) if rest else None
            if row is not None:
                return self._directory_node(self._starts[part] + row, depth)
        return None

    def _find_file(self, directory: str, name: str) -> int:
        stem, dot, suffix = name.rpartition(".")
        form = _FORMS.get(dot + suffix)
        if form is None or not stem:
            raise absent(f"{SAMPLES}/{directory}/{name}")
        found = [
            (part, row)
            for part, rest in self._holders(directory)
            for row in self._indexes.get(part).find(f"{rest}/{stem}" if rest else stem)
        ]
        if form is Form.JSON:
            found = [
                (part, row)
                for part, row in found
                if self._indexes.get(part).sidecar_size(row) is not None
            ]
        if not found:
            raise absent(f"{SAMPLES}/{directory}/{name}")
        if len(found) > 1:
            keys = " and ".join(repr(self._indexes.get(part).row(row).key) for part, row in found)
            raise FsmountError(f"{self._prefix}{SAMPLES}/{directory}/{name}: is wanted by {keys}")
        part, row = found[0]
        return self._file_node(self._starts[part] + row, form)

    def _holders(self, directory: str) -> Iterator[tuple[int, str]]:
        """The partitions that may hold files in `directory`, and its path below their ids."""
        parts = directory.split("/")
        for depth in range(len(parts), 0, -1):
            ident = "/".join(parts[:depth])
            place = bisect_left(self._ids, ident)
            rest = "/".join(parts[depth:])
            if self._is_at(place, ident) and (not rest or self._may_nest(ident)):
                yield place, rest

    def _may_nest(self, ident: str) -> bool:
        match self._rule:
            case DirectoryRule():
                return False
            case DepthRule(depth):
                return ident.count("/") + 1 == depth
            case RegexRule():
                return True

    def _is_at(self, place: int, ident: str) -> bool:
        return place < len(self._ids) and self._ids[place] == ident

    def _list(self, node: int) -> _Names:
        directory = self._directory_path(node)
        names: dict[str, tuple[str, int, Kind]] = {}
        for part, rest in self._holders(directory):
            for name, row in self._indexes.get(part).children(rest):
                if row is not None:
                    for entry in self._forms(part, row, name):
                        names.setdefault(entry[0], entry)
        for name in self._subdirectories(directory):
            found = self._find_directory(f"{directory}/{name}" if directory else name)
            if found is not None:
                names[name] = (name, found, Kind.DIRECTORY)
        return [names[name] for name in sorted(names)]

    def _forms(self, part: int, row: int, name: str) -> Iterator[tuple[str, int, Kind]]:
        bare = self._indexes.get(part).sidecar_size(row) is None
        for form in Form:
            if form is not Form.JSON or not bare:
                node = self._file_node(self._starts[part] + row, form)
                yield name + form.suffix, node, Kind.FILE

    def _subdirectories(self, directory: str) -> set[str]:
        prefix = f"{directory}/" if directory else ""
        found = set()
        for ident in self._ids[bisect_left(self._ids, prefix) :]:
            if not ident.startswith(prefix):
                break
            found.add(ident[len(prefix) :].partition("/")[0])
        for part, rest in self._holders(directory):
            found.update(n for n, row in self._indexes.get(part).children(rest) if row is None)
        return found

    # Numbers.

    def _file_node(self, number: int, form: Form) -> int:
        return node_number(self._file_slot, number * _KINDS + form)

    def _directory_node(self, number: int, depth: int) -> int:
        if depth >= _DEPTHS:
            raise os_error(errno.ENAMETOOLONG, SAMPLES)
        return node_number(self._directory_slot, number * _DEPTHS + depth)

    def _is_directory(self, node: int) -> bool:
        return slot_and_place(node)[0] == self._directory_slot

    def _sample(self, node: int) -> tuple[int, Form]:
        number, form = divmod(slot_and_place(node)[1], _KINDS)
        if form not in tuple(Form):
            raise stale(node)
        return number, Form(form)

    def _locate(self, number: int, node: int) -> tuple[int, int]:
        """The partition and row of a sample's number."""
        if not 0 <= number < self._starts[-1]:
            raise stale(node)
        part = bisect_right(self._starts, number) - 1
        return part, number - self._starts[part]

    def _directory_path(self, node: int) -> str:
        """The path of a directory below `samples`; ENOTDIR, ESTALE."""
        if node == self.root:
            return ""
        if not self._is_directory(node):
            raise not_a_directory(f"{SAMPLES}: node {node}")
        number, depth = divmod(slot_and_place(node)[1], _DEPTHS)
        part, row = self._locate(number, node)
        components: Sequence[str] = self._ids[part].split("/")
        if depth > len(components):
            components = [*components, *self._indexes.get(part).rest(row).split("/")[:-1]]
        if not 0 < depth <= len(components):
            raise stale(node)
        return "/".join(components[:depth])

    def _load(self, part: int) -> SampleIndex:
        partition = self._partitions[part]
        about = self._prefix + manifest_path(partition.id)
        data = self._reader.read_all(partition.manifest, about)
        try:
            return sample_index.decode(data, partition)
        except FormatError as error:
            raise type(error)(f"{about}: {error}") from error
