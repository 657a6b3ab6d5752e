"""Errors are one printable line, whatever a store or an archive has brought into them."""

from __future__ import annotations

import pytest

from fsmount import errors
from fsmount.errors import FsmountError, shortened

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, FsmountError)
]
HOSTILE = "a\nERROR forged\r\x1b[31mred\x1b]0;title\x07\u202e\x85\u2028é"


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_can_neither_break_its_line_nor_steer_a_terminal(kind: type[FsmountError]) -> None:
    text = str(kind(f"partition {HOSTILE}"))
    assert text.isprintable()
    assert text.startswith(r"partition a\nERROR forged\r\x1b[31mred")
    assert text.endswith("é")


def test_an_error_stays_readable_in_length() -> None:
    text = str(FsmountError(f"begin {'x' * 1_000_000} end"))
    assert len(text) < 4100
    assert text.startswith("begin ")
    assert text.endswith(" end")
    assert "996010 characters" in text


@pytest.mark.parametrize("length", [0, 200, 201, 1000])
def test_what_is_shortened_keeps_both_ends(length: int) -> None:
    text = "".join(chr(ord("a") + place % 26) for place in range(length))
    short = shortened(text)
    assert (short == text) is (length <= 200)
    assert short[:100] == text[:100]
    assert short[-100:] == text[-100:]
