"""Which partition a key belongs to, by rules of which some come from a stranger."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsmount.errors import InvalidNameError
from fsmount.model import DepthRule, DirectoryRule, RegexRule
from fsmount.pack.grouping import partitions_of

KEYS = ["drive_1/a/0", "drive_2/b/1", "top", "é/x y", "a\nb/c"]


def by_python(pattern: str, key: str) -> str | None:
    """What a search with Python's `re` finds, which reads these patterns as RE2 does."""
    match = re.search(pattern, key)
    if match is None:
        return None
    return match["partition"] if "partition" in match.re.groupindex else match[match.re.groups > 0]


@pytest.mark.parametrize(
    "pattern",
    [
        "^[^/]+",
        "drive_([0-9])",
        "(?P<x>.)/(?P<partition>.)",
        "(zz)?a",
        "top|é",
        "(x)?(?P<partition>[a-z]+)_",
        "none",
        ".*",
    ],
)
def test_a_regular_expression_finds_what_pythons_would(pattern: str) -> None:
    expected = [by_python(pattern, key) or None for key in KEYS]
    assert list(partitions_of(RegexRule(pattern), KEYS)) == expected


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)))
def test_every_key_gets_its_answer_in_order(keys: list[str]) -> None:
    found = partitions_of(RegexRule("(?s).*"), keys)
    assert list(found) == [key or None for key in keys]


def test_the_other_rules() -> None:
    assert list(partitions_of(DirectoryRule(), ["a/b/c", "top"])) == ["a/b", "root_"]
    assert list(partitions_of(DepthRule(1), ["a/b/c", "top"])) == ["a", "root_"]


def test_nested_repeats_of_a_stranger_take_no_time() -> None:
    """Python's own `re` would need 2 to the power of 2,000 steps."""
    assert list(partitions_of(RegexRule("^(a|aa)+$"), ["a" * 2000 + "b"])) == [None]


@pytest.mark.parametrize("pattern", ["(", "(?=a)b", r"(a)\1", "a{1000}{1000}", "x{2000}"])
def test_what_re2_can_not_read_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(InvalidNameError, match="not a regular expression of RE2: '") as caught:
        partitions_of(RegexRule(pattern), KEYS)
    assert repr(pattern) in str(caught.value)


def test_the_partition_is_one_of_the_first_groups() -> None:
    assert list(partitions_of(RegexRule("(d)" * 8 + "(?P<partition>.)"), ["d" * 8 + "x"])) == ["x"]
    with pytest.raises(InvalidNameError, match="must be one of the first 9 groups"):
        partitions_of(RegexRule("(d)" * 9 + "(?P<partition>.)"), KEYS)


def test_a_pattern_is_of_bounded_size() -> None:
    RegexRule("a" * 1000)
    with pytest.raises(InvalidNameError, match="over 1000 characters"):
        RegexRule("[ab]" * 251)
