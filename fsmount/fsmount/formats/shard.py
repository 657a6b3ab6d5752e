"""A shard: a deterministic tar of members.

USTAR headers, pax headers only where a name or a size needs them; mtime 0, mode 0444, no owner.
docs/format.md, "Shard", has the bytes.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable
from urllib.parse import unquote

import xxhash

from fsmount.errors import FormatError, InvalidNameError
from fsmount.formats.sample import SUFFIX
from fsmount.model import check_key

BLOCK = 512
END = bytes(2 * BLOCK)
_CONTROL = re.compile(r"[\x00-\x1f\x7f%]")
_META = re.compile(r"__[^/]*__/")
_CONTROL_OR_DOT = re.compile(r"[\x00-\x1f\x7f%.]")


def member_name(key: str) -> str:
    """The member's name for a sample's key.

    `%` and control characters anywhere, and dots in the last component, become `%XX`, since tar
    would print or WebDataset would split the name otherwise. `__this__/key` becomes
    `%5F_this__/key`, since WebDataset would skip it. The manifest has the true key.
    """
    directory, slash, last = key.rpartition("/")
    name = _CONTROL.sub(_percent, directory) + slash + _CONTROL_OR_DOT.sub(_percent, last) + SUFFIX
    return f"%5F{name[1:]}" if _META.match(name) else name


def key_of(name: str) -> str:
    """The key of a member; FormatError unless it is a key and `member_name` gives `name` for it."""
    try:
        key = check_key(unquote(name.removesuffix(SUFFIX), errors="strict"))
    except (UnicodeDecodeError, InvalidNameError) as error:
        raise FormatError(f"not a member's name: {name!r}: {error}") from error
    if member_name(key) != name:
        raise FormatError(f"not a member's name: {name!r}")
    return key


def member_header(name: str, size: int) -> bytes:
    """The tar header (with a pax header in front where needed) of a member of `size` bytes."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o444
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def padding(size: int) -> bytes:
    """The zeros that fill a member's last block."""
    return bytes(-size % BLOCK)


def member_hash(key: str, seed: int) -> int:
    """What decides a member's place and where shards are cut: XXH3-64 of the key with `seed`."""
    return xxhash.xxh3_64_intdigest(key.encode(), seed=seed)


def member_order(keys: Iterable[str], seed: int) -> list[str]:
    """A partition's members in order: by hash with the recipe's seed, then by key."""
    return sorted(keys, key=lambda key: (member_hash(key, seed), key))


def _percent(match: re.Match[str]) -> str:
    return f"%{ord(match[0]):02X}"
