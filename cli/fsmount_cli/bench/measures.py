"""What `fsmount bench mount` measures on one version."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from fsmount_cli.bench import metadata, reading, survival
from fsmount_cli.bench.reading import Reader, Rounds
from fsmount_cli.bench.scratch import UnavailableError
from fsmount_cli.bench.served import MOUNTS, PASSTHROUGH, Served, Target, serving

MEASURES = ("start", "warm", "cold", "page_cache", "recovery", "metadata")


class Bench:
    """The measures on one version, in a scratch directory. Its mounts last until `stack` ends."""

    def __init__(
        self,
        target: Target,
        scratch: str,
        rounds: Rounds,
        stack: ExitStack,
        tell: Callable[[str], None],
        *,
        drop_caches: bool,
    ) -> None:
        """`tell` hears what is done; `drop_caches`: of the whole machine, for cold runs."""
        self._target = target
        self._scratch = scratch
        self._rounds = rounds
        self._stack = stack
        self._tell = tell
        self._drop_caches = drop_caches
        self._left_out: dict[str, str] = {}

    def run(self, names: Sequence[str]) -> dict[str, Any]:
        """Take the measures `names`; the result, ready for JSON.

        What can't be had on this machine is not in it, but in `left_out` with the reason. Raises
        BenchError for what should have worked.
        """
        found: dict[str, Any] = {"settings": self._settings()}
        measures: dict[str, Callable[[], Any]] = {
            "start": self._start,
            "warm": self._warm,
            "cold": self._cold,
            "page_cache": self._page_cache,
            "recovery": self._recovery,
            "metadata": self._metadata,
        }
        for name in names:
            self._tell(f"measuring {name}")
            try:
                found[name] = measures[name]()
            except UnavailableError as error:
                self._leave_out(name, error)
        return {**found, "left_out": self._left_out}

    def _settings(self) -> dict[str, Any]:
        document = self._target.document
        return {
            "store": self._target.store.path,
            "tag": document.tag,
            "table": document.table.digest,
            "shards_read": len(self._target.shards),
            "bytes_read": self._target.size,
            "rounds": self._rounds.count,
            "drop_caches": self._drop_caches,
            "kernel": platform.release(),
            "cpus": len(os.sched_getaffinity(0)),
            "root": os.geteuid() == 0,
        }

    def _start(self) -> dict[str, Any]:
        return survival.start(self._target, self._scratch, self._rounds)

    def _warm(self) -> dict[str, Any]:
        return reading.warm(self._target, self._readers, self._rounds) | self._passthrough()

    def _cold(self) -> dict[str, Any]:
        found = reading.cold(
            self._target, self._readers, self._rounds, everything=self._drop_caches
        )
        return found | self._passthrough()

    def _page_cache(self) -> dict[str, Any]:
        return reading.page_cache(self._target, self._readers)

    def _recovery(self) -> dict[str, Any]:
        with serving(PASSTHROUGH, self._target, f"{self._scratch}/recovery") as served:
            return survival.recovery(served, self._rounds)

    def _metadata(self) -> dict[str, Any]:
        scratch = f"{self._scratch}/metadata"
        return metadata.metadata(self._target, scratch, self._rounds, everything=self._drop_caches)

    @cached_property
    def _readers(self) -> list[Reader]:
        return reading.readers_of(self._target, list(self._mounts()))

    def _mounts(self) -> Iterator[Served]:
        for name in MOUNTS:
            try:
                yield self._stack.enter_context(serving(name, self._target, self._scratch))
            except UnavailableError as error:
                self._leave_out(name, error)

    def _passthrough(self) -> dict[str, bool]:
        """Whether what is called passthrough is: the kernel may refuse it for these files."""
        found = [reader for reader in self._readers if reader.name == PASSTHROUGH]
        return {"passthrough_used": any(reading.by_passthrough(self._target, one) for one in found)}

    def _leave_out(self, name: str, error: UnavailableError) -> None:
        self._left_out[name] = str(error)
        self._tell(f"left out: {name}: {error}")
