"""How soon a mount serves, what its server takes, and how soon a killed one is replaced."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from fsmount_cli.bench.reading import Rounds
from fsmount_cli.bench.scratch import BenchError, environment, rss, run
from fsmount_cli.bench.served import FSMOUNT, START_SECONDS, Served, Target

_DEATH_SECONDS = 10.0


def start(target: Target, scratch: str, rounds: Rounds) -> dict[str, Any]:
    """Seconds from the command `fsmount mount` to its end, when it serves, and its memory.

    The first one may have to make the version's path list, the others find it.
    """
    env = environment(scratch)
    seconds: list[float] = []
    mounted: dict[str, Any] = {}
    for number in rounds:
        mountpoint = f"{scratch}/start-{number}"
        os.mkdir(mountpoint)
        begin = time.perf_counter()
        mount = [*FSMOUNT, "mount", "--log", f"{mountpoint}.log", "--", target.ref, mountpoint]
        run(mount, START_SECONDS, env=env)
        seconds.append(time.perf_counter() - begin)
        mounted = _listed(mountpoint, env)
        sizes = {
            f"{role}_rss_mb": rss(mounted[f"{role}_pid"]) / 1e6
            for role in ("server", "supervisor")
            if mounted.get(f"{role}_pid")
        }
        run([*FSMOUNT, "umount", "--", mountpoint], START_SECONDS, env=env)
    later = seconds[1:] or seconds
    return {
        "driver": mounted["driver"],
        "first_seconds": seconds[0],
        "seconds": median(later),
        "runs": seconds,
        **sizes,
    }


def recovery(served: Served, rounds: Rounds) -> dict[str, Any]:
    """Seconds from SIGKILL to a server until the mount has answered a request again.

    BenchError if it does not: the mount has no supervisor.
    """
    seconds = [_kill_and_ask(served) for _ in rounds]
    return {"seconds": median(seconds), "runs": seconds}


def _kill_and_ask(served: Served) -> float:
    os.statvfs(served.mountpoint)  # a server that has answered is replaced without delay
    server = os.pidfd_open(served.server)
    try:
        begin = time.perf_counter()
        signal.pidfd_send_signal(server, signal.SIGKILL)
        poll = select.poll()
        poll.register(server, select.POLLIN)
        if not poll.poll(_DEATH_SECONDS * 1000):
            raise BenchError("the killed server does not end")
        os.statvfs(served.mountpoint)  # the kernel never answers that from its cache
        return time.perf_counter() - begin
    finally:
        os.close(server)


def _listed(mountpoint: str, env: Mapping[str, str]) -> dict[str, Any]:
    """What `fsmount mounts` says of a mount."""
    for one in json.loads(run([*FSMOUNT, "mounts", "--json"], START_SECONDS, env=env)):
        if one["mountpoint"] == mountpoint:
            found: dict[str, Any] = one
            return found
    raise BenchError(f"{mountpoint} is not listed by `fsmount mounts`")
