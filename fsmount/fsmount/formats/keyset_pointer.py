"""A key-set's document: a named selection of a version's samples, bound to the version's table."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from fsmount.errors import FormatError, InvalidNameError
from fsmount.formats.checked import dump_document, get, get_optional, load_object
from fsmount.formats.document import check_format
from fsmount.model import FORMAT, Digest, ObjectRef

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Keyset:
    """What `keysets/<table>/<name>.json` says: where the keys are and how they were chosen."""

    name: str
    table: Digest
    keys: ObjectRef
    count: int
    where: str | None  # the SQL expression they were chosen by, if they were

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidNameError(
                f"not a key-set's name: {self.name!r} (letters, digits, '.', '_' and '-', "
                "at most 128, a letter or digit first)"
            )
        if self.count < 1:
            raise InvalidNameError(f"key-set {self.name!r} is empty")


def encode_pointer(keyset: Keyset) -> bytes:
    """The bytes of a key-set's document."""
    return dump_document({"format": FORMAT, **asdict(keyset)})


def decode_pointer(data: bytes) -> Keyset:
    """The key-set's document in `data`; FormatError if it is none."""
    value = load_object(data, "key-set")
    try:
        check_format(value)
        keys = get(value, "keys", dict)
        return Keyset(
            name=get(value, "name", str),
            table=Digest(get(value, "table", str)),
            keys=ObjectRef(Digest(get(keys, "digest", str)), get(keys, "size", int)),
            count=get(value, "count", int),
            where=get_optional(value, "where", str),
        )
    except (FormatError, InvalidNameError) as error:
        raise FormatError(f"key-set: {error}") from error
