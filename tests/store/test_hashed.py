"""An object is hashed once for each state of its file, and damage to it is found."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from fsmount.errors import IntegrityError, ObjectMissingError
from fsmount.model import Digest, ObjectRef
from fsmount.store import Store, hashed
from fsmount.store.hashed import Hashed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fsmount" / "hashed"


def put(store: Store, data: bytes) -> ObjectRef:
    with store.staging() as staging:
        return store.objects.put(data, staging)


def damage(store: Store, ref: ObjectRef) -> bytes:
    """Change a byte in place, and put the time back as it was."""
    path = store.objects.path(ref.digest)
    before, data = os.stat(path), Path(path).read_bytes()
    os.chmod(path, 0o644)
    Path(path).write_bytes(bytes([data[0] ^ 1]) + data[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return data


def knows(store: Store, ref: ObjectRef) -> bool:
    return Hashed.of(store.path).knows(ref.digest, os.stat(store.objects.path(ref.digest)))


def test_what_was_written_here_need_not_be_hashed(store: Store, cache: Path) -> None:
    ref = put(store, b"bytes")
    assert knows(store, ref)
    (kept,) = cache.iterdir()
    kept.unlink()
    assert not knows(store, ref)
    store.objects.prove(ref, Hashed.of(store.path))
    assert knows(store, ref)


def test_an_unchanged_object_is_not_read(
    store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(*_: Any) -> None:
        pytest.fail("it was hashed")

    del cache
    ref = put(store, b"bytes")
    monkeypatch.setattr("hashlib.file_digest", unread)
    store.objects.prove(ref, Hashed.of(store.path))


def test_damage_is_found_and_healed(store: Store, cache: Path) -> None:
    del cache
    ref = put(store, b"bytes")
    before = Hashed.of(store.path)
    data = damage(store, ref)
    for known in (before, Hashed.of(store.path)):
        with pytest.raises(IntegrityError, match="is damaged"):
            store.objects.prove(ref, known)
        assert not store.objects.is_sound(ref, known)
    assert put(store, data) == ref
    assert store.objects.is_sound(ref, Hashed.of(store.path))
    os.unlink(store.objects.path(ref.digest))
    with pytest.raises(ObjectMissingError):
        store.objects.prove(ref, before)


def test_an_object_that_was_there_is_not_taken_for_ours(store: Store, cache: Path) -> None:
    """Its file is another than the one that was written and hashed."""
    path = Path(store.objects.path(put(store, b"bytes").digest))
    copy = path.with_name("copy")
    copy.write_bytes(b"bytes")
    copy.rename(path)
    (kept,) = cache.iterdir()
    kept.unlink()
    ref = put(store, b"bytes")
    assert not knows(store, ref)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_others_could_write_is_not_believed(store: Store, cache: Path) -> None:
    ref = put(store, b"bytes")
    (kept,) = cache.iterdir()
    os.chown(kept, 1234, -1)
    assert not knows(store, ref)
    os.chown(kept, 0, -1)
    assert knows(store, ref)
    cache.chmod(0o777)
    assert not knows(store, ref)


def test_without_a_private_directory_it_is_known_to_this_process(store: Store, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    ref = put(store, b"bytes")
    mine = Hashed.of(store.path)
    found = os.stat(store.objects.path(ref.digest))
    assert not mine.knows(ref.digest, found)
    store.objects.prove(ref, mine)
    assert mine.knows(ref.digest, found)
    assert pickle.loads(pickle.dumps(mine)).knows(ref.digest, found)  # noqa: S301
    assert not Hashed.of(store.path).knows(ref.digest, found)
    assert os.listdir(cache) == []


def test_its_files_are_bounded(store: Store, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed, "_FILE_MAX", 640)
    found = os.stat(store.path)
    digests = [Digest(f"ab{number:062x}") for number in range(40)]
    mine = Hashed.of(store.path)
    for digest in digests:
        mine.note(digest, found)
    (kept,) = cache.iterdir()
    assert kept.stat().st_size <= 640
    again = Hashed.of(store.path)
    assert again.knows(digests[-1], found)
    assert not again.knows(digests[0], found)
