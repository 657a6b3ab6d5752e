"""The examples in docs/semantics.md do what the page says."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import sweep

from fsmount.store import Store
from fsmount.testing import tiny

PAGE = Path(__file__).parents[2] / "docs" / "semantics.md"
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
DAMAGE = """#!{python}
# Flip a bit of the object that version v1 shows at a path.
import os, sys
from fsmount.model import TagRef
from fsmount.store import Store

store = Store.open(sys.argv[1])
partition, number = sys.argv[2].split("/")[1], int(sys.argv[2].split("/")[2][:6])
[found] = [p for p in store.version(TagRef("v1")).partitions if p.id == partition]
path = store.objects.path(found.shards[number].digest)
with open(path, "rb") as file:
    data = bytearray(file.read())
data[600] ^= 1
os.unlink(path)
with open(path, "wb") as file:
    file.write(data)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Where the examples run: the store `ds`, the directory `mnt`, the commands they use."""
    store = Store.create(str(tmp_path / "ds"))
    for tag, numbers in {"v1": (0, 1), "v2": (2, 3)}.items():
        content = [tiny.numbered(f"drive/{at:04d}", number) for at, number in enumerate(numbers)]
        tiny.publish(store, tag, {"drive": content})
    (tmp_path / "mnt").mkdir()
    commands = tmp_path / "bin"
    commands.mkdir()
    scripts = {
        "fsmount": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fsmount_cli.main "$@"\n',
        "python3": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n',
        "damage": DAMAGE.format(python=sys.executable),
    }
    for name, text in scripts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(stat.S_IRWXU)
    yield tmp_path
    sweep(str(tmp_path), only_dead=False)


def examples(block: str) -> Iterator[tuple[str, str]]:
    """The commands of a block with the output that the page shows."""
    for part in block.split("$ ", 1)[1].split("\n$ "):
        command, _, output = part.partition("\n")
        yield command, output.rstrip("\n")


def spaces(text: str) -> str:
    """`text` without differences that a column's width makes."""
    return re.sub(" +", " ", text)


@pytest.mark.mounted
@pytest.mark.parametrize("block", BLOCKS, ids=[block.split("\n")[0] for block in BLOCKS])
def test_example(directory: Path, block: str) -> None:
    env = {
        **os.environ,
        "PATH": f"{directory}/bin:{os.environ['PATH']}",
        "LC_ALL": "C",
        "TZ": "UTC",
    }
    for command, expected in examples(block):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=directory,
            env=env,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        shown = done.stdout.rstrip("\n") + (f"\n[{done.returncode}]" if done.returncode else "")
        pattern = re.escape(spaces(expected)).replace(r"\.\.\.", ".*")
        assert re.fullmatch(pattern, spaces(shown)), (
            f"$ {command}\n{shown}\n--- expected\n{expected}"
        )


def test_the_page_has_examples() -> None:
    assert len(BLOCKS) > 5
