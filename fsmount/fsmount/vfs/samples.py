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
from itertools import accumulate

from fsmount.errors import FsmountError
from fsmount.model import DepthRule, DirectoryRule, Partition, RegexRule, Rule
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
from fsmount.vfs.form import Form
from fsmount.vfs.layout import SAMPLES
from fsmount.vfs.sample_data import File, Part, SampleData
from fsmount.vfs.sample_list import SampleList

_LISTED_NAMES = 1 << 20  # of listings that are kept
_KINDS = 4  # places a sample; one is spare
_DEPTHS = 2048  # more components than a path can have


_FORM_AT = tuple(Form)
_FORMS = {form.suffix: form for form in Form}
_Names = list[tuple[str, int, Kind]]


class SampleFiles:
    """The tree below `samples`, in two slots: one of files, one of directories (root: place 0)."""

    def __init__(
        self,
        partitions: Sequence[Partition],
        rule: Rule,
        *,
        file_slot: int,
        directory_slot: int,
        attrs: Attrs,
        data: SampleData,
        prefix: str,
    ) -> None:
        """`prefix` stands before the paths in messages."""
        self._parts = [Part.of(partition, prefix) for partition in partitions]
        self._rule = rule
        self._ids = [part.id for part in partitions]
        self._starts = [0, *accumulate(part.samples for part in partitions)]
        self._file_slot = file_slot
        self._directory_slot = directory_slot
        self._attrs = attrs
        self._data = data
        self._prefix = prefix
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
        return self._attrs.file(node, self._data.size(File(self._parts[part], row, form)))

    def parent(self, node: int) -> int:
        found = self._find_directory(self._directory_path(node).rpartition("/")[0])
        if found is None:
            raise stale(node)
        return found

    def settled(self, node: int) -> bool:
        """Whether all that is said of a node and the names in it is in memory."""
        if node == self.root:
            return True
        place = slot_and_place(node)[1]
        is_directory = self._is_directory(node)
        number = place // (_DEPTHS if is_directory else _KINDS)
        if number >= self._starts[-1] or not self._is_loaded(self._part_of(number)):
            return False
        if not is_directory:
            return True
        holders = self._holders(self._directory_path(node))
        return all(self._is_loaded(part) for part, _ in holders)

    def ready(self, node: int) -> bool:
        """Whether a file can be opened, or a directory is listed, without any wait."""
        if self._is_directory(node):
            return self._listings.peek(node) is not None
        number, form = divmod(slot_and_place(node)[1], _KINDS)
        if number >= self._starts[-1] or form >= len(_FORM_AT):
            return False
        part = self._part_of(number)
        file = File(self._parts[part], number - self._starts[part], _FORM_AT[form])
        return self._data.is_ready(node, file)

    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]:
        self._directory_path(node)
        names = self._listings.get(node)
        return (DirEntry(*names[at], at + 1) for at in range(offset, len(names)))

    def open(self, node: int) -> Handle:
        if self._is_directory(node):
            raise os_error(errno.EISDIR, self._directory_path(node))
        number, form = self._sample(node)
        part, row = self._locate(number, node)
        return self._data.open(node, File(self._parts[part], row, form))

    def path(self, node: int) -> str:
        if self._is_directory(node):
            return f"{self._prefix}{SAMPLES}/{self._directory_path(node)}".rstrip("/")
        number, form = self._sample(node)
        part, row = self._locate(number, node)
        name = f"{self._ids[part]}/{self._samples(part).rest(row)}{form.suffix}"
        return f"{self._prefix}{SAMPLES}/{name}"

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
            row = self._samples(part).first_below(rest) if rest else None
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
            for row in self._samples(part).find(f"{rest}/{stem}" if rest else stem)
        ]
        if form is Form.JSON:
            found = [
                (part, row)
                for part, row in found
                if self._samples(part).sidecar_size(row) is not None
            ]
        if not found:
            raise absent(f"{SAMPLES}/{directory}/{name}")
        if len(found) > 1:
            keys = " and ".join(repr(self._samples(part).key(row)) for part, row in found)
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
            for name, row in self._samples(part).children(rest):
                if row is not None:
                    for entry in self._forms(part, row, name):
                        names.setdefault(entry[0], entry)
        for name in self._subdirectories(directory):
            found = self._find_directory(f"{directory}/{name}" if directory else name)
            if found is not None:
                names[name] = (name, found, Kind.DIRECTORY)
        return [names[name] for name in sorted(names)]

    def _forms(self, part: int, row: int, name: str) -> Iterator[tuple[str, int, Kind]]:
        bare = self._samples(part).sidecar_size(row) is None
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
            found.update(n for n, row in self._samples(part).children(rest) if row is None)
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
        if form >= len(_FORM_AT):
            raise stale(node)
        return number, _FORM_AT[form]

    def _locate(self, number: int, node: int) -> tuple[int, int]:
        """The partition and row of a sample's number."""
        if not 0 <= number < self._starts[-1]:
            raise stale(node)
        part = self._part_of(number)
        return part, number - self._starts[part]

    def _part_of(self, number: int) -> int:
        return bisect_right(self._starts, number) - 1

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
            components = [*components, *self._samples(part).rest(row).split("/")[:-1]]
        if not 0 < depth <= len(components):
            raise stale(node)
        return "/".join(components[:depth])

    def _samples(self, part: int) -> SampleList:
        return self._data.samples(self._parts[part])

    def _is_loaded(self, part: int) -> bool:
        return self._data.is_loaded(self._parts[part])
