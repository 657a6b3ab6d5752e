"""A reference model: whatever is done to a source, each version holds what it had when packed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from npz_tree import Content, read_version, run_pack, write_sample

from fsmount.model import DirectoryRule, LatestRef, TagRef
from fsmount.store import Store

KEYS = st.sampled_from(["top", "a/1", "a/2", "a/3", "b/1", "b/2", "b/c/1"])
VALUES = st.integers(0, 2)
SIDECARS = st.sampled_from([None, b"{}", b'{"n": 1}', b'{"n": "x", "l": [1]}'])
MODES = st.sampled_from(["", "", "no base", "sync", "force", "replace", "old base"])


def arrays(value: int) -> dict[str, np.ndarray]:
    """Few contents, so that samples change back to what they were; value 2 has a text array."""
    texts = {"t": np.array("text")} if value == 2 else {}
    return {"x": np.arange(6, dtype=">i2").reshape(2, 3, order="F") * (value % 2), **texts}


class Packing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.source, self.store = self.root / "source", self.root / "store"
        self.now: dict[str, Content] = {}
        self.versions: dict[str, dict[str, Content]] = {}
        self.revisions: dict[str, str] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(key=KEYS, value=VALUES, sidecar=SIDECARS)
    def write(self, key: str, value: int, sidecar: bytes | None) -> None:
        """Add a sample, or write it anew in place: often with bytes of the same size."""
        (self.source / f"{key}.json").unlink(missing_ok=True)
        self.now[key] = write_sample(self.source, key, arrays(value), sidecar)

    @rule(key=KEYS, sidecar=SIDECARS)
    def change_sidecar(self, key: str, sidecar: bytes | None) -> None:
        if key in self.now:
            path = self.source / f"{key}.json"
            path.unlink(missing_ok=True)
            if sidecar is not None:
                path.write_bytes(sidecar)
            self.now[key] = replace(self.now[key], sidecar=sidecar)

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        if self.now.pop(key, None) is not None:
            (self.source / f"{key}.npz").unlink()
            (self.source / f"{key}.json").unlink(missing_ok=True)

    @rule(key=KEYS)
    def touch(self, key: str) -> None:
        if key in self.now:
            os.utime(self.source / f"{key}.npz")

    @rule(one=KEYS, other=KEYS)
    def swap(self, one: str, other: str) -> None:
        """Two samples change places, each with its size, time and inode."""
        if one in self.now and other in self.now and one != other:
            paths = [self.source / f"{key}.npz" for key in (one, other)]
            paths[0].rename(self.root / "aside")
            paths[1].rename(paths[0])
            (self.root / "aside").rename(paths[1])
            mine, theirs = self.now[one], self.now[other]
            self.now[one] = replace(theirs, sidecar=mine.sidecar)
            self.now[other] = replace(mine, sidecar=theirs.sidecar)

    @rule()
    def delete_cache(self) -> None:
        shutil.rmtree(self.store / "cache", ignore_errors=True)

    @precondition(lambda self: self.now)
    @rule(mode=MODES)
    def pack(self, mode: str) -> None:
        tag = f"v{len(self.versions)}"
        base = f"v{len(self.versions) // 2}" if mode == "old base" else None
        options = {
            "no base": {"base": None},
            "old base": {"base": TagRef(base or "v0") if self.versions else None},
            "sync": {"sync": True},
            "force": {"force": True},
            "replace": {"replace_all": True},
        }.get(mode, {})
        below = self._base_of(mode, base)
        report = run_pack(self.source, self.store, tag, **options)
        here = {DirectoryRule().partition_of(key) for key in self.now}
        kept = {k: c for k, c in below.items() if DirectoryRule().partition_of(k) not in here}
        self.versions[tag] = kept | self.now
        self.revisions[tag] = report.document.content_revision
        assert Store.open(str(self.store)).latest() == tag
        if mode != "force":
            again = run_pack(self.source, self.store, tag, base=LatestRef())
            assert (again.samples_read, again.built, again.refreshed) == (0, (), ())
            assert not again.published

    def _base_of(self, mode: str, base: str | None) -> dict[str, Content]:
        """What a version keeps of where the source has nothing."""
        if mode in ("no base", "sync", "replace") or not self.versions:
            return {}
        return self.versions[base or f"v{len(self.versions) - 1}"]

    @invariant()
    def every_version_is_what_it_was(self) -> None:
        for tag, expected in self.versions.items():
            assert read_version(self.store, tag) == expected
        for tag, revision in self.revisions.items():
            for other in self.revisions:
                same = self.versions[tag] == self.versions[other]
                assert (revision == self.revisions[other]) == same


TestPacking = Packing.TestCase
TestPacking.settings = settings(
    max_examples=int(os.environ.get("FSMOUNT_SOAK", "0")) * 500 or 25,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_content_compares_every_bit() -> None:
    """The model is worth as much as its equality."""
    one = json.dumps([repr(arrays(value)) for value in range(3)])
    assert one.count("array") == 4
