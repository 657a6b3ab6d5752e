"""What every driver must do: a suite that a test module subclasses, with a fixture of a real mount.

    @pytest.fixture(scope="module")
    def mounted(tmp_path_factory): ...; yield MountedVersion(mountpoint, store, version)

    class TestMyDriver(DriverSuite): ...

The version is the one that `mounted_version.publish_sample_version` makes, mounted with its own
user and with `samples/` not listed. The suite knows nothing of the driver; it looks through the
kernel only.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fsmount.model import ObjectRef
from fsmount.testing import tiny
from fsmount.testing.directories import DirectoryStream
from fsmount.testing.mounted_version import MANY, ODD_NAMES, MountedVersion
from fsmount.vfs.attrs import nanoseconds

READS_A_FILE = 400
LATE_SECONDS = 10.0  # in which a new name must be listed


def _expect(code: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is checked below
        call()
    assert caught.value.errno == code, os.strerror(caught.value.errno or 0)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _drop_cached_pages(fd: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _walk(root: str) -> Iterator[str]:
    """Every path below `root`, directories too."""
    for directory, subdirectories, files in os.walk(root, onerror=_raise):
        for name in (*subdirectories, *files):
            yield os.path.join(directory, name)


def _raise(error: OSError) -> None:
    raise error


class DriverSuite:
    """Subclass it and give it the fixture `mounted`."""

    # What is there.

    def test_shows_exactly_the_version(self, mounted: MountedVersion) -> None:
        found = {os.path.relpath(p, mounted.root) for p in _walk(mounted.root)}
        files = mounted.files()
        above = {path.rsplit("/", n)[0] for path in files for n in range(1, path.count("/") + 1)}
        assert found == {*files, *above, "keysets"}

    def test_every_file_has_its_bytes(self, mounted: MountedVersion) -> None:
        for path, content in mounted.files().items():
            expected = (
                _read(mounted.store.objects.path(content.digest))
                if isinstance(content, ObjectRef)
                else content
            )
            assert _read(f"{mounted.root}/{path}") == expected, path

    def test_attributes(self, mounted: MountedVersion) -> None:
        time_ns = nanoseconds(mounted.version.document.created_at)
        for path in (mounted.root, *_walk(mounted.root)):
            found = os.lstat(path)
            is_directory = stat.S_ISDIR(found.st_mode)
            assert found.st_mtime_ns == found.st_atime_ns == found.st_ctime_ns == time_ns
            assert stat.S_IMODE(found.st_mode) == (0o555 if is_directory else 0o444)
            assert (found.st_uid, found.st_gid) == (os.geteuid(), os.getegid())
            assert found.st_blocks == -(-found.st_size // 512)
            if is_directory:
                inside = [entry for entry in os.scandir(path) if entry.is_dir()]
                assert found.st_nlink == 2 + len(inside)
            else:
                assert found.st_nlink == 1

    def test_sizes(self, mounted: MountedVersion) -> None:
        for shown, real in mounted.objects():
            assert os.path.getsize(shown) == os.path.getsize(real)

    def test_inodes_are_unique_and_the_same_in_listing_and_stat(
        self, mounted: MountedVersion
    ) -> None:
        seen = self._inodes(mounted.root)
        assert len(set(seen.values())) == len(seen)

    def test_inodes_survive_dropped_caches(self, mounted: MountedVersion) -> None:
        roots = (mounted.root, f"{mounted.root}/samples")  # which is not listed
        before = [self._inodes(root) for root in roots]
        assert not set(before[0].values()) & set(before[1].values())
        if os.geteuid() != 0:
            pytest.skip("only root can drop the kernel's caches")
        with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as control:
            control.write("2")
        assert [self._inodes(root) for root in roots] == before

    def test_disk_usage_is_the_sum_of_the_files(self, mounted: MountedVersion) -> None:
        everything = [mounted.root, *_walk(mounted.root)]
        blocks = sum(os.lstat(path).st_blocks for path in everything)
        files = [path for path in everything if os.path.isfile(path)]
        assert blocks == sum(-(-os.path.getsize(path) // 512) for path in files)

    def test_file_system_is_full_and_large_enough(self, mounted: MountedVersion) -> None:
        found = os.statvfs(mounted.root)
        everything = list(_walk(mounted.root))
        assert found.f_bavail == found.f_bfree == found.f_ffree == 0
        assert found.f_blocks * found.f_frsize >= sum(os.path.getsize(p) for p in everything)
        assert found.f_files >= len(mounted.files())
        assert found.f_namemax == 255

    def _inodes(self, root: str) -> dict[str, int]:
        found = {root: os.stat(root).st_ino}
        for directory, _, _ in os.walk(root):
            with DirectoryStream(directory) as stream:
                entries = {entry.name: entry for entry in stream}
            assert entries.pop(b".").inode == found[directory]
            above = entries.pop(b"..").inode
            assert directory == root or above == found[os.path.dirname(directory)]
            for name, entry in entries.items():
                path = os.path.join(directory, os.fsdecode(name))
                info = os.lstat(path)
                assert info.st_ino == entry.inode
                assert entry.type == stat.S_IFMT(info.st_mode) >> 12
                found[path] = info.st_ino
        return found

    # Large directories.

    def test_lists_thousands_of_names_once_each(self, mounted: MountedVersion) -> None:
        names = os.listdir(f"{mounted.root}/samples/many")
        with_sidecar = MANY // 2
        assert len(names) == len(set(names)) == 2 * MANY + with_sidecar
        assert "000000.json" in names
        assert "000001.json" not in names

    def test_a_listing_resumes_where_it_was_told(self, mounted: MountedVersion) -> None:
        with DirectoryStream(f"{mounted.root}/samples/many") as stream:
            head = [next(stream).name for _ in range(1000)]
            place = stream.tell()
            tail = [entry.name for entry in stream]
            stream.seek(place)
            again = [entry.name for entry in stream]
            stream.rewind()
            whole = [entry.name for entry in stream]
        assert again == tail
        assert whole == head + tail

    # Reads.

    def test_random_reads_equal_those_of_the_object(self, mounted: MountedVersion) -> None:
        rng = random.Random(1)  # noqa: S311 - not for secrets
        for shown, real in mounted.objects():
            size = os.path.getsize(real)
            with open(shown, "rb", 0) as a, open(real, "rb", 0) as b:
                for at in range(READS_A_FILE):
                    offset = rng.randrange(size + 2)
                    length = rng.choice((0, 1, rng.randrange(5000), rng.randrange(size + 10)))
                    if at % 20 == 0:
                        _drop_cached_pages(a.fileno())
                    mine = os.pread(a.fileno(), length, offset)
                    assert mine == os.pread(b.fileno(), length, offset), (shown, offset, length)

    def test_reads_at_and_behind_the_end(self, mounted: MountedVersion) -> None:
        shown, real = mounted.largest()
        size = os.path.getsize(real)
        fd = os.open(shown, os.O_RDONLY)
        try:
            assert os.pread(fd, 10, size) == b""
            assert os.pread(fd, 10, size + 10**9) == b""
            assert os.pread(fd, 0, 0) == b""
            assert os.pread(fd, 10, size - 3) == _read(real)[-3:]
            assert os.lseek(fd, 0, os.SEEK_END) == size
            assert os.read(fd, 1) == b""
        finally:
            os.close(fd)

    def test_parallel_readers_while_the_cache_is_dropped(self, mounted: MountedVersion) -> None:
        shown, real = mounted.largest()
        expected = _read(real)
        done = threading.Event()

        def drop() -> None:
            with open(shown, "rb", 0) as file:
                while not done.is_set():
                    _drop_cached_pages(file.fileno())

        def read(seed: int) -> bool:
            rng = random.Random(seed)  # noqa: S311 - not for secrets
            with open(shown, "rb", 0) as file:
                for _ in range(200):
                    offset = rng.randrange(len(expected))
                    length = rng.randrange(300_000)
                    if os.pread(file.fileno(), length, offset) != expected[offset:][:length]:
                        return False
            return True

        dropping = threading.Thread(target=drop)
        dropping.start()
        try:
            with ThreadPoolExecutor(8) as pool:
                assert all(pool.map(read, range(8)))
        finally:
            done.set()
            dropping.join()

    @pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
    def test_mmap(self, mounted: MountedVersion, flags: int) -> None:
        shown, real = mounted.largest()
        sample = f"{mounted.root}/samples/many/000007.safetensors"
        for path, expected in ((shown, _read(real)), (sample, _read(sample))):
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ)
            with mapped:
                assert mapped[:] == expected
                mapped.madvise(mmap.MADV_DONTNEED)
                assert mapped[:] == expected

    def test_sendfile(self, mounted: MountedVersion) -> None:
        shown, real = mounted.largest()
        expected = _read(real)[:100_000]
        ours, theirs = socket.socketpair()
        with ours, theirs, open(shown, "rb") as file:
            received = bytearray()
            sent = 0
            while sent < len(expected):
                sent += os.sendfile(ours.fileno(), file.fileno(), sent, len(expected) - sent)
                while len(received) < sent:
                    received += theirs.recv(1 << 16)
        assert received == expected

    def test_many_open_files(self, mounted: MountedVersion) -> None:
        shown, real = mounted.largest()
        head = _read(real)[:100]
        files = [os.open(shown, os.O_RDONLY) for _ in range(800)]
        try:
            assert all(os.pread(fd, 100, 0) == head for fd in files)
        finally:
            for fd in files:
                os.close(fd)

    def test_locks(self, mounted: MountedVersion) -> None:
        shown, _ = mounted.largest()
        with open(shown, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            fcntl.flock(file, fcntl.LOCK_UN)

    # Names that are not listed, or not yet.

    def test_samples_are_reached_by_name(self, mounted: MountedVersion) -> None:
        root = f"{mounted.root}/samples"
        assert "samples" not in os.listdir(mounted.root)
        assert os.path.isdir(root)
        for partition in ODD_NAMES:
            number = 2
            path = f"{root}/{partition}/s {number}.x"
            expected = tiny.numbered("", number)
            with np.load(f"{path}.npz") as arrays:
                assert sorted(arrays.files) == sorted(expected.arrays)
                for name, array in expected.arrays.items():
                    assert np.array_equal(arrays[name], array)
            assert _read(f"{path}.json") == expected.sidecar
            for suffix in ("npz", "safetensors", "json"):
                assert os.path.getsize(f"{path}.{suffix}") == len(_read(f"{path}.{suffix}"))

    def test_a_keyset_appears_while_mounted(self, mounted: MountedVersion) -> None:
        path = f"{mounted.root}/keysets/late.parquet"
        assert not os.path.exists(path)
        keyset = tiny.put_keyset(mounted.store, mounted.version, "late", ["large/0"])
        assert _read(path) == _read(mounted.store.objects.path(keyset.keys.digest))
        until = time.monotonic() + LATE_SECONDS
        while os.listdir(f"{mounted.root}/keysets") != ["late.parquet"]:  # an older listing
            assert time.monotonic() < until
            time.sleep(0.02)

    # Errors.

    def test_no_such_name(self, mounted: MountedVersion) -> None:
        for path in ("nothing", "shards/nothing/x", "samples/many/none.npz", "samples/many/000001"):
            _expect(errno.ENOENT, lambda path=path: os.stat(f"{mounted.root}/{path}"))  # type: ignore[misc]
        latin = os.fsencode(mounted.root) + b"/\xff\xfe"
        _expect(errno.ENOENT, lambda: os.stat(latin))

    def test_not_a_directory(self, mounted: MountedVersion) -> None:
        _expect(errno.ENOTDIR, lambda: os.stat(f"{mounted.root}/VERSION.json/x"))
        _expect(errno.ENOTDIR, lambda: os.listdir(f"{mounted.root}/VERSION.json"))

    def test_is_a_directory(self, mounted: MountedVersion) -> None:
        fd = os.open(f"{mounted.root}/shards", os.O_RDONLY)
        try:
            _expect(errno.EISDIR, lambda: os.read(fd, 1))
        finally:
            os.close(fd)

    def test_not_a_link(self, mounted: MountedVersion) -> None:
        _expect(errno.EINVAL, lambda: os.readlink(f"{mounted.root}/VERSION.json"))

    def test_no_extended_attributes(self, mounted: MountedVersion) -> None:
        path = f"{mounted.root}/VERSION.json"
        _expect(errno.ENOTSUP, lambda: os.getxattr(path, "user.x"))
        _expect(errno.ENOTSUP, lambda: os.listxattr(path))

    def test_every_change_is_refused(self, mounted: MountedVersion) -> None:
        file, directory = f"{mounted.root}/VERSION.json", f"{mounted.root}/shards"
        new = f"{mounted.root}/new"
        changes: list[Callable[[], object]] = [
            lambda: os.open(file, os.O_WRONLY),
            lambda: os.open(file, os.O_RDWR),
            lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
            lambda: os.open(new, os.O_WRONLY | os.O_CREAT),
            lambda: os.truncate(file, 0),
            lambda: os.unlink(file),
            lambda: os.rename(file, new),
            lambda: os.link(file, new),
            lambda: os.symlink("x", new),
            lambda: os.mkdir(new),
            lambda: os.rmdir(directory),
            lambda: os.mkfifo(new),
            lambda: os.chmod(file, 0o644),
            lambda: os.chown(file, 1, 1),
            lambda: os.utime(file),
            lambda: os.setxattr(file, "user.x", b"1"),
            lambda: os.removexattr(file, "user.x"),
        ]
        for change in changes:
            _expect(errno.EROFS, change)
        assert not os.access(file, os.W_OK)
        assert os.access(file, os.R_OK)
