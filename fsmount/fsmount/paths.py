"""Where the files of a partition lie in a mounted version. Pure.

A partition's id is a path of the user's, and common readers of directory trees pass over some
names, or read a meaning into them: pyarrow and Spark skip what begins with `_` or `.`, a shell's
`*` and Hugging Face what begins with `.`, Spark what ends with `._COPYING_`; DuckDB's globs do not
find a name with a backslash; a directory `label=3` is a column `label` to DuckDB, pyarrow and
Spark; what lies in a directory `x.parquet` is read twice where a glob gives pyarrow the directory
too. So such characters are percent-encoded here, and nowhere else: `samples/` shows the user's own
names.
"""

from __future__ import annotations

import re

MANIFESTS = "manifests"
SHARDS = "shards"
MANIFEST_SUFFIX = ".parquet"

_ENCODED = re.compile(r"%([0-9A-F]{2})")
_MISREAD = re.compile(r"[%=\\]|(?<![^/])[_.]|\.(?=(?:_COPYING_|parquet|tar)(?:/|\Z))")


def encode_id(partition: str) -> str:
    """The relative path that stands for a partition's id in the mounted tree."""
    return _MISREAD.sub(lambda found: f"%{ord(found[0]):02X}", partition)


def decode_id(path: str) -> str:
    """The partition's id that `encode_id` has made `path` of."""
    return _ENCODED.sub(lambda found: chr(int(found[1], 16)), path)


def manifest_path(partition: str) -> str:
    """The path of a partition's manifest from the version's root."""
    return f"{MANIFESTS}/{encode_id(partition)}{MANIFEST_SUFFIX}"


def shard_path(partition: str, index: int) -> str:
    """The path of a partition's shard from the version's root; `index` is its place in the list."""
    return f"{SHARDS}/{encode_id(partition)}/{index:06d}.tar"


def partition_of(path: str) -> str | None:
    """The partition whose manifest or shard the file at `path` is; None if it is neither."""
    first, _, rest = path.partition("/")
    if first == MANIFESTS:
        return decode_id(rest.removesuffix(MANIFEST_SUFFIX))
    return decode_id(rest.rpartition("/")[0]) if first == SHARDS else None
