from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsmount.errors import FsmountError, InvalidNameError, one_line
from fsmount.model import LatestRef, TableRef, TagRef
from fsmount.store import Store
from fsmount.testing.tiny import numbered, publish
from fsmount_cli import main as main_module
from fsmount_cli.common import human_bytes, parse_store_ref
from fsmount_cli.main import run

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.create(str(tmp_path / "store"))
    publish(store, "v1", {"a": [numbered("a/1", 1)], "b/c": [numbered("b/c/1", 2)]})
    publish(store, "v2", {"a": [numbered(f"a/{i}", i) for i in range(4)]})
    return store


def output(args: list[str], capsys: Captured, code: int = 0) -> tuple[str, str]:
    assert run(args) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def fails(args: list[str], capsys: Captured) -> str:
    """The one error line of a command that fails."""
    out, err = output(args, capsys, code=1)
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    return err


def test_versions_lists_all_and_marks_latest(store: Store, capsys: Captured) -> None:
    head, first, second = output(["versions", store.path], capsys)[0].splitlines()
    assert head.split() == ["TAG", "CREATED", "PARTITIONS", "SAMPLES", "RAW", "MESSAGE"]
    assert first.split()[:4] == ["v1", "2024-05-06T07:08:09Z", "2", "2"]
    assert second.split()[:5] == ["*", "v2", "2024-05-06T07:08:09Z", "1", "4"]


def test_versions_for_machines(store: Store, capsys: Captured) -> None:
    found = json.loads(output(["versions", store.path, "--json"], capsys)[0])
    assert found["latest"] == "v2"
    assert [version["tag"] for version in found["versions"]] == ["v1", "v2"]
    path = Path(store.path, "versions", "v1.json")
    assert found["versions"][0] == json.loads(path.read_text())


def test_versions_of_an_empty_store(tmp_path: Path, capsys: Captured) -> None:
    path = Store.create(str(tmp_path / "empty")).path
    assert len(output(["versions", path], capsys)[0].splitlines()) == 1
    assert json.loads(output(["versions", path, "--json"], capsys)[0])["versions"] == []
    assert "no versions yet" in fails(["show", path], capsys)


def test_show_names_document_and_partitions(store: Store, capsys: Captured) -> None:
    lines = output(["show", f"{store.path}@v1"], capsys)[0].splitlines()
    assert lines[0].split() == ["tag", "v1"]
    rows = [line.split() for line in lines[lines.index("") + 1 :]]
    assert [row[0] for row in rows] == ["PARTITION", "a", "b/c"]
    revision = store.version(TagRef("v1")).partitions[1].data_revision
    assert revision[:12] in rows[2]


def test_show_is_of_latest_by_default(store: Store, capsys: Captured) -> None:
    shown = output(["show", store.path, "--json"], capsys)[0]
    assert shown == output(["show", f"{store.path}@latest", "--json"], capsys)[0]
    value = json.loads(shown)
    assert value["document"]["tag"] == "v2"
    (partition,) = value["partitions"]
    (expected,) = store.version(LatestRef()).partitions
    assert (partition["id"], partition["samples"]) == ("a", 4)
    assert partition["manifest"] == {
        "digest": expected.manifest.digest,
        "size": expected.manifest.size,
    }
    assert [shard["samples"] for shard in partition["shards"]] == [3, 1]


def test_show_by_table(store: Store, capsys: Captured) -> None:
    table = store.resolve(TagRef("v1")).table.digest
    value = json.loads(output(["show", f"{store.path}@sha256:{table[:10]}", "--json"], capsys)[0])
    assert value["document"]["tag"] is None
    assert value["document"]["table"]["digest"] == table
    assert "(none)" in output(["show", f"{store.path}@sha256:{table}"], capsys)[0]


def test_a_message_can_not_steer_the_terminal(store: Store, capsys: Captured) -> None:
    path = Path(store.path, "versions", "v1.json")
    value = json.loads(path.read_text()) | {"message": "two\nlines \x1b[31m\u202e"}
    path.unlink()
    path.write_text(json.dumps(value))
    for args in (["versions", store.path], ["show", f"{store.path}@v1"]):
        assert r"two\nlines \x1b[31m\u202e" in output(args, capsys)[0]


def test_what_is_not_there_is_one_error_line(store: Store, capsys: Captured) -> None:
    assert "it has v1, v2" in fails(["show", f"{store.path}@v9"], capsys)
    assert "not a tag" in fails(["show", f"{store.path}@a b"], capsys)
    assert "8 to 64" in fails(["show", f"{store.path}@sha256:12"], capsys)
    assert "no store at /nowhere" in fails(["versions", "/nowhere"], capsys)
    assert r"/no\nwhere\x1b" in fails(["versions", "/no\nwhere\x1b"], capsys)
    assert "no store before" in fails(["show", "@v1"], capsys)


def test_a_url_is_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source").mkdir()
    (tmp_path / "mnt").mkdir()
    for args in (
        ["versions", "s3://bucket/store"],
        ["show", "s3://bucket/store@v1"],
        ["pack", "source", "gs://bucket/store", "--tag", "v1"],
        ["mount", "file:///store@v1", "mnt"],
        ["mount", "--foreground", "file:///store", "mnt"],
    ):
        assert "URLs are not supported" in fails(args, capsys)
    assert sorted(os.listdir()) == ["mnt", "source"]


def test_a_wrong_usage_exits_with_2(store: Store, capsys: Captured) -> None:
    for args in (["versions"], ["nonsense"], ["show", store.path, "--nonsense"], []):
        out, err = output(args, capsys, code=2)
        assert out == ""
        assert "Usage: fsmount" in err


def test_help_and_version(capsys: Captured) -> None:
    for args in (["--help"], ["versions", "--help"], ["show", "-h"]):
        assert "Usage: fsmount" in output(args, capsys)[0]
    assert output(["--version"], capsys)[0].startswith("fsmount ")


def test_a_store_path_may_hold_an_at_sign(tmp_path: Path) -> None:
    path = tmp_path / "user@host"
    path.mkdir()
    assert parse_store_ref(str(path)) == (str(path), None)
    assert parse_store_ref(f"{path}@v1") == (str(path), TagRef("v1"))
    assert parse_store_ref(f"{path}/store") == (f"{path}/store", None)
    assert parse_store_ref("s@latest") == ("s", LatestRef())
    assert parse_store_ref("s@sha256:0123456789") == ("s", TableRef("0123456789"))
    with pytest.raises(InvalidNameError):
        parse_store_ref("s@")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024 - 1, "10.0 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (3 * 1024**3 // 2, "1.50 GiB"),
        (5000 * 1024**5, "5000 PiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@given(st.text())
def test_one_line_is_one_line(text: str) -> None:
    assert len(one_line(text + "x").splitlines()) == 1
    assert one_line(text).isprintable()


def failing(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (FsmountError("one\ntwo"), 1, "error: one\\ntwo\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "error: /x: Perm"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a", None, "b"), 1, "error: a: b: No"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "error: No space"),
        (click.ClickException("odd"), 1, "error: odd\n"),
    ],
)
def test_errors_and_exit_codes(
    error: BaseException,
    code: int,
    message: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        main_module.cli.commands, "fail", click.Command("fail", callback=failing(error))
    )
    out, err = output(["fail"], capsys, code)
    assert out == ""
    assert err.startswith(message)


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError(errno.EBADF, "a bug")])
def test_a_bug_is_not_hidden(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        main_module.cli.commands, "fail", click.Command("fail", callback=failing(error))
    )
    with pytest.raises(type(error), match="a bug"):
        run(["fail"])


def command(store: Store, stdout: int) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "fsmount_cli.main", "versions", store.path],
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
    )


def test_a_reader_that_goes_away_is_no_error(store: Store) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = command(store, writer)
    finally:
        os.close(writer)
    assert done.stderr == b""


def test_a_full_disk_under_stdout_is_one_line(store: Store) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = command(store, full)
    finally:
        os.close(full)
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")
