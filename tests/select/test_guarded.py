"""What an expression may cost has a bound, and most of them need none."""

from __future__ import annotations

import pytest
from test_select import A, B, select

from fsmount.errors import PlanError
from fsmount.select.expression import Engine


@pytest.mark.parametrize(
    "where",
    [
        "label = 1 AND name LIKE '%x%' OR NOT gps.lat * 2 > -1",
        "lower(name)[1:2] = 'y' AND len(tags) > 0",
        "json_extract_string(decode(__sidecar__), '$.gps.lat')::DOUBLE BETWEEN 1 AND 2",
        "regexp_matches(name, '^[xy];') AND label IN (1, 2, 3)",
        "CASE WHEN label IS NULL THEN false ELSE label % 2 = 1 END",
    ],
)
def test_what_people_select_by_needs_no_process_of_its_own(where: str) -> None:
    with Engine() as engine:
        assert engine.parse(where).bounded


@pytest.mark.parametrize(
    ("where", "params", "expected"),
    [
        ("replace(name, 'x', 'y') = 'y;y'", None, [[0], []]),
        ("replace(name, ?, ?) = 'q;y'", ["x", "q"], [[0], []]),
        ("replace(name, $old, $new) = 'q;y'", {"old": "x", "new": "q"}, [[0], []]),
        ("repeat(name, 2) = 'none'", None, [[], []]),
    ],
)
def test_other_functions_select_as_well(
    where: str, params: object, expected: list[list[int]]
) -> None:
    with Engine() as engine:
        assert not engine.parse(where).bounded
    assert select(where, A, B, params=params) == expected


@pytest.mark.parametrize(
    "where",
    ["repeat(name, 1000000000) = 'x'", "len(range(1000000000)) > 3", "bar(1, 0, 1, 9e8) = 'x'"],
)
def test_memory_is_bounded(where: str) -> None:
    with pytest.raises(PlanError, match=r"(?i)memory|allocat|range") as caught:
        select(where, A)
    assert "\n" not in str(caught.value)


def test_time_is_bounded_and_the_error_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSMOUNT_WHERE_SECONDS", "0.5")
    where = "levenshtein(repeat('a', 300000), repeat(name, 300000)) > 0"
    with pytest.raises(PlanError, match=r"no answer in 0\.5 seconds; FSMOUNT_WHERE_SECONDS sets"):
        select(where, A)


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan"])
def test_a_limit_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSMOUNT_WHERE_SECONDS", text)
    with pytest.raises(PlanError, match=f"FSMOUNT_WHERE_SECONDS='{text}' is not"):
        select("repeat(name, 2) = 'none'", A)


def test_a_parameter_that_has_no_type_is_refused() -> None:
    with pytest.raises(PlanError, match="a parameter that Arrow has no type for"):
        select("replace(name, ?, 'y') = 'y;y'", A, params=[object()])
