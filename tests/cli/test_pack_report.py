"""What a pack tells of its progress and of what it did to samples."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsmount.model import TagRef
from fsmount.pack import PackOptions, Silent, pack
from fsmount.pack.plan import Plan
from fsmount.store import Store
from fsmount.testing.settled import settle
from fsmount_cli import main
from fsmount_cli import pack as command
from fsmount_cli.progress import Lines, Quiet

Pack = Callable[..., tuple[str, str]]


def write(source: Path, keys: dict[str, int], **sidecar: Any) -> None:
    for key, number in keys.items():
        path = source / f"{key}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, x=np.arange(10) + number)
        (source / f"{key}.json").write_text(json.dumps(sidecar))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write(tmp_path / "source", {f"{p}/{n}": n for p in "ab" for n in range(10)})
    return tmp_path / "source"


@pytest.fixture
def run(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Pack:
    """Run `fsmount pack`, which succeeds; returns stdout and stderr."""

    def pack(*options: str) -> tuple[str, str]:
        store = str(tmp_path / "store")
        settle(source)
        assert main.run(["pack", str(source), store, "--workers", "1", "--quiet", *options]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return pack


def samples_line(out: str) -> str:
    return next(line for line in out.splitlines() if line.startswith("samples: "))


def test_samples_are_counted_one_by_one(run: Pack, source: Path) -> None:
    out, err = run("--tag", "v1")
    assert samples_line(out).startswith("samples: +20 -0 ~0 (")
    assert err == ""
    write(source, {f"a/{n}": n for n in range(10, 16)})
    write(source, {"a/0": 99, "a/1": 98, "c/0": 1})
    write(source, {"b/3": 3, "a/5": 5}, weather="rain")
    (source / "b" / "7.npz").unlink()
    out, err = run("--tag", "v2")
    assert samples_line(out) == (
        "samples: +7 -1 ~2 (added, removed, changed), 2 with new metadata only"
    )
    assert err == "warning: samples are gone: partition 'b' lost 1\n"
    out, err = run("--tag", "v3", "--force")
    assert samples_line(out).startswith("samples: +0 -0 ~0 (")
    assert err == ""


def test_changes_are_told_by_partition_in_json(run: Pack, source: Path) -> None:
    run("--tag", "v1")
    (source / "b" / "7.npz").unlink()
    write(source, {"a/0": 99})
    value = json.loads(run("--tag", "v2", "--json")[0])
    assert value["changes"] == {
        "a": {"added": 0, "removed": 0, "changed": 1, "metadata": 0},
        "b": {"added": 0, "removed": 1, "changed": 0, "metadata": 0},
    }
    assert value["latest"] == "v2"


def test_partitions_that_were_to_be_dropped_are_no_loss(run: Pack, source: Path) -> None:
    run("--tag", "v1")
    for path in (source / "b").iterdir():
        path.unlink()
    out, err = run("--tag", "v2", "--sync")
    assert samples_line(out).startswith("samples: +0 -10 ~0 (")
    assert "1 dropped" in out
    assert err == ""


def test_many_names_are_a_few_and_a_count(run: Pack, source: Path) -> None:
    write(source, {f"p{n:03d}/0": n for n in range(200)})
    run("--tag", "v1")
    for n in range(200):
        for path in (source / f"p{n:03d}").iterdir():
            path.unlink()
    out, _ = run("--tag", "v2")
    assert out.splitlines()[-1].endswith(
        "(--sync drops them): p000, p001, p002, p003, p004 and 195 more (--json lists them)"
    )
    assert max(map(len, out.splitlines())) < 200


def test_a_lost_manifest_of_the_base_counts_all_its_samples(
    run: Pack, source: Path, tmp_path: Path
) -> None:
    run("--tag", "v1")
    store = Store.open(str(tmp_path / "store"))
    manifest = store.version(TagRef("v1")).partitions[0].manifest
    os.unlink(store.objects.path(manifest.digest))
    write(source, {"a/0": 99})
    out, _ = run("--tag", "v2", "--force")
    assert samples_line(out).startswith("samples: +10 -10 ~0 (")


def test_latest_that_another_pack_has_moved_is_told(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    store = str(tmp_path / "store")
    write(tmp_path / "other", {"z/1": 1})
    pack(str(source), store, PackOptions("v1"), Silent())
    write(source, {"a/0": 99})

    class Racing(Quiet):
        def planned(self, plan: Plan, samples: int, source_bytes: int) -> None:
            options = PackOptions("other", replace_all=True)
            pack(str(tmp_path / "other"), store, options, Silent())

    monkeypatch.setattr(command, "Quiet", Racing)
    code = main.run(["pack", str(source), store, "--tag", "v2", "--workers", "1", "--quiet"])
    captured = capsys.readouterr()
    assert code == 0
    assert captured.out.startswith("published v2: 20 samples")
    assert captured.err == ("note: v2 is published, but `latest` is other: another pack moved it\n")
    assert Store.open(store).latest() == "other"


def test_lines_come_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    lines = Lines(lambda: now[0])
    lines.planned(Plan((), (), (), ()), 1000, 10 << 20)
    for second in range(1, 26):
        now[0] = 100.0 + second
        lines.advanced(20 * second, second << 18)
    assert capsys.readouterr().err.splitlines() == [
        "packing 1000 samples, 10.0 MiB of source files",
        "packed 200/1000 samples, 2.50 MiB of 10.0 MiB, 256 KiB/s, 0:30 to go",
        "packed 400/1000 samples, 5.00 MiB of 10.0 MiB, 256 KiB/s, 0:20 to go",
    ]


def test_many_manifests_to_be_written_anew_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    for many, done, told in ((99, 20, []), (300, 45, [300, 279, 258])):
        lines = Lines(lambda: now[0])
        lines.planned(Plan((), (), (), ()), 0, 0)
        for left in range(many, many - done, -1):
            now[0] += 0.48
            lines.rewriting(left)
        assert capsys.readouterr().err.splitlines() == [
            f"the fields of the version changed: {left} manifests to be written anew"
            for left in told
        ]


def test_a_run_that_goes_on_says_what_is_done_already(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    arguments = ["pack", str(source), str(tmp_path / "store"), "--tag", "v1", "--workers", "1"]
    settle(source)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "publish", interrupted)
        assert main.run(arguments) == 130
    assert "interrupted after 20 of 20 samples: nothing is published" in capsys.readouterr().err
    assert main.run(arguments) == 0
    captured = capsys.readouterr()
    assert "2 reused; 0 samples read" in captured.out
    assert captured.err == (
        "resuming: 2 partitions with 20 samples were finished by an earlier run\n"
    )


LOST = """
import os, signal, sys
from fsmount_cli import interrupts, main

class Archive:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

interrupts.install()
Archive()
sys.exit(main.run(sys.argv[1:]))
"""


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_an_interrupt_that_comes_while_an_object_is_destroyed_is_not_lost(
    quiet: list[str], source: Path, tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    arguments = ["pack", str(source), store, "--tag", "v1", "--workers", "1", *quiet]
    done = subprocess.run(
        [sys.executable, "-c", LOST, *arguments],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "Exception ignored in" in done.stderr  # Python has dropped it
    assert done.returncode == 130
    assert done.stdout == ""
    assert Store.open(store).versions() == ()


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def on_a_terminal(columns: int, term: str, arguments: list[str]) -> list[str]:
    """The lines that the command line writes to a terminal, as a program for one would see them."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "fsmount_cli.main", *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": term},
    )  # fmt: skip
    os.close(theirs)
    data = bytearray()
    watch = threading.Timer(60, process.kill)
    watch.start()
    with suppress(OSError):  # the last one has closed the terminal
        while chunk := os.read(ours, 1 << 16):
            data += chunk
    watch.cancel()
    os.close(ours)
    assert process.wait(60) == 0
    return re.split(r"[\r\n]+", data.decode())


@pytest.mark.parametrize("columns", [40, 100])
def test_the_bar_fits_the_terminal(columns: int, source: Path, tmp_path: Path) -> None:
    arguments = ["pack", str(source), str(tmp_path / "store"), "--tag", "v1", "--workers", "1"]
    lines = on_a_terminal(columns, "xterm", arguments)
    shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in lines]
    bars = [line for line in shown if "━" in line or "╸" in line]
    assert bars
    assert max(len(line.rstrip()) for line in bars) <= columns
    assert ("samples" in bars[-1]) is (columns == 100)


def test_a_dumb_terminal_gets_lines(source: Path, tmp_path: Path) -> None:
    arguments = ["pack", str(source), str(tmp_path / "store"), "--tag", "v1", "--workers", "1"]
    lines = on_a_terminal(40, "dumb", arguments)
    assert "\x1b" not in "".join(lines)
    assert lines[0].startswith("packing 20 samples, ")
