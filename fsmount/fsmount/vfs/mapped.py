"""One version as a file system, from a mapped path list: ready at once, nothing heavy imported.

What lists, finds and opens files is all here. Who can read Parquet and decompress, which samples
and the making of a path list need, is a `decoder`: for a server, other processes.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from fsmount.errors import FormatError
from fsmount.formats import document as documents
from fsmount.model import Version, VersionDocument
from fsmount.private import cache_directory, replace_file, shrink
from fsmount.store.refs import Keysets, Refs, Survey
from fsmount.vfs import pathlist
from fsmount.vfs.attrs import Attrs, nanoseconds
from fsmount.vfs.files import FixedFiles
from fsmount.vfs.keysets import KeysetFiles
from fsmount.vfs.layout import usage, version_tree
from fsmount.vfs.parted import (
    KEYSET_FILES,
    SAMPLE_DIRECTORIES,
    SAMPLE_FILES,
    LatePart,
    Look,
    Part,
    PartedTree,
)
from fsmount.vfs.pathlist import PathList
from fsmount.vfs.reads import ObjectReader
from fsmount.vfs.sample_data import SampleData
from fsmount.vfs.samples import SampleFiles
from fsmount.vfs.versions import VersionsTree

log = logging.getLogger("fsmount.vfs")

_SUFFIX = ".paths"
_BYTES_MAX = 1 << 30  # of all lists that are kept


def list_name(document: bytes) -> str:
    """The file name of the path list that is made for `document`."""
    return f"{hashlib.sha256(document).hexdigest()}{_SUFFIX}"


def prepare(document: VersionDocument, load: Callable[[], Version]) -> str | int:
    """The version's path list, for `open_list`: the path of a file, or a descriptor of memory.

    One that is kept and whole is taken; else the version is loaded. It is kept where only this user
    can write, and in memory where there is no such place.
    """
    text = documents.encode(document)
    directory = cache_directory("paths")
    path = None if directory is None else f"{directory}/{list_name(text)}"
    if path is not None and is_list(path, text):
        with suppress(OSError):
            os.utime(path)
        return path
    tree = version_tree(load(), text)
    data = pathlist.encode(tree, usage(tree), text)
    if path is None:
        log.info("no directory that only this user can write: the list of paths is not kept")
        return pathlist.in_memory(data)
    try:
        replace_file(path, data)
    except OSError as error:
        log.info("the list of paths is not kept: %s", error)
        return pathlist.in_memory(data)
    shrink(os.path.dirname(path), _BYTES_MAX)  # who has one mapped keeps it
    return path


def is_list(path: str, document: bytes) -> bool:
    """Whether a whole path list that was made for `document` is at `path`."""
    try:
        return pathlist.open_list(path).document == document
    except (OSError, FormatError):
        return False


def mapped_version(
    paths: PathList,
    store: str,
    reader: ObjectReader,
    samples: SampleData,
    look: Look,
    *,
    first_slot: int = 0,
    prefix: str = "",
) -> PartedTree:
    """The version of the store at `store` that `paths` was made for; FormatError.

    `prefix` names it in messages.
    """
    document = documents.decode(paths.document)
    attrs = Attrs(look.owner, nanoseconds(document.created_at))

    def sample_files() -> Part:
        return SampleFiles(
            samples.partitions(store, document),
            document.rule,
            file_slot=first_slot + SAMPLE_FILES,
            directory_slot=first_slot + SAMPLE_DIRECTORIES,
            attrs=attrs,
            data=samples,
            prefix=prefix,
        )

    return PartedTree(
        document,
        FixedFiles(paths, slot=first_slot, attrs=attrs, reader=reader, prefix=prefix),
        KeysetFiles(
            Keysets(store, document.table.digest),
            slot=first_slot + KEYSET_FILES,
            attrs=attrs,
            reader=reader,
            prefix=prefix,
        ),
        LatePart(sample_files),
        attrs=attrs,
        usage=paths.usage,
        look=look,
        first_slot=first_slot,
    )


@dataclass(frozen=True, slots=True)
class StoreRefs:
    """The versions of the store at `root`, as `VersionsTree` wants them."""

    root: str

    def survey(self) -> Survey:
        return Refs(self.root).survey()

    def latest(self) -> str | None:
        latest = Refs(self.root).latest()
        return None if latest is None else latest.tag


def mapped_store(
    store: str,
    reader: ObjectReader,
    samples: SampleData,
    look: Look,
    *,
    clock: Callable[[], float],
    on_first_use: Callable[[VersionDocument], None],
) -> VersionsTree:
    """All versions of the store at `store`; path lists are made as needed."""

    def build(document: VersionDocument, *, first_slot: int, prefix: str) -> PartedTree:
        def load() -> Version:
            return Version(document, samples.partitions(store, document))

        paths = pathlist.open_list(prepare(document, load))
        return mapped_version(
            paths, store, reader, samples, look, first_slot=first_slot, prefix=prefix
        )

    return VersionsTree(StoreRefs(store), build, look, clock=clock, on_first_use=on_first_use)
