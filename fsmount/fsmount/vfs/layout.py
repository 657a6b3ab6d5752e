"""Which files a mounted version has, and what each of them holds. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fsmount.model import ObjectRef, Partition, Version
from fsmount.paths import MANIFESTS, SHARDS, manifest_path, shard_path
from fsmount.vfs.filesystem import BLOCK, Usage
from fsmount.vfs.tree import PathTree

DOCUMENT = "VERSION.json"
CHECKSUMS = "SHA256SUMS"
TABLE = "partitions.parquet"
KEYSETS = "keysets"
SAMPLES = "samples"

Content = ObjectRef | bytes  # an object of the store, or bytes that the server holds itself


def size_of(content: Content) -> int:
    """The size in bytes of a file with this content."""
    return content.size if isinstance(content, ObjectRef) else len(content)


class VersionFiles(PathTree[Content]):
    """The tree of a version's fixed files."""

    def size(self, place: int) -> int | None:
        """The size in bytes of the file at a place; None for a directory."""
        content = self.content(place)
        return None if content is None else size_of(content)


def _partition_files(partition: Partition) -> Iterable[tuple[str, ObjectRef]]:
    yield manifest_path(partition.id), partition.manifest
    for index, shard in enumerate(partition.shards):
        yield shard_path(partition.id, index), shard


def version_tree(version: Version, document: bytes) -> VersionFiles:
    """The tree of a version, whose document reads `document`.

    The growing `keysets` and the unlisted `samples` are not part of it. `manifests` and `shards`
    are always there. Raises FormatError if the ids of hostile partitions would clash.
    """
    files: dict[str, Content] = {DOCUMENT: document, TABLE: version.document.table}
    for partition in version.partitions:
        files.update(_partition_files(partition))
    files[CHECKSUMS] = checksums(PathTree(files).files())
    return VersionFiles(files, (MANIFESTS, SHARDS))


def usage(tree: VersionFiles) -> Usage:
    """What the fixed files of a version take."""
    sizes = (size_of(content) for _, content in tree.files())
    return Usage(sum(-(-size // BLOCK) for size in sizes), len(tree))


def checksums(files: Iterable[tuple[str, Content]]) -> bytes:
    """What `sha256sum -c` reads: one line for each file."""
    return b"".join(checksum_line(path, _digest(content)).encode() for path, content in files)


def checksum_line(path: str, digest: str) -> str:
    r"""A line of GNU sha256sum; it begins with "\" where a backslash or newline is escaped."""
    escaped = path.replace("\\", "\\\\").replace("\n", "\\n")
    return f"{'' if escaped == path else chr(92)}{digest}  {escaped}\n"


def _digest(content: Content) -> str:
    return content.digest if isinstance(content, ObjectRef) else hashlib.sha256(content).hexdigest()
