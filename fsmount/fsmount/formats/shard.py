"""A shard: a deterministic tar of members.

USTAR headers, pax headers only where a name or a size needs them; mtime 0, mode 0444, no owner.
docs/format.md, "Shard", has the bytes.
"""

from __future__ import annotations

import hashlib
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
COMPONENT_MAX = 255  # bytes of a file's name
_HASH_DIGITS = 32
_TORN = re.compile("%[0-9A-F]?$")  # an escape that was cut in the middle
_CONTROL_OR_DOT = re.compile(r"[\x00-\x1f\x7f%.]")


def member_name(key: str) -> str:
    """The member's name for a sample's key.

    `%` and control characters anywhere, and dots in the last component, become `%XX`, since tar
    would print or WebDataset would split the name otherwise. `__this__/key` becomes
    `%5F_this__/key`, since WebDataset would skip it. A component that is too long for a
    file's name is cut and ends in a hash. The manifest has the true key.
    """
    directory, slash, last = key.rpartition("/")
    name = _CONTROL.sub(_percent, directory) + slash + _CONTROL_OR_DOT.sub(_percent, last)
    name = f"%5F{name[1:]}" if _META.match(name) else name
    *above, base = map(_fitting, name.split("/"), key.split("/"), _rooms(name))
    return "/".join([*above, base + SUFFIX])


def key_of(name: str) -> str:
    """The key of a member; FormatError unless `member_name` gives `name` for it.

    A name that was cut has lost its key, so it is a FormatError as well.
    """
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


def _rooms(name: str) -> list[int]:
    """How many bytes each component of a member's name may have, without the suffix."""
    return [COMPONENT_MAX] * name.count("/") + [COMPONENT_MAX - len(SUFFIX)]


def _fitting(component: str, original: str, room: int) -> str:
    """A component of a member's name in no more than `room` bytes; `original` is the key's."""
    data = component.encode()
    if len(data) <= room:
        return component
    end = f"%~{hashlib.sha256(original.encode()).hexdigest()[:_HASH_DIGITS]}"
    return _TORN.sub("", data[: room - len(end)].decode(errors="ignore")) + end


def _percent(match: re.Match[str]) -> str:
    return f"%{ord(match[0]):02X}"
