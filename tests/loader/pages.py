"""The examples of the documentation, run on a small version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from small_versions import Sample, build, numbered


def run_examples(page: str, folder: Path) -> dict[str, Any]:
    """Run the Python blocks of `page`, one after the other, and return the names that they leave.

    /mnt/ds is a version of eight samples, whose sidecars have a label.
    """
    samples = [Sample(s.name, s.arrays, {**(s.sidecar or {}), "label": 0}) for s in numbered(8)]
    root = build(folder / "ds", {"a": [samples]})
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block.replace("/mnt/ds", str(root)), names)  # noqa: S102 - our own page
    return names
