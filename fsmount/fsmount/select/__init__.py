"""Which samples of a version: an SQL expression, or a list of keys. Knows no store."""

from fsmount.select.columns import ManifestData, ReadManifest, no_such, read_ahead, read_columns
from fsmount.select.keys import rows_of_keys
from fsmount.select.rows import rows_where

__all__ = [
    "ManifestData",
    "ReadManifest",
    "no_such",
    "read_ahead",
    "read_columns",
    "rows_of_keys",
    "rows_where",
]
