"""JSON documents of our own: written one way, read with suspicion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from fsmount.errors import FormatError

T = TypeVar("T", int, str, bool, float, dict[str, Any], list[Any])


def dump_document(value: Mapping[str, object]) -> bytes:
    """A document for people and programs: sorted keys, indented, one newline at the end."""
    return (json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n").encode()


def dump_compact(value: object) -> str:
    """A value inside another format: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def load_object(data: bytes | str, what: str) -> dict[str, Any]:
    """The JSON object in `data`; FormatError naming `what` if there is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{what}: not a JSON object")
    return value


def get(value: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """The field `name`, which must be there and a `kind`; FormatError otherwise."""
    found = value.get(name)
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise FormatError(f"field {name!r} is missing or not of type {kind.__name__}")
    if isinstance(found, str) and not is_unicode(found):
        raise FormatError(f"field {name!r} is not Unicode")
    return found


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8: JSON's escapes can name half a surrogate pair."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def get_optional(value: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """The field `name`, or None where it is missing or null; FormatError for another type."""
    return None if value.get(name) is None else get(value, name, kind)
