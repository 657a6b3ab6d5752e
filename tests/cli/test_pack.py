"""`fsmount pack`: what it prints, what it returns, what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fsmount.store import Store
from fsmount.testing.settled import settle
from fsmount_cli import main as main_module


@dataclass(frozen=True)
class Done:
    """What a command returned and printed."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


def write(source: Path, *keys: str) -> None:
    for number, key in enumerate(keys):
        path = source / f"{key}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, x=np.arange(10) + number)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write(tmp_path / "source", "a/1", "a/2", "b/1")
    return tmp_path / "source"


@pytest.fixture
def run(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `fsmount pack source store` with some more arguments, with one worker unless told."""

    def pack(*options: str, at: Path = source) -> Done:
        settle(source)
        workers = [] if "--workers" in options else ["--workers", "1"]
        code = main_module.run(["pack", str(at), str(tmp_path / "store"), *workers, *options])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return pack


def shell(*arguments: str, **env: str) -> Done:
    """The same in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "fsmount_cli.main", "pack", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | env,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def tags(tmp_path: Path) -> list[str | None]:
    return [document.tag for document in Store.open(str(tmp_path / "store")).versions()]


def test_it_says_what_it_did(run: Run, source: Path, tmp_path: Path) -> None:
    done = run("--tag", "v1")
    digest = Store.open(str(tmp_path / "store")).versions()[0].table.digest
    first, second, third = done.out.splitlines()
    assert re.fullmatch(
        rf"published v1: 3 samples in 2 partitions, \d+ B raw, \d\S* KiB stored, sha256:{digest}",
        first,
    )
    assert re.fullmatch(
        r"partitions: 2 built; 3 samples read in \d+\.\d s; 0 other files ignored", second
    )
    assert third == "samples: +3 -0 ~0 (added, removed, changed), 0 with new metadata only"
    assert done.code == 0
    assert re.fullmatch(r"packing 3 samples, \d\S* (KiB|B) of source files\n", done.err)
    again = run("--tag", "v1")
    assert again.out.startswith("already there: v1: 3 samples")
    assert "partitions: 2 reused; 0 samples read" in again.out
    assert again.err == ""  # nothing to do, nothing to show
    (source / "b" / "1.npz").unlink()
    write(source, "c/1")
    changed = run("--tag", "v2", "--quiet", "--message", "a\nb")
    assert changed.err == ""
    assert "partitions: 1 built, 1 reused, 1 kept from the base; 1 samples read" in changed.out
    assert changed.out.splitlines()[3] == (
        "kept from the base though the source doesn't have them (--sync drops them): b"
    )
    fourth = run("--tag", "v3", "--quiet", "--sync")
    assert "2 reused, 1 dropped" in fourth.out
    assert tags(tmp_path) == ["v1", "v2", "v3"]


def test_json(run: Run, tmp_path: Path) -> None:
    done = run("--tag", "v1", "--json", "--quiet", "--partition-regex", "^(.)", "--message", "é")
    assert (done.code, done.err) == (0, "")
    value = json.loads(done.out)
    document = json.loads((tmp_path / "store" / "versions" / "v1.json").read_bytes())
    assert value["document"] == document
    assert (value["published"], value["built"], value["samples_read"]) == (True, ["a", "b"], 3)
    assert value["reused"] == value["kept"] == value["dropped"] == value["refreshed"] == []
    assert isinstance(value["seconds"], float)
    assert value["ignored_files"] == 0
    assert document["rule"] == {"kind": "regex", "pattern": "^(.)"}
    assert document["message"] == "é"
    assert json.loads(run("--tag", "v1", "--json", "--quiet").out)["published"] is False


def test_options_reach_the_recipe(run: Run, tmp_path: Path) -> None:
    options = ["--level", "7", "--shard-size", "3MiB", "--order-seed", "18446744073709551615"]
    done = run("--tag", "v1", "--quiet", *options, "--partition-depth", "1")
    assert (done.code, done.err) == (0, "")
    document = json.loads((tmp_path / "store" / "versions" / "v1.json").read_bytes())
    assert document["recipe"] == {
        "codec": "safetensors.zst", "format": 1, "level": 7, "order_seed": (1 << 64) - 1,
        "shard_bytes": 3 << 20,
    }  # fmt: skip
    assert document["rule"] == {"kind": "depth", "depth": 1}


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--tag", "v1", "--workers", "0"],
        ["--tag", "v1", "--workers", "-1"],
        ["--tag", "v1", "--workers", "two"],
        ["--tag", "v1", "--partition-depth", "0"],
        ["--tag", "v1", "--partition-depth", "1", "--partition-regex", "a"],
        ["--tag", "v1", "--level", "0"],
        ["--tag", "v1", "--level", "23"],
        ["--tag", "v1", "--order-seed", "-1"],
        ["--tag", "v1", "--order-seed", str(1 << 64)],
        ["--tag", "v1", "--shard-size", "0"],
        ["--tag", "v1", "--shard-size", "4GB"],
        ["--tag", "v1", "--shard-size", "-1"],
        ["--tag", "v1", "--shard-size", ""],
        ["--tag", "v1", "--no-such-option"],
        ["--tag", "v1", "another argument"],
    ],
)
def test_usage_errors(options: list[str], run: Run, tmp_path: Path) -> None:
    done = run(*options)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Usage: fsmount pack")
    assert not (tmp_path / "store").exists()


def test_two_rules_exclude_each_other(run: Run) -> None:
    done = run("--tag", "v1", "--partition-depth", "1", "--partition-regex", "a")
    assert "--partition-depth and --partition-regex exclude each other" in done.err


def test_a_source_that_is_no_directory_is_one_line(run: Run, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", Path(__file__)):
        done = run("--tag", "v1", at=path)
        assert (done.code, done.err) == (1, f"error: {path}: not a directory\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tag", "a/b"], "not a tag: 'a/b'"),
        (["--tag", "latest"], "not a tag: 'latest'"),
        (["--tag", "v1\n"], r"not a tag: 'v1\n'"),
        (["--tag", "v1", "--base", "v0"], "v0"),
        (["--tag", "v1", "--base", "sha256:xyz"], "not 8 to 64 hexadecimal digits"),
        (["--tag", "v1", "--partition-regex", "("], "not a regular expression"),
        (["--tag", "v1", "--partition-regex", "a{99999999999999}"], "not a regular expression"),
        (["--tag", "v1", "--partition-regex", "x"], "leaves out 3 of 3 samples"),
        (["--tag", "v1", "--require-sidecars"], "3 of 3 samples have no sidecar"),
        (["--tag", "v1", "--message", "\udcff"], "the message is not UTF-8"),
        (["--tag", "v1", "--source-namespace", "\udcff"], "the source namespace is not UTF-8"),
        (["--tag", "v1", "--shard-size", "99999999999TiB"], "shard size"),
    ],
)
def test_errors_are_one_line(options: list[str], message: str, run: Run, tmp_path: Path) -> None:
    done = run(*options)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert message in done.err
    if (tmp_path / "store").exists():
        assert tags(tmp_path) == []


@pytest.mark.parametrize("quiet", [True, False])
def test_an_error_names_a_file_whose_name_breaks_lines(
    quiet: bool, run: Run, source: Path, tmp_path: Path
) -> None:
    (source / "a" / "new\nline\x1b[31m.npz").write_bytes(b"no archive")
    done = run("--tag", "v1", *(["--quiet"] if quiet else []))
    assert (done.code, done.out) == (1, "")
    last = done.err.splitlines()[-1]
    assert last.startswith(f"error: {source}/a/new\\nline\\x1b[31m.npz: not a readable zip")
    assert done.err.count("error:") == 1
    if quiet:
        assert done.err.count("\n") == 1
    assert tags(tmp_path) == []


def test_a_name_that_the_locale_lacks_is_printed_all_the_same(source: Path, tmp_path: Path) -> None:
    """In a process of its own, and with the installed command's defaults."""
    (source / "é.npz").write_bytes(b"no archive")
    arguments = [str(source), str(tmp_path / "store"), "--tag", "v1"]
    done = shell(*arguments, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (done.code, done.out) == (1, "")
    assert "not a readable zip" in done.err or "not UTF-8" in done.err
    assert done.err.count("error: ") == 1
    assert "Traceback" not in done.err
    (source / "é.npz").unlink()
    done = shell(*arguments, "--quiet", "--message", "é")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("published v1")


def test_another_store_format_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text('{"format": 2}')
    done = run("--tag", "v1", "--quiet")
    assert done.code == 1
    assert "format 2" in done.err
    (tmp_path / "store" / "store.json").unlink()
    (tmp_path / "store" / "mine").touch()
    assert "'mine'" in run("--tag", "v1", "--quiet").err


def test_another_rule_names_both_remedies(run: Run, source: Path) -> None:
    run("--tag", "v1", "--quiet")
    done = run("--tag", "v2", "--quiet", "--partition-depth", "1")
    assert done.code == 1
    assert f"pass --source-namespace '{source}'" in done.err
    assert "pass --replace-all" in done.err
    assert run("--tag", "v2", "--partition-depth", "1", "--replace-all").code == 0


def test_more_workers_than_cores_is_a_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    assert run("--tag", "v1", "--quiet", "--workers", "1000").code == 0
    assert caplog.messages == [f"1000 workers on {os.cpu_count()} cores"]


def test_the_base_can_be_none(run: Run, source: Path, tmp_path: Path) -> None:
    assert run("--tag", "v1", "--quiet").code == 0
    (source / "b" / "1.npz").unlink()
    assert "1 kept" in run("--tag", "v2", "--quiet", "--base", "latest").out
    assert "kept" not in run("--tag", "v3", "--quiet", "--base", "none").out
    assert "1 kept" in run("--tag", "v4", "--quiet", "--base", "v1").out


def test_help_states_every_default(run: Run) -> None:
    text = " ".join(run("--help").out.split())
    for default in (
        "[default: latest]",
        "[default: as the base, else the sample's directory]",
        "[default: its real path]",
        "[default: one a core, where starting them pays]",
        "[default: as the base, else 3]",
        "[default: as the base, else 256MiB]",
        "[default: as the base, else 0]",
    ):
        assert default in text, default
    assert run("-h").code == 0


def test_usage_of_sizes(run: Run) -> None:
    for size in ("1000", "64KiB", "1GiB", "1TiB"):
        done = run("--tag", f"v{size}", "--quiet", "--base", "none", "--shard-size", size)
        assert (done.code, done.err) == (0, "")
