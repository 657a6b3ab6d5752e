"""What packs are remembered is each test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    """The user's cache."""
    path = tmp_path / "user-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(path))
        yield path
