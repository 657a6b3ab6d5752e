"""The test's side of agent.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType


class Agent:
    """A process that publishes on order; a context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("agent.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(
        self,
        path: Path,
        tag: str,
        content: dict[str, str],
        *,
        replaces: str | None = None,
        kill_at: int | None = None,
    ) -> None:
        order = {"path": str(path), "tag": tag, "content": content, "replaces": replaces}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order | {"kill_at": kill_at}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().rstrip("\n")

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._process:
            assert self._process.stdin
            self._process.stdin.close()


@contextmanager
def agents(count: int) -> Iterator[list[Agent]]:
    """So many agents at once."""
    if count == 0:
        yield []
        return
    with Agent() as first, agents(count - 1) as others:
        yield [first, *others]
