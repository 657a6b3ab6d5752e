"""Publishes tiny versions in a process of its own, which may kill itself at the n-th step.

Each line of stdin is one order in JSON: path, tag, content, replaces, kill_at (null: never). Each
is carried out in a fork, since a killed process can't go on; the answer is one line: "killed", or
what `Store.publish` returned, or the name of the error and its text.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from handmade import publish_version

from fsmount.errors import FsmountError
from fsmount.store import Store

# Every call of `os` by which a store is changed.
MUTATING = (
    *("chmod", "fchmod", "fsync", "ftruncate", "link", "mkdir", "open", "rename", "replace"),
    *("rmdir", "symlink", "truncate", "unlink", "utime", "write"),
)


class Countdown:
    """Kills the process instead of its n-th mutating call; a write is torn in half first."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def arm(self) -> None:
        for name in MUTATING:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:  # it changes nothing
                return call(*args, **kwargs)
            if self._left == 0:
                if name == "write":
                    call(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
            return call(*args, **kwargs)

        return counted


def carry_out(order: dict[str, Any]) -> str:
    content = {name: data.encode() for name, data in order["content"].items()}
    try:
        store = Store.create(order["path"])
        return str(publish_version(store, order["tag"], content, replaces=order["replaces"]))
    except FsmountError as error:
        return f"{type(error).__name__}: {error}"


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
        return "killed"
    return answer or f"exit status {status}"


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(in_a_fork(json.loads(line)) + "\n")
        sys.stdout.flush()
