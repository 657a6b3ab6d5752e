"""The fusepy adapter without a mount: fusepy's traps, and what surrounds a mount."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsmount.errors import IntegrityError, InvalidNameError, MountError, VersionExistsError
from fsmount.mount import checks, holders, records
from fsmount.mount.fusepy_driver import Adapter, FuseOptions, _arguments, _Fuse
from fsmount.mount.mountinfo import parse
from fsmount.mount.request import Answer, MountRequest
from fsmount.vfs.faults import errno_of
from fsmount.vfs.filesystem import (
    FOREVER,
    ROOT_NODE,
    Attr,
    DirEntry,
    Entry,
    Handle,
    Kind,
    Usage,
)
from fsmount.vfs.reads import Verify


class Failing:
    """A file system with one file, `x`, and a failure for everything done to it."""

    ttl = FOREVER

    def __init__(self, failure: BaseException) -> None:
        self.failure = failure

    def lookup(self, parent: int, name: str) -> Entry:
        del parent, name
        return self._entry(2, Kind.FILE)

    def getattr(self, node: int) -> Entry:
        return self._entry(node, Kind.DIRECTORY if node == ROOT_NODE else Kind.FILE)

    def readdir(self, node: int, offset: int = 0) -> Iterator[DirEntry]:
        raise self.failure

    def open(self, node: int) -> Handle:
        return FailingHandle(node, self.failure)

    def readlink(self, node: int) -> str:
        raise self.failure

    def statfs(self) -> Usage:
        raise self.failure

    def _entry(self, node: int, kind: Kind) -> Entry:
        return Entry(Attr(node, kind, kind | 0o444, 1, 0, 0, 10, 0), FOREVER)


class FailingHandle:
    keep_cache = False

    def __init__(self, node: int, failure: BaseException) -> None:
        self.node = node
        self.failure = failure

    def read(self, size: int, offset: int) -> bytes:
        raise self.failure

    def close(self) -> None:
        pass


class Info(ctypes.Structure):
    """As much of a fuse_file_info as the adapter looks at."""

    _fields_ = (("flags", ctypes.c_int), ("fh", ctypes.c_uint64), ("keep_cache", ctypes.c_uint))


def fusepy(filesystem: Failing) -> _Fuse:
    """fusepy's own translation with the adapter in it, but no libfuse behind."""
    made = _Fuse.__new__(_Fuse)
    made.operations = Adapter(filesystem, lambda: None)
    made.raw_fi = True
    made.encoding = "utf-8"
    made.use_ns = True
    return made


def read_through_fusepy(failure: BaseException) -> int:
    """What libfuse is told when a read fails so."""
    made = fusepy(Failing(failure))
    info = Info()
    made.operations("open", "/x", info)
    buffer = ctypes.create_string_buffer(100)
    return _Fuse._wrapper(made.read, b"/x", buffer, 100, 0, ctypes.pointer(info))


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (OSError("no errno: fusepy alone makes an empty read of it"), errno.EIO),
        (ValueError("fusepy alone makes EINVAL of it"), errno.EIO),
        (KeyError("x"), errno.EIO),
        (MemoryError(), errno.EIO),
        (SystemExit(1), errno.EIO),
        (KeyboardInterrupt(), errno.EIO),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "in the file's content"), errno.EIO),
        (IntegrityError("x"), errno.EIO),
        (OSError(errno.ESTALE, "x"), errno.ESTALE),
        (FileNotFoundError(errno.ENOENT, "x"), errno.ENOENT),
        (OSError(-5, "negative"), errno.EIO),
    ],
)
def test_every_failure_of_a_read_is_an_errno(failure: BaseException, code: int) -> None:
    assert read_through_fusepy(failure) == -code


def test_what_fusepy_alone_would_do() -> None:
    """The traps are there; should fusepy lose them, the replacement of `_wrapper` can go."""
    import fuse  # noqa: PLC0415 - only this test looks at fusepy itself

    def fail() -> None:
        raise ValueError

    assert fuse.FUSE._wrapper(fail) == -errno.EINVAL

    def fail_without_errno() -> None:
        raise OSError("no errno")

    with pytest.raises(NameError):  # and libfuse then reads 0
        fuse.FUSE._wrapper(fail_without_errno)


def test_a_result_that_fusepy_refuses_is_an_error_not_an_empty_read() -> None:
    made = fusepy(Failing(ValueError()))
    info = Info()
    made.operations("open", "/x", info)
    handle = made.operations._handles[info.fh]
    for wrong in (memoryview(b"abc"), b"longer than asked for"):
        handle.read = lambda size, offset, wrong=wrong: wrong
        buffer = ctypes.create_string_buffer(5)
        assert _Fuse._wrapper(made.read, b"/x", buffer, 5, 0, ctypes.pointer(info)) == -errno.EIO


def test_a_name_that_is_not_utf8_is_not_there() -> None:
    made = fusepy(Failing(ValueError()))
    assert _Fuse._wrapper(made.readlink, b"/\xff", None, 0) == -errno.ENOENT


def test_every_change_is_refused_even_if_the_kernel_lets_it_through() -> None:
    adapter = Adapter(Failing(ValueError()), lambda: None)
    for operation in (
        "chmod", "chown", "create", "link", "mkdir", "mknod", "removexattr", "rename", "rmdir",
        "setxattr", "symlink", "truncate", "unlink", "utimens", "write",
    ):  # fmt: skip
        with pytest.raises(OSError, match="Read-only") as caught:
            adapter(operation, "/x", 1, 2)
        assert caught.value.errno == errno.EROFS
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_TRUNC):
        with pytest.raises(OSError, match="Read-only"):
            adapter("open", "/x", Info(flags, 0, 0))
    with pytest.raises(OSError, match="Read-only"):
        adapter("access", "/x", os.W_OK)
    assert adapter("access", "/x", os.R_OK) == 0


def test_handles_are_given_back() -> None:
    adapter = Adapter(Failing(ValueError()), lambda: None)
    infos = [Info() for _ in range(10)]
    for info in infos:
        adapter("open", "/x", info)
    assert len({info.fh for info in infos}) == 10
    for info in infos:
        assert adapter("getattr", None, info)["st_ino"] == 2
        adapter("release", None, info)
    assert not adapter._handles


def test_a_fault_is_logged_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert errno_of(IntegrityError("shards/a: object 12 is damaged"), "read /x") == errno.EIO
        assert errno_of(FileNotFoundError(errno.ENOENT, "x"), "getattr /x") == errno.ENOENT
        assert errno_of(InvalidNameError("x"), "x") == errno.EINVAL
        assert errno_of(VersionExistsError("x"), "x") == errno.EEXIST
        assert errno_of(ZeroDivisionError("y"), "read /y") == errno.EIO
    first, second = caplog.records
    assert first.getMessage() == "read /x: shards/a: object 12 is damaged"
    assert first.exc_info is None
    assert second.exc_info is not None


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_limit_of_the_server_is_no_limit_of_who_asks(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert errno_of(OSError(code, os.strerror(code)), "open /x") == errno.EIO
    [record] = caplog.records
    assert f"open /x: [Errno {code}] {os.strerror(code)}: a limit of" in record.getMessage()


def test_libfuse_is_told_for_ever_in_seconds_and_names_with_commas() -> None:
    told = _arguments(Failing(ValueError()), FuseOptions("/a,b\\c@v1"))
    assert told["fsname"] == "/a\\,b\\\\c@v1"
    assert told["attr_timeout"] == told["entry_timeout"] == 365 * 86400
    assert told["negative_timeout"] == 0
    assert told["ro"] is told["default_permissions"] is told["use_ino"] is True
    assert told["allow_other"] is False


OCTAL = {" ": r"\040", "\t": r"\011", "\n": r"\012", "\\": r"\134"}
some_paths = st.text(st.sampled_from("ab \t\n\\é0134/,"), min_size=1).map("/".__add__)


@given(some_paths, some_paths)
def test_mountinfo_is_read_as_it_was_meant(mountpoint: str, source: str) -> None:
    def escaped(path: str) -> str:
        return "".join(OCTAL.get(char, char) for char in path)

    line = (
        f"51 27 0:39 / {escaped(mountpoint)} ro,nosuid shared:5 master:1 - "
        f"fuse.fsmount {escaped(source)} ro,user_id=0\n"
    )
    plain = "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
    [proc, found] = parse((plain + line).encode())
    assert (proc.mountpoint, proc.fstype) == ("/proc", "proc")
    assert (found.device, found.mountpoint, found.source) == ("0:39", mountpoint, source)


def test_requests_and_answers_travel() -> None:
    request = MountRequest("/s\udcff", "v1", "/m", Verify.OPEN, True, True, 1, 2, 0o77, "/l")
    request = replace(request, driver="kernel", xattrs=True, passthrough=False)
    assert MountRequest.from_json(request.to_json()) == request
    answer = Answer("no\nway", "v1", ("a", "b"), ("passthrough",), 7)
    assert "\n" not in answer.to_json()
    assert Answer.from_json(answer.to_json()) == answer


def test_a_mountpoint_and_a_store_must_lie_apart(tmp_path: Path) -> None:
    store, other = tmp_path / "store", tmp_path / "other"
    (store / "objects").mkdir(parents=True)
    other.mkdir()
    link = tmp_path / "link"
    link.symlink_to(store / "objects")
    checks.check_apart(str(other), str(store))
    for inside in (store, store / "objects", link):
        with pytest.raises(MountError, match="is inside the store"):
            checks.check_apart(str(inside), str(store))
    with pytest.raises(MountError, match="is inside the mountpoint"):
        checks.check_apart(str(tmp_path), str(store))


def test_a_mountpoint_must_be_an_empty_directory(tmp_path: Path) -> None:
    checks.check_mountpoint(str(tmp_path))
    with pytest.raises(MountError, match=r"no mountpoint .*mkdir -p"):
        checks.check_mountpoint(str(tmp_path / "none"))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(MountError, match="not a directory"):
        checks.check_mountpoint(str(file))
    with pytest.raises(MountError, match=r"not empty \('file'\)"):
        checks.check_mountpoint(str(tmp_path))
    with pytest.raises(MountError, match=r"has proc .* mounted"):
        checks.check_mountpoint("/proc")


def test_others_are_let_in_by_root_or_by_the_administrator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "fuse.conf"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for text in ("", "#user_allow_other\n", "mount_max = 10\n"):
        conf.write_text(text)
        with pytest.raises(MountError, match="the line user_allow_other in"):
            checks.check_allow_other(str(conf))
    conf.write_text("mount_max = 10\n user_allow_other \n")
    checks.check_allow_other(str(conf))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    checks.check_allow_other(str(tmp_path / "none"))


def test_records_lie_only_where_nobody_else_can_plant_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    record = records.Record("/m", "/s", "v1", "v1", "t", "d", "now", None, None, "0:1")
    path = Path(records.write(record))
    assert path.parent == tmp_path / "fsmount"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o770)
    assert str(path.parent) not in records.directories()
    assert records.read("/m") is None
    monkeypatch.setattr(records, "_places", lambda: iter([f"{tmp_path}/fsmount", "/proc/none"]))
    with pytest.raises(MountError, match=f"none of {path.parent}, /proc/none"):
        records.write(record)


def test_damaged_records_are_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    record = records.Record("/m", "/s", "v1", "v1", "t", "d", "now", None, None, "0:1")
    path = Path(records.write(record))
    for number, text in enumerate(("", "[]", "{", '{"server": 1, "server_pid": 2}')):
        Path(path.parent, f"{number}.json").write_text(text)
    assert records.mounted() == records.mounted()
    records.write(record)
    assert records.read("/m") == record
    assert json.loads(path.read_text())["mountpoint"] == "/m"
    assert "/m" not in [one.record.mountpoint for one in records.mounted()]  # and is cleared
    assert records.read("/m") is None


def test_holders_are_named() -> None:
    mine = [h for h in holders.holders(os.getcwd()) if h.pid == os.getpid()]
    assert [holder.holds for holder in mine] == ["working directory"]
    assert "working directory" in holders.describe(mine)
    assert holders.describe([]) == "processes of other users, or other mounts"
    assert holders.describe(mine * 8).endswith("and 3 more")
