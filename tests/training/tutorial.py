"""docs/training.md as a place to work in, and a session to run there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsmount.mount.mountinfo import FSTYPE, all_mounts
from fsmount.mount.unmount import unmount

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "training.md").read_text(encoding="utf-8")
_COMMANDS = {
    "python3": "",
    "fsmount": "-m fsmount_cli.main",
    "torchrun": "-m torch.distributed.run",
}
_END = "==== "


@dataclass(frozen=True, slots=True)
class Place:
    """The directory in which the page's commands run, and their environment."""

    path: Path
    env: dict[str, str]

    def run(self, *command: str) -> str:
        """The output of a command, which must succeed; if it is cut off, so is what it started."""
        with (self.path / "stderr").open("a") as stderr:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        try:
            output, _ = process.communicate(timeout=250)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun then ends its ranks
            process.communicate()
            raise
        assert process.returncode == 0, (self.path / "stderr").read_text()
        return output


@dataclass(frozen=True, slots=True)
class Example:
    """A command of the page, the output that the page shows, and the output that came."""

    command: str
    told: str
    came: str

    def holds(self) -> bool:
        """Whether what came is what is told, where `...` is any text."""
        pattern = re.escape(self.told).replace("\\.\\.\\.", ".*")
        return re.fullmatch(pattern, self.came, re.DOTALL) is not None


@contextmanager
def place_at(path: Path) -> Iterator[Place]:
    """`path` with the page's scripts, and its commands in PATH. In the end nothing is mounted."""
    shutil.copy(DOCS / "train_ddp.py", path)
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        (path / name).write_text(text)
    (path / "bin").mkdir()
    for name, module in _COMMANDS.items():
        script = path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        script.chmod(stat.S_IRWXU)
    env = {**os.environ, "PATH": f"{path}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for name in ("TMPDIR", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (path / name).mkdir()
        env[name] = str(path / name)
    try:
        yield Place(path, env)
    finally:
        for mount in reversed(all_mounts()):
            if mount.fstype == FSTYPE and mount.mountpoint.startswith(f"{path}/"):
                unmount(mount.mountpoint, lazy=True)


def run_page(place: Place) -> list[Example]:
    """Run all commands of the page in one shell, as its reader does."""
    shown = "".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))
    page = [part.rstrip("\n").partition("\n") for part in f"\n{shown}".split("\n$ ")[1:]]
    script = "\n".join(f"{command}\necho '{_END}'$?" for command, _, _ in page)
    parts = re.split(rf"^{_END}(\d+)\n", place.run("bash", "-c", script), flags=re.MULTILINE)
    came = [
        f"{output}[{code}]" if code != "0" else output.rstrip("\n")
        for output, code in zip(parts[:-1:2], parts[1::2], strict=True)
    ]
    return [
        Example(command, told, output)
        for (command, _, told), output in zip(page, came, strict=True)
    ]
