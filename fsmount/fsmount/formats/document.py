"""Version documents: `versions/<tag>.json` and VERSION.json of a mount."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from fsmount.errors import FormatError, InvalidNameError
from fsmount.formats.checked import dump_document, get, get_optional, is_unicode, load_object
from fsmount.model import (
    FORMAT,
    DepthRule,
    Digest,
    DirectoryRule,
    ObjectRef,
    Parent,
    Recipe,
    RegexRule,
    Rule,
    Totals,
    VersionDocument,
)


def encode(document: VersionDocument) -> bytes:
    """The bytes of `document`: one JSON object, sorted keys, indented by two."""
    return dump_document(
        {
            "format": FORMAT,
            "tag": document.tag,
            "table": asdict(document.table),
            "parent": None if document.parent is None else asdict(document.parent),
            "rule": rule_to_json(document.rule),
            "source_namespace": document.source_namespace,
            "recipe": recipe_to_json(document.recipe),
            "content_revision": document.content_revision,
            "totals": asdict(document.totals),
            "created_at": document.created_at,
            "message": document.message,
            "provenance": document.provenance,
            "replaces": document.replaces,
        }
    )


def decode(data: bytes) -> VersionDocument:
    """The document in `data`; FormatError if it is none, or one of another format."""
    value = load_object(data, "version document")
    try:
        check_format(value)
        return VersionDocument(
            tag=get_optional(value, "tag", str),
            table=_object_ref(get(value, "table", dict)),
            parent=_parent(get_optional(value, "parent", dict)),
            rule=rule_from_json(get(value, "rule", dict)),
            source_namespace=get(value, "source_namespace", str),
            recipe=recipe_from_json(get(value, "recipe", dict)),
            content_revision=Digest(get(value, "content_revision", str)),
            totals=_totals(get(value, "totals", dict)),
            created_at=get(value, "created_at", str),
            message=get(value, "message", str),
            provenance=_texts(get(value, "provenance", dict)),
            replaces=get_optional(value, "replaces", str),
        )
    except (FormatError, InvalidNameError) as error:
        raise FormatError(f"version document: {error}") from error


def check_format(value: dict[str, Any]) -> None:
    """Raise FormatError unless the document `value` is of the format this library writes."""
    if get(value, "format", int) != FORMAT:
        raise FormatError(f"format {value['format']}, but this release reads format {FORMAT} only")


def recipe_to_json(recipe: Recipe) -> dict[str, Any]:
    """`recipe` as a JSON object."""
    return asdict(recipe)


def recipe_from_json(value: dict[str, Any]) -> Recipe:
    """The recipe in a JSON object; FormatError or InvalidNameError otherwise."""
    recipe = Recipe(
        codec=get(value, "codec", str),
        level=get(value, "level", int),
        shard_bytes=get(value, "shard_bytes", int),
        order_seed=get(value, "order_seed", int),
        format=get(value, "format", int),
    )
    check_format(value)
    return recipe


def rule_to_json(rule: Rule) -> dict[str, Any]:
    """`rule` as a JSON object."""
    match rule:
        case DirectoryRule():
            return {"kind": "directory"}
        case DepthRule(depth):
            return {"kind": "depth", "depth": depth}
        case RegexRule(pattern):
            return {"kind": "regex", "pattern": pattern}


def rule_from_json(value: dict[str, Any]) -> Rule:
    """The partition rule in a JSON object; FormatError or InvalidNameError otherwise."""
    match get(value, "kind", str):
        case "directory":
            return DirectoryRule()
        case "depth":
            return DepthRule(get(value, "depth", int))
        case "regex":
            return RegexRule(get(value, "pattern", str))
        case other:
            raise FormatError(f"unknown partition rule {other!r}")


def _object_ref(value: dict[str, Any]) -> ObjectRef:
    return ObjectRef(Digest(get(value, "digest", str)), get(value, "size", int))


def _parent(value: dict[str, Any] | None) -> Parent | None:
    if value is None:
        return None
    return Parent(get_optional(value, "tag", str), Digest(get(value, "table", str)))


def _totals(value: dict[str, Any]) -> Totals:
    return Totals(**{field.name: get(value, field.name, int) for field in fields(Totals)})


def _texts(value: dict[str, Any]) -> dict[str, str]:
    if not all(map(is_unicode, value)):
        raise FormatError("a name in the provenance is not Unicode")
    return {name: get(value, name, str) for name in value}
