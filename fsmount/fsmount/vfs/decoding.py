"""Decoding for `samples/` in this process. It imports what reads Parquet and decompresses."""

from __future__ import annotations

import hashlib

from fsmount.errors import FormatError, IntegrityError
from fsmount.model import Partition, VersionDocument
from fsmount.store.objects import Objects
from fsmount.store.versions import read_table
from fsmount.vfs import sample_index, unpack
from fsmount.vfs.form import Form
from fsmount.vfs.memory_file import MemoryFile
from fsmount.vfs.reads import ObjectHandle
from fsmount.vfs.sample_list import SampleList


class Decoding:
    """A Decoder."""

    def partitions(self, store: str, document: VersionDocument) -> tuple[Partition, ...]:
        return read_table(Objects(store), document).partitions

    def samples(self, manifest: ObjectHandle, partition: Partition) -> SampleList:
        data = manifest.read(manifest.ref.size, 0)
        if hashlib.sha256(data).hexdigest() != manifest.ref.digest:
            raise IntegrityError(f"{manifest.about}: object {manifest.ref.digest} is damaged")
        try:
            return SampleList(MemoryFile(sample_index.decode(data, partition)), partition.id)
        except FormatError as error:
            raise type(error)(f"{manifest.about}: {error}") from error

    def unpack(self, shard: ObjectHandle, found: SampleList, row: int, form: Form) -> MemoryFile:
        make = unpack.archive if form is Form.NPZ else unpack.member
        try:
            return MemoryFile(make(shard, found, row))
        except FormatError as error:
            about = f"{shard.about}: object {shard.ref.digest}"
            raise type(error)(f"{about}: {error}") from error
