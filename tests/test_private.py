"""Which directories count as this user's alone, and where the cache is."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from fsmount.private import (
    cache_directory,
    home_directory,
    is_private,
    open_private,
    private_directory,
    replace_file,
    shrink,
)

OTHER = 54321


def test_a_fresh_directory_is_made_private(tmp_path: Path) -> None:
    made = private_directory(str(tmp_path / "a" / "b"))
    assert made == str(tmp_path / "a" / "b")
    assert os.stat(made).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_may_write_is_not_private(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert not is_private(str(tmp_path))


@pytest.mark.parametrize(
    ("mode", "private"), [(0o755, True), (0o1777, True), (0o775, False), (0o777, False)]
)
def test_others_may_write_above_only_where_it_is_sticky(
    tmp_path: Path, mode: int, private: bool
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir(mode=0o700)
    tmp_path.chmod(mode)
    assert is_private(str(inner)) is private


@pytest.mark.skipif(os.geteuid() != 0, reason="gives directories away")
def test_a_directory_of_another_user_is_not_private(tmp_path: Path) -> None:
    inner = tmp_path / "theirs" / "inner"
    inner.mkdir(parents=True, mode=0o755)
    os.chown(tmp_path / "theirs", OTHER, OTHER)
    assert not is_private(str(inner))
    assert not is_private(str(tmp_path / "theirs"))


def test_links_are_resolved_before_they_are_judged(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "link").symlink_to(open_to_all)
    assert private_directory(str(tmp_path / "link")) is None
    assert not is_private(str(tmp_path / "link"))


def test_what_is_no_directory_is_not_private(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert private_directory(str(tmp_path / "file")) is None
    assert private_directory("relative") is None
    assert not is_private(str(tmp_path / "missing"))


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_directory("plans") == str(tmp_path / "cache" / "fsmount" / "plans")
    tmp_path.chmod(0o777)
    assert cache_directory("plans") is None


def test_without_a_named_cache_it_is_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory("paths") == str(tmp_path / ".cache" / "fsmount" / "paths")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives directories away")
def test_root_does_not_use_the_home_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, OTHER, OTHER)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_directory() not in (None, str(tmp_path))


def test_what_is_made_is_private_under_any_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        assert cache_directory("plans", "deep") is not None
    finally:
        os.umask(before)
    made = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 4


def test_a_file_that_others_could_write_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    path.chmod(0o644)
    os.close(open_private(str(path)))
    path.chmod(0o664)
    with pytest.raises(PermissionError, match="this user alone"):
        open_private(str(path))
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "fifo", "."):
        with pytest.raises(OSError, match=r"link|alone"):
            open_private(str(tmp_path / name))


def test_a_cache_is_bounded(tmp_path: Path) -> None:
    long_ago = time.time() - 86400
    for number in range(4):
        path = tmp_path / str(number)
        path.write_bytes(bytes(100))
        os.utime(path, (long_ago + number, long_ago + number))
    (tmp_path / "new").write_bytes(bytes(1000))
    shrink(str(tmp_path), 1250)
    assert sorted(os.listdir(tmp_path)) == ["2", "3", "new"]
    shrink(str(tmp_path), 0)
    assert os.listdir(tmp_path) == ["new"]
    shrink(str(tmp_path / "missing"), 0)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(str(path), b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as a disk that is full
    try:
        with pytest.raises(OSError, match="File too large"):
            replace_file(str(path), bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
