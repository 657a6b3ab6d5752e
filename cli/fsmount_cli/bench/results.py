"""Giving out the result of a measurement."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fsmount_cli.common import print_json

Result = Mapping[str, Any]


def give(result: Result, output: str | None, show: Callable[[Result], None] | None) -> None:
    """Write `result` as JSON to the file `output`, if any, and `show` it, or print it as JSON."""
    if output is not None:
        with open(output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
            file.write("\n")
    if show is None:
        print_json(result)
    else:
        show(result)
