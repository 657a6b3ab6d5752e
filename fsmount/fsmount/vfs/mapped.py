"""One version as a file system, from a mapped path list: ready at once, nothing heavy imported.

What lists, finds and opens the fixed files is all here. Samples, and making a path list, need
modules that read Parquet; those are imported when they are first needed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from fsmount.errors import FormatError, StoreError
from fsmount.formats import document as documents
from fsmount.model import TableRef, TagRef, Version, VersionDocument
from fsmount.store.refs import Refs, Survey
from fsmount.vfs import pathlist
from fsmount.vfs.attrs import Attrs, nanoseconds
from fsmount.vfs.files import FixedFiles
from fsmount.vfs.filesystem import os_error
from fsmount.vfs.keysets import KeysetFiles
from fsmount.vfs.layout import usage, version_tree
from fsmount.vfs.parted import KEYSET_FILES, LatePart, Look, Part, PartedTree
from fsmount.vfs.pathlist import PathList
from fsmount.vfs.reads import ObjectReader
from fsmount.vfs.versions import VersionsTree

_SUFFIX = ".paths"


def list_name(document: bytes) -> str:
    """The file name of the path list that is made for `document`."""
    return f"{hashlib.sha256(document).hexdigest()}{_SUFFIX}"


def prepare(
    document: VersionDocument, load: Callable[[], Version], directories: Iterable[str]
) -> str:
    """The path of the version's path list, made in the first of `directories` that allows it.

    One that is there and whole is taken; else the version is loaded. StoreError if there is no
    place for it.
    """
    text = documents.encode(document)
    paths = []
    for directory in directories:
        paths.append(f"{directory}/{list_name(text)}")
        if _is_trusted(directory) and is_list(paths[-1], text):
            return paths[-1]
    tree = version_tree(load(), text)
    data = pathlist.encode(tree, usage(tree), text)
    causes = []
    for path in paths:
        try:
            return _write(path, data)
        except OSError as error:
            causes.append(str(error))
    raise StoreError(f"no place for the list of a version's paths: {'; '.join(causes)}")


def _is_trusted(directory: str) -> bool:
    """Whether it is this user's, or of whom has made the directory above: nobody else's lists."""
    try:
        owner = os.lstat(directory).st_uid
        return owner in (os.geteuid(), os.stat(os.path.dirname(directory)).st_uid)
    except OSError:
        return False


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
    refs, table = Refs(store), document.table.digest

    def samples() -> Part:
        version = load_version(store, document)
        made = import_module("fsmount.vfs.version").sample_files(
            version, reader, attrs, first_slot=first_slot, prefix=prefix
        )
        return cast(Part, made)

    return PartedTree(
        document,
        FixedFiles(paths, slot=first_slot, attrs=attrs, reader=reader, prefix=prefix),
        KeysetFiles(
            lambda: refs.keysets(table),
            slot=first_slot + KEYSET_FILES,
            attrs=attrs,
            reader=reader,
            prefix=prefix,
        ),
        LatePart(samples),
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
    directories: Sequence[str],
    reader: ObjectReader,
    look: Look,
    *,
    clock: Callable[[], float],
    on_first_use: Callable[[VersionDocument], None],
) -> VersionsTree:
    """All versions of the store at `store`; path lists are made in `directories` as needed."""

    def build(document: VersionDocument, *, first_slot: int, prefix: str) -> PartedTree:
        path = prepare(document, lambda: load_version(store, document), directories)
        paths = pathlist.open_list(path)
        return mapped_version(paths, store, reader, look, first_slot=first_slot, prefix=prefix)

    return VersionsTree(StoreRefs(store), build, look, clock=clock, on_first_use=on_first_use)


def load_version(store: str, document: VersionDocument) -> Version:
    """The version of `document`, with its partitions; raises as `Store.version`."""
    ref = TableRef(document.table.digest) if document.tag is None else TagRef(document.tag)
    return cast(Version, import_module("fsmount.store.store").Store.open(store).version(ref))


def _write(path: str, data: bytes) -> str:
    directory = os.path.dirname(path)
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if not _is_trusted(directory):
        raise os_error(errno.EPERM, directory)
    fresh = f"{path}.{secrets.token_hex(8)}"
    try:
        with open(fresh, "xb") as file:
            file.write(data)
        os.replace(fresh, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(fresh)
        raise
    return path
