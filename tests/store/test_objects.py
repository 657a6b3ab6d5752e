from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsmount.errors import FormatError, IntegrityError, ObjectMissingError
from fsmount.model import Digest, ObjectRef
from fsmount.store import Objects, Store

DATA = b"some bytes that are an object"
CHUNKS = st.lists(st.binary(max_size=100) | st.just(b"x" * (1 << 20)), max_size=6)


def put(store: Store, data: bytes = DATA) -> ObjectRef:
    with store.staging() as staging:
        return store.objects.put(data, staging)


def overwrite(path: str, data: bytes) -> None:
    os.chmod(path, 0o644)
    Path(path).write_bytes(data)
    os.chmod(path, 0o444)


def names(store: Store, directory: str) -> list[str]:
    return sorted(p.name for p in Path(store.path, directory).rglob("*") if not p.is_dir())


def test_an_object_lies_under_its_digest_and_is_read_only(store: Store) -> None:
    ref = put(store)
    digest = hashlib.sha256(DATA).hexdigest()
    assert ref == ObjectRef(Digest(digest), len(DATA))
    path = Path(store.path, "objects", digest[:2], digest)
    assert path == Path(store.objects.path(ref.digest))
    assert path.stat().st_mode & 0o7777 == 0o444
    assert path.stat().st_nlink == 1
    assert store.objects.read(ref) == path.read_bytes() == DATA
    assert store.objects.has(ref)
    assert names(store, "staging") == []


@given(chunks=CHUNKS)
def test_a_writer_joins_its_chunks(chunks: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as root:
        store = Store.create(f"{root}/store")
        with store.staging() as staging, store.objects.writer(staging) as writer:
            for i, chunk in enumerate(chunks):
                assert writer.tell() == sum(map(len, chunks[:i]))
                writer.write(chunk)
            ref = writer.commit()
        assert store.objects.read(ref) == b"".join(chunks)
        assert ref.digest == hashlib.sha256(b"".join(chunks)).hexdigest()


def test_flushed_bytes_can_be_read_before_commit(store: Store) -> None:
    with store.staging() as staging, store.objects.writer(staging) as writer:
        writer.write(DATA)
        writer.flush()
        assert Path(writer.path).read_bytes() == DATA


def test_leaving_a_writer_without_commit_leaves_nothing(store: Store) -> None:
    with store.staging() as staging:
        with store.objects.writer(staging) as writer:
            writer.write(DATA)
        assert os.listdir(staging) == []
    assert names(store, "objects") == []


def test_an_existing_object_is_kept(store: Store) -> None:
    path = store.objects.path(put(store).digest)
    before = os.stat(path)
    put(store)
    assert (os.stat(path).st_ino, os.stat(path).st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not Path(store.path, "quarantine").exists()


def test_bytes_that_the_disk_gives_back_otherwise_are_no_object(store: Store) -> None:
    with store.staging() as staging, store.objects.writer(staging) as writer:
        writer.write(DATA)
        writer.flush()
        overwrite(writer.path, DATA[:-1] + b"?")
        with pytest.raises(IntegrityError, match="reads back"):
            writer.commit()
    assert names(store, "objects") == names(store, "staging") == []


@given(data=st.binary(min_size=1, max_size=64), bit=st.integers(0))
def test_any_flipped_bit_is_found_and_healed(data: bytes, bit: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        store = Store.create(f"{root}/store")
        ref = put(store, data)
        path = store.objects.path(ref.digest)
        damaged = bytearray(data)
        damaged[bit // 8 % len(data)] ^= 1 << bit % 8
        overwrite(path, bytes(damaged))
        store.objects.check(ref)  # size only
        for verify in (store.objects.verify, store.objects.read):
            with pytest.raises(IntegrityError, match="damaged") as caught:
                verify(ref)
            assert path in str(caught.value)
        assert put(store, data) == ref
        assert store.objects.read(ref) == data
        (kept,) = names(store, "quarantine")
        assert kept.startswith(ref.digest)
        assert Path(store.path, "quarantine", kept).read_bytes() == damaged


@pytest.mark.parametrize("size", [0, len(DATA) - 1, len(DATA) + 1])
def test_another_size_is_found_and_healed(store: Store, size: int) -> None:
    ref = put(store)
    overwrite(store.objects.path(ref.digest), (DATA + b"more")[:size])
    assert not store.objects.has(ref)
    for check in (store.objects.check, store.objects.verify, store.objects.read):
        with pytest.raises(IntegrityError, match=f"has {size} bytes instead of {len(DATA)}"):
            check(ref)
    put(store)
    store.objects.verify(ref)
    assert len(names(store, "quarantine")) == 1


def test_a_missing_object_is_found_and_healed(store: Store) -> None:
    ref = put(store)
    os.unlink(store.objects.path(ref.digest))
    assert not store.objects.has(ref)
    for check in (store.objects.check, store.objects.verify, store.objects.read):
        with pytest.raises(ObjectMissingError, match=ref.digest):
            check(ref)
    put(store)
    assert store.objects.read(ref) == DATA


def test_a_link_out_of_the_store_is_no_object(store: Store, tmp_path: Path) -> None:
    ref = put(store)
    outside = tmp_path / "outside"
    outside.write_bytes(DATA)
    os.unlink(store.objects.path(ref.digest))
    os.symlink(outside, store.objects.path(ref.digest))
    assert not store.objects.has(ref)
    for check in (store.objects.check, store.objects.verify, store.objects.read):
        with pytest.raises(FormatError, match="not a regular file"):
            check(ref)
    put(store)
    assert store.objects.read(ref) == DATA
    assert not os.path.islink(store.objects.path(ref.digest))


def test_a_fifo_does_not_block(store: Store) -> None:
    ref = put(store)
    os.unlink(store.objects.path(ref.digest))
    os.mkfifo(store.objects.path(ref.digest))
    with pytest.raises(FormatError):
        store.objects.read(ref)


def test_objects_can_be_sent_to_another_process(store: Store) -> None:
    ref = put(store)
    sent: Objects = pickle.loads(pickle.dumps(store.objects))  # noqa: S301
    assert sent == store.objects
    assert sent.read(ref) == DATA
    assert pickle.loads(pickle.dumps(store)) == store  # noqa: S301
