"""What names objects: version documents, `latest` and key-sets; all small JSON files.

Documents and key-sets are linked to their names once and never rewritten. Only `latest.json` is
replaced, under a lock. Readers trust nothing they find: each error names the file.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fsmount.errors import (
    FormatError,
    FsmountError,
    InvalidNameError,
    KeysetExistsError,
    StoreError,
)
from fsmount.formats import document as documents
from fsmount.formats import keyset_pointer as keysets
from fsmount.formats.checked import dump_document, get, load_object
from fsmount.formats.keyset_pointer import Keyset
from fsmount.model import FORMAT, Digest, VersionDocument, check_tag
from fsmount.store import durable, inside
from fsmount.store.inside import StorePath

STORE_FILE = "store.json"
VERSIONS = "versions"
KEYSETS = "keysets"
LATEST_FILE = "latest.json"
LATEST_LOCK = "latest.lock"
DOCUMENT_LIMIT = 16 << 20  # bytes; ours have about one thousand
_SUFFIX = ".json"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What a pruned version leaves behind, so that its tag is never used again."""

    tag: str


@dataclass(frozen=True, slots=True)
class Latest:
    """What `latest.json` says: the tag and its table."""

    tag: str
    table: Digest


@dataclass(frozen=True, slots=True)
class Survey:
    """What stands in `versions/`: what can be read, by time of creation and tag, and what can't."""

    versions: tuple[VersionDocument, ...]
    faults: dict[str, FsmountError]  # by the name of the file, without its suffix


@dataclass(frozen=True, slots=True)
class Refs:
    """The references of the store at `root`. Holds only that path: picklable, thread-safe."""

    root: str

    def path(self, tag: str) -> StorePath:
        """Where the document of `tag` lies, whether it is there or not."""
        return StorePath(self.root, VERSIONS, f"{check_tag(tag)}{_SUFFIX}")

    def read(self, tag: str) -> VersionDocument | Tombstone | None:
        """What stands under `tag`; FormatError if that is damaged or another tag's document."""
        return _read(self.path(tag), lambda data: _parse_version(tag, data))

    def survey(self) -> Survey:
        """All versions but the pruned ones, and those that can't be read."""
        versions: list[VersionDocument] = []
        faults: dict[str, FsmountError] = {}
        for name in _names(StorePath(self.root, VERSIONS)):
            try:
                found = self.read(name)
            except InvalidNameError as error:
                path = f"{self.root}/{VERSIONS}/{name}{_SUFFIX}"
                faults[name] = FormatError(f"{path}: {error}")
            except (FormatError, StoreError) as error:
                faults[name] = error
            else:
                if isinstance(found, VersionDocument):
                    versions.append(found)
        versions.sort(key=lambda version: (version.created_at, str(version.tag)))
        return Survey(tuple(versions), faults)

    def documents(self) -> tuple[VersionDocument, ...]:
        """All versions but the pruned ones, by time of creation and tag; FormatError as `read`."""
        found = self.survey()
        for error in found.faults.values():
            raise error
        return found.versions

    def add(self, document: VersionDocument, staging: StorePath) -> bool:
        """Link `document` to its tag and return True; False if the tag is there already.

        Either way the directory is not yet synced.
        """
        data = documents.encode(document)
        return _link_new(data, self.path(str(document.tag)), staging)

    def sync(self) -> None:
        """Make the names of all documents, and of the store's parts, durable."""
        durable.sync_directory(StorePath(self.root, VERSIONS))
        durable.sync_directory(StorePath(self.root))

    def latest(self) -> Latest | None:
        """What `latest` names, None before the first version; FormatError if that is damaged."""
        return _read(StorePath(self.root, LATEST_FILE), _parse_latest)

    def set_latest(self, latest: Latest, staging: StorePath) -> None:
        """Replace `latest`, durably. The caller holds the lock."""
        staged = staging / secrets.token_hex(16)
        value = {"format": FORMAT, "tag": latest.tag, "table": latest.table}
        durable.write_file(staged, dump_document(value))
        durable.replace(staged, StorePath(self.root, LATEST_FILE))
        durable.sync_directory(StorePath(self.root))

    def keysets(self, table: Digest) -> dict[str, Keyset]:
        """The key-sets of the version with `table`, by name and sorted; FormatError if damaged."""
        of_table = Keysets(self.root, table)
        found = {name: of_table.read(name) for name in of_table.names()}
        return {name: keyset for name, keyset in found.items() if keyset is not None}

    def put_keyset(self, keyset: Keyset, staging: StorePath) -> bool:
        """Store `keyset` under its name, durably; False if that very key-set is there.

        Raises KeysetExistsError when the name is taken by another.
        """
        directory = StorePath(self.root, KEYSETS, keyset.table)
        durable.make_directory(directory)
        path = directory / f"{keyset.name}{_SUFFIX}"
        fresh = _link_new(keysets.encode_pointer(keyset), path, staging)
        durable.sync_directory(directory)
        durable.sync_directory(directory.directory)
        if not fresh and Keysets(self.root, keyset.table).read(keyset.name) != keyset:
            raise KeysetExistsError(
                f"key-set {keyset.name!r} exists with other keys or another selection; "
                "choose another name"
            )
        return fresh


@dataclass(frozen=True, slots=True)
class Keysets:
    """The key-sets of the version with `table` in the store at `root`."""

    root: str
    table: Digest

    def names(self) -> list[str]:
        """Their names, sorted; none is read. FormatError for a file that can't be one."""
        directory = StorePath(self.root, KEYSETS, self.table)
        names = _names(directory)
        for name in names:
            try:
                check_tag(name)
            except InvalidNameError as error:
                raise FormatError(f"{directory}: {error}") from error
        return names

    def read(self, name: str) -> Keyset | None:
        """The key-set `name`, None if there is none; FormatError if it is damaged."""
        try:
            path = StorePath(self.root, KEYSETS, self.table, f"{check_tag(name)}{_SUFFIX}")
        except InvalidNameError:
            return None
        found = _read(path, lambda data: _parse_keyset(self.table, name, data))
        if found is None:
            _check_there(self.root)
        return found


def _names(directory: StorePath) -> list[str]:
    """The names of the JSON files in `directory`, sorted, without their suffix.

    Hidden files and other suffixes are what file managers and file servers leave behind.
    """
    try:
        files = inside.names_in(directory)
    except (FileNotFoundError, NotADirectoryError):
        _check_there(directory.root)
        return []
    except OSError as error:
        raise StoreError(f"can't read {directory}: {durable.cause(error)}") from error
    found = [name for name in files if name.endswith(_SUFFIX) and not name.startswith(".")]
    return sorted(name.removesuffix(_SUFFIX) for name in found)


def _check_there(root: str) -> None:
    """Raise StoreError if the store is gone, so that nothing in it could be found."""
    try:
        inside.status(StorePath(root, STORE_FILE))
    except OSError as error:
        raise StoreError(f"the store {root} can't be reached: {durable.cause(error)}") from error


def _read(path: StorePath, parse: Callable[[bytes], T]) -> T | None:
    """Parse the file `path`, None where there is none; a FormatError then names `path`."""
    data = durable.read_small(path, DOCUMENT_LIMIT)
    if data is None:
        return None
    try:
        return parse(data)
    except (FormatError, InvalidNameError) as error:
        raise FormatError(f"{path}: {error}") from error


def _link_new(data: bytes, path: StorePath, staging: StorePath) -> bool:
    staged = staging / secrets.token_hex(16)
    durable.write_file(staged, data)
    fresh = durable.link(staged, path)
    durable.remove(staged)
    return fresh


def _parse_version(tag: str, data: bytes) -> VersionDocument | Tombstone:
    value = load_object(data, "version document")
    documents.check_format(value)
    if value.get("tag") != tag:
        raise FormatError(f"it is the document of tag {value.get('tag')!r}")
    if value.get("pruned") is True:
        return Tombstone(check_tag(tag))
    return documents.decode(data)


def _parse_latest(data: bytes) -> Latest:
    value = load_object(data, "latest")
    documents.check_format(value)
    return Latest(check_tag(get(value, "tag", str)), Digest(get(value, "table", str)))


def _parse_keyset(table: Digest, name: str, data: bytes) -> Keyset:
    keyset = keysets.decode_pointer(data)
    if (keyset.table, keyset.name) != (table, name):
        raise FormatError(f"it is key-set {keyset.name!r} of table {keyset.table}")
    return keyset
