"""Each test has a source, a store, and a cache of its own, where packs are remembered."""

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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Where a source is written."""
    return tmp_path / "source"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where the store is made."""
    return tmp_path / "store"
