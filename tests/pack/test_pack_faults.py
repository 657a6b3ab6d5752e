"""Files that can't be packed: all of them told at once, in lines that say where and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from npz_tree import (
    check_nothing_published,
    numbered,
    objects,
    read_version,
    run_pack,
    write_numbered,
    write_sample,
)

from fsmount.errors import PartitionError, SidecarError, SourceChangedError, SourceError
from fsmount.pack import Links
from fsmount.pack.source import NpzTree
from fsmount_cli.main import run


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


@pytest.mark.parametrize("workers", [1, 2])
def test_all_bad_files_are_told_at_once(workers: int, source: Path, store: Path) -> None:
    expected = write_numbered(source, {f"{p}/{i}": i for p in "abc" for i in range(4)})
    bad = [source / name for name in ("a/1.npz", "a/3.npz", "c/0.json")]
    for path in bad:
        path.write_bytes(b"nothing of that kind")
    with pytest.raises(SourceError, match=r"^3 files can't be packed") as caught:
        run_pack(source, store, workers=workers)
    assert [note.split(": ")[0] for note in notes(caught.value)] == list(map(str, bad))
    assert str(bad[0]) in str(caught.value)
    check_nothing_published(store)
    write_numbered(source, {"a/1": 1, "a/3": 3, "c/0": 0})
    report = run_pack(source, store)
    assert (report.reused, report.built) == (("b",), ("a", "c"))
    assert read_version(store, "v1") == expected


def test_one_bad_file_is_told_as_it_is(source: Path, store: Path) -> None:
    write_numbered(source, {f"{p}/{i}": i for p in "ab" for i in range(2)})
    (source / "a/0.json").write_bytes(b"[]")
    with pytest.raises(SidecarError, match=f"^{source}/a/0.json: ") as caught:
        run_pack(source, store)
    assert notes(caught.value) == []


def test_of_very_many_the_first_are_told_and_all_are_counted(source: Path, store: Path) -> None:
    for i in range(13):
        for name in "ab":
            path = source / name / f"{i:02}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
    with pytest.raises(SourceError, match=r"^26 files can't be packed") as caught:
        run_pack(source, store)
    told = notes(caught.value)
    assert len(told) == 21
    assert [line.split(": ")[0] for line in told[:20]] == [
        f"{source}/{name}/{i:02}.npz" for name in "ab" for i in range(13)
    ][:20]
    assert told[20] == "and 6 more"


def test_bad_files_of_a_change_are_told_too(source: Path, store: Path) -> None:
    """A partition that was packed before: files that are as they were are not looked at again."""
    write_numbered(source, {f"a/{i}": i for i in range(6)})
    run_pack(source, store)
    for i in (1, 4):
        (source / f"a/{i}.npz").write_bytes(b"")
    with pytest.raises(SourceError, match=r"^2 files") as caught:
        run_pack(source, store, "v2")
    assert [Path(note.split(": ")[0]).stem for note in notes(caught.value)] == ["1", "4"]


def test_what_the_listing_finds_is_told_at_once(source: Path, store: Path) -> None:
    write_numbered(source, {"good": 1})
    os.mkfifo(source / "fifo.npz")
    (source / "gone.npz").symlink_to("nowhere")
    (source / os.fsdecode(b"caf\xe9.npz")).write_bytes(b"")
    with pytest.raises(SourceError, match=r"^3 files can't be packed") as caught:
        run_pack(source, store)
    fifo, gone, cafe = notes(caught.value)
    assert fifo == f"{source}/fifo.npz: not a regular file"
    assert gone == f"{source}/gone.npz: No such file or directory"
    assert "UTF-8" in cafe
    assert "rename" in cafe
    assert not store.exists()


def test_the_command_prints_one_error_line_and_one_for_each_file(
    source: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_numbered(source, {"good": 1})
    for name in ("a\nerror: forged", "b"):
        (source / f"{name}.npz").write_bytes(b"")
    options = ["--tag", "v1", "--quiet", "--workers", "1"]
    assert run(["pack", str(source), str(store), *options]) == 1
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 3
    assert lines[0].startswith("error: 2 files can't be packed, so nothing is published")
    assert lines[1].startswith(f"  {source}/a\\nerror: forged.npz: not a readable zip archive")
    assert lines[2].startswith(f"  {source}/b.npz: not a readable zip archive")


@pytest.mark.timeout(60)
def test_a_sample_that_becomes_a_fifo_does_not_hang(source: Path) -> None:
    write_sample(source, "a", numbered(1), b"{}")
    tree = NpzTree(str(source))
    (sample,) = tree.scan().samples
    for name in ("a.npz", "a.json"):
        (source / name).unlink()
        os.mkfifo(source / name)
    with pytest.raises(SourceChangedError, match=r"a\.npz: changed while it was packed"):
        tree.read_arrays(sample)
    with pytest.raises(SourceChangedError, match=r"a\.json: changed while it was packed"):
        tree.read_sidecar(sample)


def linked(source: Path) -> None:
    """A link to a file inside, and one to a file and to a directory outside."""
    write_numbered(source, {"a/0": 0, "b/0": 1})
    write_numbered(source.with_name("elsewhere"), {"x": 2, "d/y": 3})
    (source / "a/1.npz").symlink_to("../b/0.npz")
    (source / "a/2.npz").symlink_to(source.with_name("elsewhere") / "x.npz")
    (source / "c").symlink_to(source.with_name("elsewhere") / "d")
    (source / "README").symlink_to("/etc/passwd")


def test_links_are_followed_unless_told_otherwise(source: Path, store: Path) -> None:
    linked(source)
    run_pack(source, store)
    assert set(read_version(store, "v1")) == {"a/0", "a/1", "a/2", "b/0", "c/y"}


def test_links_out_of_the_source_can_be_refused(source: Path, store: Path) -> None:
    linked(source)
    with pytest.raises(SourceError, match=r"^2 files") as caught:
        run_pack(source, store, links=Links.INSIDE)
    outside = source.with_name("elsewhere")
    assert [note.split(", ")[:2] for note in notes(caught.value)] == [
        [f"{source}/a/2.npz: a link out of the source", f"to {outside}/x.npz"],
        [f"{source}/c: a link out of the source", f"to {outside}/d"],
    ]
    (source / "a/2.npz").unlink()
    (source / "c").unlink()
    run_pack(source, store, links=Links.INSIDE)
    assert set(read_version(store, "v1")) == {"a/0", "a/1", "b/0"}
    assert len(set(objects(store, "v1"))) == 2


def test_all_links_can_be_refused(
    source: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linked(source)
    options = ["--tag", "v1", "--quiet", "--links", "refuse"]
    assert run(["pack", str(source), str(store), *options]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: 3 files can't be packed")
    assert [line.split(": ")[0].strip() for line in lines[1:]] == [
        f"{source}/{name}" for name in ("a/1.npz", "a/2.npz", "c")
    ]
    assert not store.exists()


def test_a_directory_too_long_for_a_partition_says_what_to_do(source: Path, store: Path) -> None:
    write_sample(source, f"{'d' * 250}/x", numbered(1))
    with pytest.raises(PartitionError, match=r"sample 'd.*too long.*--partition-depth"):
        run_pack(source, store)


def test_a_suffix_in_upper_case_is_told(source: Path, store: Path) -> None:
    source.mkdir()
    (source / "A.NPZ").write_bytes(b"")
    with pytest.raises(SourceError, match=r"no \.npz file in it, but 'A.NPZ': its suffix must be"):
        run_pack(source, store)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/fd/99", "/dev/zero", "nowhere", ""])
def test_what_is_no_source_is_one_line(
    path: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pack", path, str(store), "--tag", "v1"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert "not a directory" in err or "the path is empty" in err
    assert not store.exists()


def test_a_working_directory_that_is_gone_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    script = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m fsmount_cli.main pack"
    for arguments in (f"source {tmp_path}/store", f"{tmp_path} store"):
        gone.mkdir()
        done = subprocess.run(
            ["sh", "-c", f"{script} {arguments} --tag v1 --quiet"],
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stderr.splitlines() if "getcwd" not in line]
        assert done.returncode == 1
        assert len(lines) == 1
        assert lines[0].startswith("error: no s")
        assert "the working directory is gone; give an absolute path" in lines[0]
