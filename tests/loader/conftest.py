"""Small versions to load."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from small_versions import build, numbered

settings.register_profile("loader", deadline=None)  # other work may share the machine
settings.load_profile("loader")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of our own for the plans of large versions."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """18 samples in shards of 10, 1 and 7."""
    root = tmp_path / "small"
    return build(root, {"a": [numbered(10)], "b/c": [numbered(1, 1)], "d": [numbered(7, 2)]})


@pytest.fixture(scope="session")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """103 samples in four partitions and six shards."""
    root = tmp_path_factory.mktemp("versions") / "larger"
    many = [numbered(30, 0), numbered(23, 1), numbered(20, 2), numbered(30, 3)]
    return build(
        root,
        {
            "p0": [many[0][:11], many[0][11:]],
            "p1": [many[1]],
            "p2": [many[2]],
            "p3": [many[3][:29], many[3][29:]],
        },
    )
