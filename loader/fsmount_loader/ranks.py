"""Which rank this process is, and the check that all ranks are about to load the same."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from fsmount.errors import PlanError, RankMismatchError
from fsmount_loader.options import whole


class _Store(Protocol):
    """What we use of torch.distributed's stores."""

    def add(self, key: str, amount: int) -> int: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank among `world_size`; `peers` are the global ranks to agree with, if any."""

    rank: int
    world_size: int
    peers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise PlanError(f"rank={self.rank} of world_size={self.world_size}")


def find_placement(
    rank: int | None, world_size: int | None, group: dist.ProcessGroup | None
) -> Placement:
    """The arguments if they are given, else torch.distributed's rank, else RANK and WORLD_SIZE.

    Explicit arguments opt out of agreement, and so does the environment, which offers no way to
    agree. Raises PlanError if only one of the two is given, or a group as well.
    """
    if (rank is None) != (world_size is None):
        raise PlanError("rank and world_size go together")
    if rank is not None and world_size is not None:
        if group is not None:
            raise PlanError("give rank and world_size, or process_group, not both")
        return _placement("rank", rank, "world_size", world_size)
    if dist.is_available() and dist.is_initialized():
        if not isinstance(group, dist.ProcessGroup | None):
            raise PlanError(f"process_group must be a group that this rank is in, not {group!r}")
        peers = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        return Placement(dist.get_rank(group), dist.get_world_size(group), peers)
    if group is not None:
        raise PlanError("process_group needs torch.distributed to be initialised")
    return _from_environment()


def _from_environment() -> Placement:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return Placement(0, 1)
    try:
        given = int(rank or ""), int(world_size or "")
    except ValueError:
        raise PlanError(f"RANK={rank!r} and WORLD_SIZE={world_size!r} in the environment") from None
    return _placement("RANK", given[0], "WORLD_SIZE", given[1])


def _placement(name: str, rank: object, of: str, world_size: object) -> Placement:
    return Placement(whole(name, rank, 0, 31), whole(of, world_size, 1, 31))


def agree(placement: Placement, mine: Mapping[str, object], timeout: float) -> None:
    """Return on all ranks if all came with an equal `mine`, else raise RankMismatchError on all.

    A collective through the process group's store: no device takes part, and a rank that does not
    come within `timeout` seconds is named. The message names what differs and the first two ranks.
    """
    if len(placement.peers) < 2:
        return
    name = hashlib.sha256(repr(placement.peers).encode()).hexdigest()[:16]
    # Not public, but there is no other way to reach the store with a time-out on every back end.
    store: _Store = dist.PrefixStore(  # type: ignore[attr-defined]
        f"fsmount/{name}", dist.distributed_c10d._get_default_store()
    )
    call = store.add(f"calls/{placement.rank}", 1)
    store.set(f"{call}/{placement.rank}", json.dumps(mine, sort_keys=True, default=repr))
    if placement.rank == 0:
        store.set(f"{call}/verdict", _verdict(store, placement.world_size, call, timeout))
    elif not _wait(store, f"{call}/verdict", 2 * timeout):
        raise RankMismatchError(f"rank 0 did not come to agree within {2 * timeout:g} s")
    verdict = store.get(f"{call}/verdict").decode()
    if verdict:
        raise RankMismatchError(verdict)


def _verdict(store: _Store, world_size: int, call: int, timeout: float) -> str:
    end = time.monotonic() + timeout
    seen: list[dict[str, object]] = []
    for rank in range(world_size):
        if not _wait(store, f"{call}/{rank}", end - time.monotonic()):
            return f"rank {rank} did not come to agree within {timeout:g} s"
        seen.append(json.loads(store.get(f"{call}/{rank}")))
    return next((_difference(seen[0], other, rank) for rank, other in enumerate(seen)
                 if other != seen[0]), "")  # fmt: skip


def _difference(first: dict[str, object], other: dict[str, object], rank: int) -> str:
    for which, told in ((0, first), (rank, other)):
        if "error" in told:
            return f"rank {which} can't load: {told['error']}"
    names = [n for n in sorted(first.keys() | other.keys()) if first.get(n) != other.get(n)]
    apart = (f"{n}: {first.get(n)!r} on rank 0, {other.get(n)!r} on {rank}" for n in names)
    return f"ranks disagree: {'; '.join(apart)}"


def _wait(store: _Store, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(seconds, 0.01)))
    except dist.DistStoreError:
        return False
    return True
