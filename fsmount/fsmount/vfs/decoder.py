"""Who decodes for `samples/`: a helper process for a server, this process for a test."""

from __future__ import annotations

from typing import Protocol

from fsmount.model import Partition, VersionDocument
from fsmount.vfs.form import Form
from fsmount.vfs.memory_file import MemoryFile
from fsmount.vfs.reads import ObjectHandle
from fsmount.vfs.sample_list import SampleList


class Decoder(Protocol):
    """Reads tables, manifests and payloads that nobody vouches for. Safe in any thread.

    Its methods raise what is wrong with those, as an FsmountError.
    """

    def partitions(self, store: str, document: VersionDocument) -> tuple[Partition, ...]:
        """The partitions of a version of the store at `store`; raises as `Store.version`."""
        ...

    def samples(self, manifest: ObjectHandle, partition: Partition) -> SampleList:
        """The samples of a partition, whose manifest is hashed; FormatError, IntegrityError."""
        ...

    def unpack(self, shard: ObjectHandle, found: SampleList, row: int, form: Form) -> MemoryFile:
        """A sample of `found` in a form, not JSON; FormatError, IntegrityError, StoreError."""
        ...
