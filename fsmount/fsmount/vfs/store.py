"""All versions of a store as a file system, each from its partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fsmount.model import Digest, TagRef, Version, VersionDocument
from fsmount.store.refs import Survey
from fsmount.vfs.decoding import Decoding
from fsmount.vfs.keysets import KeysetSource
from fsmount.vfs.parted import Look, PartedTree
from fsmount.vfs.reads import ObjectReader
from fsmount.vfs.sample_data import SampleData
from fsmount.vfs.version import VersionTree
from fsmount.vfs.versions import VersionsTree


class Source(Protocol):
    """What is needed of a store; `fsmount.store.Store` is one."""

    def survey(self) -> Survey: ...
    def latest(self) -> str | None: ...
    def version(self, ref: TagRef) -> Version: ...
    def keysets_of(self, table: Digest) -> KeysetSource: ...


class StoreTree(VersionsTree):
    """A FileSystem of all versions."""

    def __init__(
        self,
        store: Source,
        reader: ObjectReader,
        look: Look,
        *,
        samples: SampleData | None = None,
        clock: Callable[[], float],
        on_first_use: Callable[[VersionDocument], None],
    ) -> None:
        """`clock` counts seconds; `on_first_use` is called before a version's parts are read."""

        data = samples or SampleData(Decoding(), reader)

        def build(document: VersionDocument, *, first_slot: int, prefix: str) -> PartedTree:
            return VersionTree(
                store.version(TagRef(str(document.tag))),
                store.keysets_of(document.table.digest),
                reader,
                look,
                samples=data,
                first_slot=first_slot,
                prefix=prefix,
            )

        super().__init__(store, build, look, clock=clock, on_first_use=on_first_use)
