"""A reference model: whatever is done to a source, each version holds what it had when packed."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from npz_tree import Content, read_version, run_pack, write_sample

from fsmount.model import DirectoryRule, TagRef
from fsmount.store import Store

NAMES = ["top", "a/1", "a/2", "a/3", "b/1", "b/2", "b/c/1"]
CONTENTS = [None, b"{}", b'{"n": 1}', b'{"n": "x", "l": [1]}']
MODES = ["plain", "plain", "no base", "sync", "force", "replace", "old base"]


@dataclass(frozen=True)
class Write:
    """Add a sample, or write it anew in place: often with bytes of the same size."""

    key: str
    value: int
    sidecar: bytes | None


@dataclass(frozen=True)
class Remove:
    key: str


@dataclass(frozen=True)
class Touch:
    key: str


@dataclass(frozen=True)
class ChangeSidecar:
    key: str
    sidecar: bytes | None


@dataclass(frozen=True)
class Swap:
    """Two archives change names, each with its size, time and inode."""

    key: str
    other: str


Edit = Write | Remove | Touch | ChangeSidecar | Swap
KEYS, SIDECARS = st.sampled_from(NAMES), st.sampled_from(CONTENTS)
EDITS = st.one_of(
    st.builds(Write, KEYS, st.integers(0, 2), SIDECARS),
    st.builds(Remove, KEYS),
    st.builds(Touch, KEYS),
    st.builds(ChangeSidecar, KEYS, SIDECARS),
    st.builds(Swap, KEYS, KEYS),
)


def arrays(value: int) -> dict[str, np.ndarray]:
    """Few contents, so that samples change back to what they were; 2 is 0 with a text array."""
    texts = {"t": np.array("text")} if value == 2 else {}
    return {"x": np.arange(6, dtype=">i2").reshape(2, 3, order="F") * (value % 2), **texts}


class Packing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.source, self.store = self.root / "source", self.root / "store"
        self.now: dict[str, Content] = {}
        self.versions: list[dict[str, Content]] = []
        self.revisions: list[str] = []

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize()
    def begin(self) -> None:
        for i, key in enumerate(NAMES):
            self.edit(Write(key, i % 3, CONTENTS[i % 4]))
        self.pack("plain")

    @rule(edits=st.lists(EDITS, max_size=4), mode=st.sampled_from(MODES))
    def edit_and_pack(self, edits: list[Edit], mode: str) -> None:
        for edit in edits:
            self.edit(edit)
        if self.now:
            self.pack(mode)

    @rule()
    def delete_cache(self) -> None:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)

    @invariant()
    def every_version_is_what_it_was(self) -> None:
        for i, expected in enumerate(self.versions):
            assert read_version(self.store, f"v{i}") == expected
            for j, other in enumerate(self.versions[:i]):
                assert (self.revisions[i] == self.revisions[j]) == (expected == other)

    def edit(self, edit: Edit) -> None:
        archive, sidecar = (self.source / f"{edit.key}.{end}" for end in ("npz", "json"))
        match edit:
            case Write(key, value, data):
                sidecar.unlink(missing_ok=True)
                self.now[key] = write_sample(self.source, key, arrays(value), data)
            case _ if edit.key not in self.now:
                pass
            case Remove(key):
                archive.unlink()
                sidecar.unlink(missing_ok=True)
                del self.now[key]
            case Touch():
                os.utime(archive)
            case ChangeSidecar(key, data):
                sidecar.unlink(missing_ok=True)
                if data is not None:
                    sidecar.write_bytes(data)
                self.now[key] = replace(self.now[key], sidecar=data)
            case Swap(key, other) if other in self.now and other != key:
                self.swap(key, other)

    def swap(self, one: str, other: str) -> None:
        paths = [self.source / f"{key}.npz" for key in (one, other)]
        paths[0].rename(self.root / "aside")
        paths[1].rename(paths[0])
        (self.root / "aside").rename(paths[1])
        mine, theirs = self.now[one], self.now[other]
        self.now[one] = replace(theirs, sidecar=mine.sidecar)
        self.now[other] = replace(mine, sidecar=theirs.sidecar)

    def pack(self, mode: str) -> None:
        """Publish the next version, and see that there is nothing to do after that."""
        tag, old = f"v{len(self.versions)}", len(self.versions) // 2
        options = {
            "no base": {"base": None},
            "old base": {"base": TagRef(f"v{old}")},
            "sync": {"sync": True},
            "force": {"force": True},
            "replace": {"replace_all": True},
        }
        report = run_pack(self.source, self.store, tag, **options.get(mode, {}))
        below: dict[str, Content] = {}
        if self.versions and mode not in ("no base", "sync", "replace"):
            below = self.versions[old if mode == "old base" else -1]
        partition = DirectoryRule().partition_of
        here = {partition(key) for key in self.now}
        kept = {key: found for key, found in below.items() if partition(key) not in here}
        self.versions.append(kept | self.now)
        self.revisions.append(report.document.content_revision)
        assert Store.open(str(self.store)).latest() == tag
        again = run_pack(self.source, self.store, tag)
        assert (again.published, again.samples_read, again.built) == (False, 0, ())


TestPacking = pytest.mark.soak(pytest.mark.timeout(1800)(Packing.TestCase))
TestPacking.settings = settings(
    max_examples=300 if os.environ.get("FSMOUNT_SOAK") == "1" else 20,
    stateful_step_count=8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
