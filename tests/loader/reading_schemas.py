"""Schemas of headers, read as those of one manifest."""

from __future__ import annotations

from collections.abc import Iterable

from fsmount_loader.schema_reading import SchemaReading
from fsmount_loader.schemas import Schemas


def read_schemas(headers: Iterable[bytes]) -> Schemas:
    """The schemas of `headers`, which are distinct."""
    reading = SchemaReading()
    reading.places(headers)
    return reading.schemas()
