"""Which partition each key belongs to, by a version's rule."""

from __future__ import annotations

import re
from collections.abc import Sequence

import duckdb
import pyarrow as pa

from fsmount.errors import InvalidNameError
from fsmount.model import RegexRule, Rule

_GROUPS = 9  # that DuckDB can be asked for


def partitions_of(rule: Rule, keys: Sequence[str]) -> Sequence[str | None]:
    """The partition id of each of `keys` by `rule`, None where the rule leaves the sample out.

    A rule may come from the version document of a stranger, so a regular expression is searched
    for by RE2, whose time is linear in the key whatever the pattern. InvalidNameError for a pattern
    that is none.
    """
    if not isinstance(rule, RegexRule):
        return [rule.partition_of(key) for key in keys]
    table = pa.table({"key": pa.array(keys, pa.string())})
    group = _group(rule.pattern)
    with duckdb.connect() as connection:
        connection.register("keys", table)
        try:
            found = connection.execute(
                "SELECT regexp_extract(key, ?, ?) FROM keys", [rule.pattern, group]
            ).fetchall()
        except duckdb.Error as error:
            raise _refusal(rule.pattern, error) from None
    return [text or None for (text,) in found]


def _group(pattern: str) -> int:
    """The number of the group that names the partition, 0 for the whole match."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise _refusal(pattern, error) from None
    group = compiled.groupindex.get("partition", min(compiled.groups, 1))
    if group > _GROUPS:
        raise InvalidNameError(
            f"{pattern!r}: 'partition' must be one of the first {_GROUPS} groups; write (?:…) for "
            "those that name nothing"
        )
    return group


def _refusal(pattern: str, error: Exception) -> InvalidNameError:
    return InvalidNameError(f"not a regular expression of RE2: {pattern!r}: {error}")
