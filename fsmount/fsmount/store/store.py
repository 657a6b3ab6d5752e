"""The store: one directory that holds every version of a dataset. See docs/format.md, "Store"."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from fsmount.errors import FormatError, NotAStoreError, StoreError
from fsmount.formats.checked import dump_document, load_object
from fsmount.formats.document import check_format
from fsmount.formats.keyset import Keyset
from fsmount.model import FORMAT, Digest, Ref, Version, VersionDocument
from fsmount.store import durable, inside
from fsmount.store.inside import StorePath, store_path
from fsmount.store.leases import DEFAULT_TTL, LEASES, Kind, Lease, Leases
from fsmount.store.objects import OBJECTS, Objects
from fsmount.store.publish import publish
from fsmount.store.refs import KEYSETS, STORE_FILE, VERSIONS, Keysets, Refs, Survey
from fsmount.store.sweep import sweep
from fsmount.store.versions import read_table, resolve

CACHE = "cache"
TRASH = "trash"
_LAYOUT = (OBJECTS, VERSIONS, KEYSETS, LEASES, CACHE, durable.STAGING, TRASH)
_LIMIT = 1 << 20  # bytes of store.json


@dataclass(frozen=True, slots=True)
class Store:
    """An open store. Holds only its path: picklable, safe in any thread and process.

    Get one by `Store.open` or `Store.create`, which check the path.
    """

    path: str  # absolute

    @classmethod
    def open(cls, path: str) -> Store:
        """The store at `path`, which may be read-only; NotAStoreError if there is none."""
        root = store_path(path)
        try:
            data = durable.read_small(StorePath(root, STORE_FILE), _LIMIT)
            if data is None:
                raise NotAStoreError(f"no store at {root}: it has no {STORE_FILE}")
            check_format(load_object(data, STORE_FILE))
        except FormatError as error:
            raise NotAStoreError(f"no store that can be read at {root}: {error}") from error
        return cls(root)

    @classmethod
    def exists(cls, path: str) -> bool:
        """Whether `path` has a store, in order or not."""
        return os.path.lexists(f"{store_path(path)}/{STORE_FILE}")

    @classmethod
    def create(cls, path: str) -> Store:
        """Open the store at `path`, or make an empty one where nothing or an empty directory is.

        Raises NotAStoreError for a directory of other things and StoreWriteError. Any number of
        processes may create one store at once; what a killed one left undone is completed.
        """
        root = store_path(path)
        if not cls.exists(path):
            _check_free(root)
            _make(root)
        return cls.open(root)

    @property
    def objects(self) -> Objects:
        """The objects."""
        return Objects(self.path)

    @property
    def leases(self) -> Leases:
        """The leases."""
        return Leases(self.path)

    def staging(self, lease: Lease | None = None) -> AbstractContextManager[StorePath]:
        """A fresh directory on the store's file system, removed on leaving; StoreWriteError.

        With a `lease` it belongs to that, and `sweep` knows when it was left behind.
        """
        return durable.staging(self.path, None if lease is None else lease.id)

    def sweep(self) -> None:
        """Remove what processes that are gone have left: their leases and staging directories."""
        sweep(self.leases)

    def versions(self) -> tuple[VersionDocument, ...]:
        """All published versions by time of creation and tag; FormatError for a damaged one."""
        return self._refs.documents()

    def survey(self) -> Survey:
        """The same, together with what can't be read; StoreError if `versions/` can't be listed."""
        return self._refs.survey()

    def latest(self) -> str | None:
        """The tag that `latest` names, None before the first version."""
        latest = self._refs.latest()
        return None if latest is None else latest.tag

    def resolve(self, ref: Ref) -> VersionDocument:
        """The document that `ref` means.

        For a TableRef that is one made from the table: the same whatever tags the table has.
        Raises VersionNotFoundError, which names what exists, and FormatError.
        """
        return resolve(self._refs, self.objects, ref)

    def version(self, ref: Ref) -> Version:
        """The version that `ref` means, its table verified and in agreement with its document.

        Raises as `resolve`, and ObjectMissingError or IntegrityError.
        """
        document = self.resolve(ref)
        return Version(document, read_table(self.objects, document).partitions)

    def publish(self, document: VersionDocument, staging: StorePath) -> bool:
        """Publish `document`, atomically and durably, and move `latest` to it; see `publish`."""
        return publish(self._refs, self.objects, document, staging)

    def keysets(self, table: Digest) -> dict[str, Keyset]:
        """The key-sets of the version with `table` by name; FormatError for a damaged one."""
        return self._refs.keysets(table)

    def keysets_of(self, table: Digest) -> Keysets:
        """The same, for whoever wants names alone, or one of them."""
        return Keysets(self.path, table)

    def put_keyset(self, keyset: Keyset, staging: StorePath) -> bool:
        """Store `keyset`, durably; False if it is there. KeysetExistsError, ObjectMissingError."""
        self.objects.check(keyset.keys)
        self.objects.sync({keyset.keys.digest})
        return self._refs.put_keyset(keyset, staging)

    def lease(
        self,
        kind: Kind,
        tables: Iterable[Digest] = (),
        objects: Iterable[Digest] = (),
        ttl: int = DEFAULT_TTL,
    ) -> Lease:
        """Keep `tables` and `objects` from being collected while this process runs.

        The holder renews it within `ttl` seconds. StoreWriteError when the store can't be written.
        """
        return self.leases.create(kind, tables, objects, ttl)

    @property
    def _refs(self) -> Refs:
        return Refs(self.path)


def _check_free(root: str) -> None:
    """Raise NotAStoreError if anything but the beginnings of a store is at `root`."""
    try:
        other = sorted(name for name in os.listdir(root) if not _is_beginning(root, name))
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise NotAStoreError(f"no store at {root}: not a directory") from error
    except OSError as error:
        raise StoreError(f"can't read {root}: {durable.cause(error)}") from error
    if other and not os.path.lexists(f"{root}/{STORE_FILE}"):  # else another process was faster
        raise NotAStoreError(f"no store at {root}, but a directory with {other[0]!r} in it")


def _is_beginning(root: str, name: str) -> bool:
    """Whether a killed `_make` may have left `name`: a directory of ours with nothing in it."""
    return name in _LAYOUT and (
        name == durable.STAGING or not inside.names_in(StorePath(root, name))
    )


def _make(root: str) -> None:
    """Make the layout first and store.json last: where that is, everything is."""
    parent = os.path.dirname(root)
    with durable.changing(root):
        os.makedirs(root, exist_ok=True)
    for name in _LAYOUT:
        durable.make_directory(StorePath(root, name))
    durable.sync_directory(StorePath(root))
    durable.sync_directory(StorePath(parent))
    with durable.staging(root) as staging:
        staged = staging / STORE_FILE
        durable.write_file(staged, dump_document({"format": FORMAT}))
        durable.link(staged, StorePath(root, STORE_FILE))
    durable.sync_directory(StorePath(root))
