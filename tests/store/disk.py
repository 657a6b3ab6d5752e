"""What would be on the disk after a power cut: a model fed by the calls a store makes.

A file's bytes are durable once it is fsynced, a name once its directory is. At each step that makes
something visible the model checks that nothing visible names what would be lost.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Watches the store at `root`, which a power cut would leave as it is at `before`.

    The bytes of files that are there count as durable: whoever named them had fsynced them first.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, before: Path) -> None:
        self.root = root
        self.checked = 0
        self._files = {path.stat().st_ino for path in root.rglob("*") if path.is_file()}
        self._names = {
            root / path.relative_to(before): set(os.listdir(path))
            for path in [before, *before.rglob("*")]
            if path.is_dir()
        }
        self._real = {name: getattr(os, name) for name in ("fsync", "link", "replace")}
        for name in self._real:
            monkeypatch.setattr(os, name, getattr(self, "_" + name))

    def has(self, path: Path) -> bool:
        """Whether `path` would be there after a power cut, with its bytes."""
        if path.is_file() and path.stat().st_ino not in self._files:
            return False
        inside = [path, *path.parents]
        names = inside[: inside.index(self.root)]
        return all(part.name in self._names.get(part.parent, ()) for part in names)

    def _fsync(self, fd: int) -> None:
        self._real["fsync"](fd)
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            self._names[path] = set(os.listdir(path))
        else:
            self._files.add(found.st_ino)

    def _link(self, source: str, target: str, **options: Any) -> None:
        self._check(*_paths(source, target, options))
        self._real["link"](source, target, **options)

    def _replace(self, source: str, target: str, **options: int) -> None:
        paths = _paths(source, target, options)
        self._check(*paths)
        self._real["replace"](source, target, **options)
        path = Path(paths[1])
        self._names.get(path.parent, set()).discard(path.name)

    def _check(self, source: str, target: str) -> None:
        self.checked += 1
        assert os.stat(source).st_ino in self._files, f"{target} is named before it is fsynced"
        where = Path(target).relative_to(self.root).parts[0]
        if where in ("versions", "latest.json"):
            self._check_all("objects")
        if where == "latest.json":
            self._check_all("versions")

    def _check_all(self, directory: str) -> None:
        for path in (self.root / directory).rglob("*"):
            assert self.has(path), f"{path} would be lost by a power cut"


def _paths(source: str, target: str, options: dict[str, Any]) -> tuple[str, str]:
    """The paths that are meant by names in open directories."""
    above = [
        os.readlink(f"/proc/self/fd/{options[which]}") for which in ("src_dir_fd", "dst_dir_fd")
    ]
    return f"{above[0]}/{source}", f"{above[1]}/{target}"
