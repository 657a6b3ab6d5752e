"""How fast a mounted tree is listed, beside the same tree of real, empty files."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from fsmount.model import Version
from fsmount.paths import manifest_path, shard_path
from fsmount.vfs.layout import KEYSETS
from fsmount_cli.bench import pages
from fsmount_cli.bench.reading import Rounds
from fsmount_cli.bench.scratch import BenchError, UnavailableError, rss, run
from fsmount_cli.bench.served import PASSTHROUGH, Target, serving

FILES_MAX = 200_000  # of a version whose tree is copied
_FIND, _LIST = ("find", ".", "-type", "f"), ("ls", "-lR", ".")
_STEPS = (("find_first", _FIND), ("find", _FIND), ("", _LIST), ("ls", _LIST))  # "": warms up
_STEP_SECONDS = 300.0

Run = Mapping[str, float]  # seconds by step


def metadata(target: Target, scratch: str, rounds: Rounds, *, everything: bool) -> dict[str, Any]:
    """Seconds of `find` and `ls -lR` on a fresh mount and on real files, and their ratios.

    `everything`: all caches are dropped before each first `find`. Otherwise the kernel knows the
    real files' names by then, but not the mount's. UnavailableError for too many files.
    """
    real = f"{scratch}/real"
    files = _make_tree(real, target.version)
    runs: dict[str, list[Run]] = {"mount": [], "real": []}
    memory = 0
    for number in rounds:
        with serving(PASSTHROUGH, target, scratch) as served:
            if everything:
                pages.drop_all()
            runs["mount"].append(_listings(served.mountpoint))
            memory = max(memory, rss(served.server))
            if not number:
                _check(served.mountpoint, files)
        if everything:
            pages.drop_all()
        runs["real"].append(_listings(real))
    return {"files": files, "server_rss_mb": memory / 1e6, **_summary(runs), "runs": runs}


def _make_tree(root: str, version: Version) -> int:
    """Make the files of a version, empty; how many there are."""
    shards = sum(len(partition.shards) for partition in version.partitions)
    if len(version.partitions) + shards >= FILES_MAX:
        raise UnavailableError(f"the version has {FILES_MAX} files or more")
    paths = ["VERSION.json", "SHA256SUMS", "partitions.parquet"]
    for partition in version.partitions:
        paths.append(manifest_path(partition.id))
        paths += [shard_path(partition.id, index) for index in range(len(partition.shards))]
    for directory in {os.path.dirname(path) for path in paths}:
        os.makedirs(f"{root}/{directory}", exist_ok=True)
    os.mkdir(f"{root}/{KEYSETS}")
    for path in paths:
        os.close(os.open(f"{root}/{path}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444))
    return len(paths)


def _listings(root: str) -> dict[str, float]:
    seconds = {}
    for name, command in _STEPS:
        begin = time.perf_counter()
        _run(command, root)
        if name:
            seconds[name] = time.perf_counter() - begin
    return seconds


def _run(command: Sequence[str], root: str) -> None:
    try:
        subprocess.run(
            command,
            cwd=root,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_STEP_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"{command[0]}: not done in {_STEP_SECONDS:.0f} s") from None
    except subprocess.CalledProcessError as error:
        raise BenchError(f"{command[0]}: {error.stderr.decode(errors='replace')}") from None


def _check(mountpoint: str, files: int) -> None:
    """What was listed is what there is; key-sets are not counted."""
    find = ["find", mountpoint, "-type", "f", "-not", "-path", f"{mountpoint}/{KEYSETS}/*"]
    found = run([*find, "-printf", "."], _STEP_SECONDS)
    if len(found) != files:
        raise BenchError(f"find listed {len(found)} files of {files}")


def _summary(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    names = [name for name, _ in _STEPS if name]
    pairs = list(zip(runs["mount"], runs["real"], strict=True))
    return {
        "seconds": {
            where: {name: median(one[name] for one in some) for name in names}
            for where, some in runs.items()
        },
        "ratios": {
            name: median(mount[name] / real[name] for mount, real in pairs) for name in names
        },
    }
