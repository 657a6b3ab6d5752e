"""Which samples of a version: an SQL expression, or a list of keys. Knows no store."""

from fsmount.select.keys import rows_of_keys
from fsmount.select.rows import ReadManifest, rows_where

__all__ = ["ReadManifest", "rows_of_keys", "rows_where"]
