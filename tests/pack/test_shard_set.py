"""The writer of shards: cuts as specified, and nothing written that exists."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsmount.errors import StoreWriteError
from fsmount.formats import sample
from fsmount.formats.cuts import cut
from fsmount.formats.manifest import Row
from fsmount.formats.shard import member_hash, member_order
from fsmount.model import Recipe
from fsmount.pack.shards import Encoded, ShardSet, Stored, verify_shard
from fsmount.store import Store

RECIPE = Recipe(shard_bytes=1000)
Finish = tuple[list[Row], tuple[Any, ...], tuple[bytes, ...]]

contents = st.dictionaries(
    st.integers(0, 30).map(str), st.one_of(st.integers(1, 300), st.integers(1, 1500)), max_size=25
).filter(len)


def encoded(key: str, size: int) -> Encoded:
    member = (key * size)[:size].encode()
    digest = hashlib.sha256(member).digest()
    row = Row(key, 0, 0, 0, 0, size, 0, digest, 0, (), None)
    return Encoded(row, b"even" if size % 2 == 0 else b"odd", sample.compress(member, 3))


class Trial:
    """Shards of one store, made of samples that are given by key and size."""

    def __init__(self, root: str) -> None:
        self.store = Store.create(root)
        self.finished: list[Stored] = []
        self.fetched: list[str] = []

    def write(self, sizes: dict[str, int], stored: Sequence[Stored] = ()) -> Finish:
        """Write the shards of samples, some of which may be stored already, and check them."""
        known = {item.row.key: item for item in stored}
        with (
            self.store.staging() as staging,
            ShardSet(
                self.store.objects, staging, RECIPE, self._fetch, self.finished.extend
            ) as shards,
        ):
            for key in member_order(sizes, RECIPE.order_seed):
                before = known.get(key)
                same = before is not None and before.row.raw_size == sizes[key]
                shards.add(before if before and same else encoded(key, sizes[key]))
            rows, refs, schemas = shards.finish()
            assert os.listdir(staging) == []
        for number, ref in enumerate(refs):
            self.store.objects.verify(ref)
            mine = [row for row in rows if row.shard == number]
            assert [row.index for row in mine] == list(range(ref.samples))
            verify_shard(self.store.objects.path(ref.digest), mine)
        assert [row.key for row in rows] == member_order(sizes, RECIPE.order_seed)
        return rows, refs, schemas

    def stored(self, done: Finish) -> list[Stored]:
        rows, refs, schemas = done
        return [Stored(row, schemas[row.schema], refs[row.shard]) for row in rows]

    def _fetch(self, item: Stored) -> bytes:
        self.fetched.append(item.row.key)
        data = self.store.objects.read(item.shard)
        return data[item.row.offset :][: item.row.size]

    def objects(self) -> set[str]:
        return {path.name for path in Path(self.store.path, "objects").rglob("*/*")}


@given(contents, contents, st.booleans())
@settings(max_examples=60)
def test_shards_of_a_change_are_those_of_a_fresh_start(
    before: dict[str, int], change: dict[str, int], small: bool
) -> None:
    after = {**before, **dict(list(change.items())[:1])} if small else change
    with TemporaryDirectory() as one, TemporaryDirectory() as two:
        trial, fresh = Trial(f"{one}/store"), Trial(f"{two}/store")
        old = trial.write(before)
        there = trial.objects()
        changed = trial.write(after, trial.stored(old))
        assert changed == fresh.write(after)
        hashes = [(member_hash(row.key, 0), row.raw_size) for row in changed[0]]
        assert [ref.samples for ref in changed[1]] == cut(hashes, RECIPE.shard_bytes)
        written = trial.objects() - there
        assert written == {ref.digest for ref in changed[1]} - {ref.digest for ref in old[1]}
        copied = set(trial.fetched)
        assert copied <= {row.key for row in changed[0] if changed[1][row.shard].digest in written}


@given(contents)
@settings(max_examples=20)
def test_every_shard_but_the_last_is_told_when_it_is_finished(sizes: dict[str, int]) -> None:
    with TemporaryDirectory() as directory:
        trial = Trial(f"{directory}/store")
        done = trial.write(sizes)
        assert trial.finished == [i for i in trial.stored(done) if i.shard != done[1][-1]]
        there = len(trial.finished)
        assert trial.write(sizes, trial.stored(done)) == done
        assert (trial.fetched, len(trial.finished)) == ([], there)


def test_a_shard_that_is_gone_is_written_again(tmp_path: Path) -> None:
    trial = Trial(str(tmp_path / "store"))
    sizes = {str(i): 300 for i in range(8)}
    done = trial.write(sizes)
    items = trial.stored(done)
    payloads = {item.row.key: encoded(item.row.key, 300).payload for item in items}
    gone = done[1][0]
    Path(trial.store.objects.path(gone.digest)).unlink()
    trial._fetch = lambda item: payloads[item.row.key]  # type: ignore[method-assign]
    assert trial.write(sizes, items) == done


@contextmanager
def failing(call: str, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Any:
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise error

        patch.setattr(os, call, fail)
        yield


@pytest.mark.parametrize("call", ["ftruncate", "pread"])
def test_a_failure_while_a_shard_is_cut_leaves_nothing_behind(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(str(tmp_path / "store"))
    with failing(call, monkeypatch, OSError(5, "broken")), pytest.raises(StoreWriteError):
        trial.write({str(i): 150 for i in range(40)})
    assert os.listdir(tmp_path / "store" / "staging") == []
