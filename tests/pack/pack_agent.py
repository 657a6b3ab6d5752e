"""Packs on order in forks of this process, each of which may kill itself at its n-th step.

Each line of stdin is one order in JSON: source, store, tag, kill_at (null: never). The answer is
one line of JSON: "killed", or the content revision and the number of samples that were read.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from fsmount.pack import PackOptions, Silent, pack

# Every call by which a pack changes a store.
MUTATING = (
    *("chmod", "fchmod", "fsync", "ftruncate", "link", "mkdir", "open", "remove", "rename"),
    *("replace", "rmdir", "symlink", "truncate", "unlink", "utime", "write"),
)


class Countdown:
    """Kills the process instead of its n-th mutating call; a write is torn in half first."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def arm(self) -> None:
        for name in MUTATING:
            setattr(os, name, self._counted(name, getattr(os, name)))
        builtins.open = self._counted_open(builtins.open)

    def _step(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:  # it changes nothing
                return call(*args, **kwargs)
            if self._left == 0 and name == "write":
                call(args[0], bytes(args[1])[: len(args[1]) // 2])
            self._step()
            return call(*args, **kwargs)

        return counted

    def _counted_open(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wxa+"):
                self._step()
            return call(file, mode, *args, **kwargs)

        return counted


def carry_out(order: dict[str, Any]) -> str:
    try:
        report = pack(order["source"], order["store"], PackOptions(order["tag"]), Silent())
    except BaseException:  # noqa: BLE001 - whatever it is, the test must see it
        return json.dumps(traceback.format_exc())
    return json.dumps([report.document.content_revision, report.samples_read])


def in_a_fork(order: dict[str, Any]) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        say = os.write
        if order["kill_at"] is not None:
            Countdown(order["kill_at"]).arm()
        say(writer, carry_out(order).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return json.dumps("killed")
    return answer or json.dumps(f"exit status {status}")


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(in_a_fork(json.loads(line)) + "\n")
        sys.stdout.flush()
