"""The words of the project as frozen values that check themselves.

A value that exists is valid: names can't escape a directory, digests are digests, counts are not
negative. Whatever comes out of a store, a manifest or an archive passes through here first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from datetime import datetime

from fsmount.errors import InvalidNameError, PartitionError, shortened
from fsmount.paths import MANIFEST_SUFFIX, encode_id

FORMAT = 1
LATEST = "latest"
ROOT_PARTITION = "root_"
NO_FIELDS = '{"kinds":{},"more":false,"texts":[]}'

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{8,64}")
_SHARD_NAME = re.compile(r"[0-9]{6,}\.tar")
_TIME = re.compile(r"(19[7-9]|[2-9][0-9]{2})[0-9]-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z")
_LAST_YEAR = 2200  # nanoseconds since 1970 are 64 bits to file systems
_NAME_MAX = 255  # bytes of one path component on every file system we know
_KEY_MAX = 3000  # bytes; with a mountpoint before it, a path still is below PATH_MAX (4,096)
_DEPTH_MAX = 100  # components; every directory above a sample is a node of a mounted tree
_PATTERN_MAX = 1000  # characters of a partition rule's regular expression


class Digest(str):
    """The SHA-256 of some bytes as 64 lower-case hexadecimal digits."""

    __slots__ = ()

    def __new__(cls, text: str) -> Digest:
        if not _HEX64.fullmatch(text):
            raise InvalidNameError(f"not a SHA-256 digest: {text!r}")
        return super().__new__(cls, text)


def check_tag(tag: str) -> str:
    """Return `tag` if it may name a version; raise InvalidNameError otherwise."""
    if not _TAG.fullmatch(tag) or tag == LATEST:
        raise InvalidNameError(
            f"not a tag: {tag!r} (letters, digits, '.', '_' and '-', at most 128, "
            f"a letter or digit first, not {LATEST!r})"
        )
    return tag


def check_key(key: str) -> str:
    """Return `key` if it is a relative path that stays below its root; else InvalidNameError.

    A key has at most 3,000 bytes and 100 components of at most 255 bytes.
    """
    try:
        encoded = key.encode()
    except UnicodeEncodeError:
        raise InvalidNameError(f"not UTF-8: {_shown(key)}") from None
    if not key or b"\0" in encoded:
        raise InvalidNameError(f"not a relative path: {_shown(key)}")
    if len(encoded) > _KEY_MAX:
        raise InvalidNameError(f"a path of over {_KEY_MAX} bytes: {_shown(key)}")
    parts = encoded.split(b"/")
    if len(parts) > _DEPTH_MAX:
        raise InvalidNameError(f"a path of over {_DEPTH_MAX} components: {_shown(key)}")
    for part in parts:
        if part in (b"", b".", b".."):
            raise InvalidNameError(f"not a plain relative path: {_shown(key)}")
        if len(part) > _NAME_MAX:
            raise InvalidNameError(f"a path component of over {_NAME_MAX} bytes: {_shown(key)}")
    return key


def _shown(name: str) -> str:
    return shortened(repr(name))


def check_partition_id(text: str) -> str:
    """Return `text` if it may name a partition: a key whose files' names in a mount fit as well."""
    check_key(text)
    names = encode_id(text).encode().split(b"/")
    names[-1] += MANIFEST_SUFFIX.encode()
    if max(map(len, names)) > _NAME_MAX:
        raise InvalidNameError(f"partition id too long for a file name: {text!r}")
    return text


def check_partition_ids(ids: set[str]) -> None:
    """Raise PartitionError if two of `ids` would need one path of a mounted version.

    `manifests/<id>.parquet` and `shards/<id>/<nnnnnn>.tar` are files, so neither may be a directory
    of another partition. Any shard number counts, whether that shard exists today or not.
    """
    for text in ids:
        parts = text.split("/")
        for end in range(1, len(parts)):
            above, name = "/".join(parts[:end]), parts[end]
            if above.endswith(MANIFEST_SUFFIX) and above[: -len(MANIFEST_SUFFIX)] in ids:
                other = above[: -len(MANIFEST_SUFFIX)]
                raise PartitionError(f"partitions {other!r} and {text!r} clash: {above!r} is both")
            if above in ids and _SHARD_NAME.fullmatch(name):
                raise PartitionError(f"partitions {above!r} and {text!r} clash at {name!r}")


def _check_count(name: str, value: int, least: int = 0) -> None:
    if not least <= value < 1 << 63:  # tables hold 64-bit integers
        raise InvalidNameError(f"{name} must be at least {least} and below 2**63, not {value}")


def _check_time(text: str) -> None:
    try:
        known = _TIME.fullmatch(text) and datetime.fromisoformat(text).year <= _LAST_YEAR
    except ValueError:
        known = False
    if not known:
        raise InvalidNameError(f"not a time from 1970 to {_LAST_YEAR}: {text!r}")


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An object: its digest and its size in bytes."""

    digest: Digest
    size: int

    def __post_init__(self) -> None:
        _check_count("an object's size", self.size)


@dataclass(frozen=True, slots=True)
class ShardRef(ObjectRef):
    """A shard's object and the number of samples in it."""

    samples: int

    def __post_init__(self) -> None:
        _check_count("an object's size", self.size)
        _check_count("a shard's samples", self.samples, 1)


@dataclass(frozen=True, slots=True)
class Partition:
    """One row of a partition table: a partition as one version has it."""

    id: str
    data_revision: Digest
    metadata_revision: Digest
    samples: int
    raw_bytes: int  # of the decoded members
    manifest: ObjectRef
    shards: tuple[ShardRef, ...]
    source_fingerprint: str  # of the listing it was read from; "" where unknown
    fields: str = NO_FIELDS  # the kinds of its samples' fields, as `formats.kinds` dumps them
    schema: str = "{}"  # the fields' types in its manifest: those of the whole version, as JSON

    def __post_init__(self) -> None:
        check_partition_id(self.id)
        _check_count("raw_bytes", self.raw_bytes)
        if self.samples < 1 or self.samples != sum(shard.samples for shard in self.shards):
            raise InvalidNameError(
                f"partition {self.id!r}: shards do not hold {self.samples} samples"
            )

    def objects(self) -> tuple[ObjectRef, ...]:
        """All objects this partition needs, the manifest first."""
        return (self.manifest, *self.shards)


def _directory(key: str) -> str:
    return key.rpartition("/")[0] or ROOT_PARTITION


@dataclass(frozen=True, slots=True)
class DirectoryRule:
    """A sample belongs to the directory it lies in."""

    def partition_of(self, key: str) -> str:
        """The id of the partition that the sample `key` belongs to."""
        return _directory(key)

    def __str__(self) -> str:
        return "the sample's directory"


@dataclass(frozen=True, slots=True)
class DepthRule:
    """A sample belongs to the first `depth` directories of its path."""

    depth: int

    def __post_init__(self) -> None:
        _check_count("partition depth", self.depth, 1)

    def partition_of(self, key: str) -> str:
        """The id of the partition that the sample `key` belongs to."""
        return "/".join(key.split("/")[:-1][: self.depth]) or ROOT_PARTITION

    def __str__(self) -> str:
        return f"the first {self.depth} directories of the path"


@dataclass(frozen=True, slots=True)
class RegexRule:
    """A sample belongs to what `pattern`, in RE2's syntax, finds in its key.

    The group `partition` counts, else group 1, else the whole match. The pattern is compiled where
    it is used: listing the versions of a stranger's store runs nothing of theirs.
    """

    pattern: str

    def __post_init__(self) -> None:
        if len(self.pattern) > _PATTERN_MAX:
            raise InvalidNameError(f"a regular expression of over {_PATTERN_MAX} characters")

    def __str__(self) -> str:
        return f"the regular expression {self.pattern!r}"


# How a version groups its samples (`fsmount.pack.grouping`); `str` says the rule in words.
Rule = DirectoryRule | DepthRule | RegexRule


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides the content of shards and their layout, and nothing else."""

    codec: str = "safetensors.zst"
    level: int = 3  # of zstd
    shard_bytes: int = 256 << 20  # raw bytes that a shard of more than one sample has at most
    order_seed: int = 0
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.codec != "safetensors.zst":
            raise InvalidNameError(f"unknown sample codec {self.codec!r}")
        if not 1 <= self.level <= 22:
            raise InvalidNameError(f"compression level must be 1 to 22, not {self.level}")
        _check_count("shard size", self.shard_bytes, 1)
        if not 0 <= self.order_seed < 1 << 64:
            raise InvalidNameError(f"order seed must be 0 to 2**64-1, not {self.order_seed}")

    def __str__(self) -> str:
        return ", ".join(f"{part.name} {getattr(self, part.name)}" for part in fields(self))


@dataclass(frozen=True, slots=True)
class Totals:
    """A version's sums; bytes are raw (decoded members) and stored (shards and manifests)."""

    partitions: int
    samples: int
    shards: int
    raw_bytes: int
    stored_bytes: int

    def __post_init__(self) -> None:
        for part in fields(self):
            _check_count(part.name, getattr(self, part.name))

    @classmethod
    def of(cls, partitions: tuple[Partition, ...]) -> Totals:
        """Add up `partitions`."""
        return cls(
            partitions=len(partitions),
            samples=sum(p.samples for p in partitions),
            shards=sum(len(p.shards) for p in partitions),
            raw_bytes=sum(p.raw_bytes for p in partitions),
            stored_bytes=sum(ref.size for p in partitions for ref in p.objects()),
        )


@dataclass(frozen=True, slots=True)
class Parent:
    """The version that another was packed onto; `tag` is None if it had none."""

    tag: str | None
    table: Digest


@dataclass(frozen=True, slots=True)
class VersionDocument:
    """What `versions/<tag>.json` says; `tag` is None for a version made from its table alone."""

    tag: str | None
    table: ObjectRef
    parent: Parent | None
    rule: Rule
    source_namespace: str
    recipe: Recipe
    content_revision: Digest
    totals: Totals
    created_at: str  # ISO 8601, UTC, whole seconds, "Z"
    message: str
    provenance: dict[str, str]  # tool and library versions
    replaces: str | None  # the tag that `latest` named when this version was made

    def __post_init__(self) -> None:
        if self.tag is not None:
            check_tag(self.tag)
        _check_time(self.created_at)


@dataclass(frozen=True, slots=True)
class Version:
    """A version: its document and the rows of its partition table, sorted by id."""

    document: VersionDocument
    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class TagRef:
    """A reference by tag."""

    tag: str

    def __post_init__(self) -> None:
        check_tag(self.tag)

    def __str__(self) -> str:
        return self.tag


@dataclass(frozen=True, slots=True)
class LatestRef:
    """The reference `latest`."""

    def __str__(self) -> str:
        return LATEST


@dataclass(frozen=True, slots=True)
class TableRef:
    """A reference by a prefix (8 digits or more) of a partition table's digest."""

    prefix: str

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise InvalidNameError(f"not 8 to 64 hexadecimal digits: {self.prefix!r}")

    def __str__(self) -> str:
        return f"sha256:{self.prefix}"


Ref = TagRef | LatestRef | TableRef


def parse_ref(text: str) -> Ref:
    """Read `latest`, `sha256:<8 or more digits>` or a tag; raise InvalidNameError otherwise."""
    if text == LATEST:
        return LatestRef()
    if text.startswith("sha256:"):
        return TableRef(text.removeprefix("sha256:"))
    return TagRef(text)
