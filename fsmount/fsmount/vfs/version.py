"""One version as a file system, from its partitions."""

from __future__ import annotations

from fsmount.formats import document as documents
from fsmount.model import Version
from fsmount.vfs.attrs import Attrs, nanoseconds
from fsmount.vfs.decoding import Decoding
from fsmount.vfs.files import FixedFiles
from fsmount.vfs.keysets import KeysetFiles, KeysetSource
from fsmount.vfs.layout import usage, version_tree
from fsmount.vfs.parted import (
    KEYSET_FILES,
    SAMPLE_DIRECTORIES,
    SAMPLE_FILES,
    SLOTS,
    Look,
    PartedTree,
    root_entry,
)
from fsmount.vfs.reads import ObjectReader
from fsmount.vfs.sample_data import SampleData
from fsmount.vfs.samples import SampleFiles

__all__ = ["SLOTS", "Look", "VersionTree", "root_entry"]


class VersionTree(PartedTree):
    """A FileSystem of one version; its nodes are in SLOTS slots from `first_slot` on."""

    def __init__(
        self,
        version: Version,
        keysets: KeysetSource,
        reader: ObjectReader,
        look: Look,
        *,
        samples: SampleData | None = None,
        first_slot: int = 0,
        prefix: str = "",
    ) -> None:
        """`keysets` are the version's, as they are now; `prefix` names it in messages.

        Samples are decoded in this process where `samples` is not given.
        Raises FormatError if the partitions' ids clash.
        """
        tree = version_tree(version, documents.encode(version.document))
        attrs = Attrs(look.owner, nanoseconds(version.document.created_at))
        super().__init__(
            version.document,
            FixedFiles(tree, slot=first_slot, attrs=attrs, reader=reader, prefix=prefix),
            KeysetFiles(
                keysets, slot=first_slot + KEYSET_FILES, attrs=attrs, reader=reader, prefix=prefix
            ),
            SampleFiles(
                version.partitions,
                version.document.rule,
                file_slot=first_slot + SAMPLE_FILES,
                directory_slot=first_slot + SAMPLE_DIRECTORIES,
                attrs=attrs,
                data=samples or SampleData(Decoding(), reader),
                prefix=prefix,
            ),
            attrs=attrs,
            usage=usage(tree),
            look=look,
            first_slot=first_slot,
        )
