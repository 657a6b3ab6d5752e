"""Which rank this process is, and the check that all ranks are about to load the same."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch.distributed import device_mesh as meshes

from fsmount.errors import PlanError, RankMismatchError
from fsmount_loader.options import whole

DATA_DIMENSIONS = (
    "dp", "ddp", "fsdp", "data", "data_parallel", "batch", "replicate", "shard", "dp_replicate",
    "dp_shard",
)  # fmt: skip


class _Store(Protocol):
    """What we use of torch.distributed's stores."""

    def add(self, key: str, amount: int) -> int: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank among `world_size`; `peers` are the global ranks to agree with, if any.

    It is `assumed` if nothing said which it is.
    """

    rank: int
    world_size: int
    peers: tuple[int, ...] = ()
    assumed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise PlanError(f"rank={self.rank} of world_size={self.world_size}")


def find_placement(
    rank: int | None,
    world_size: int | None,
    group: dist.ProcessGroup | None = None,
    mesh: meshes.DeviceMesh | None = None,
) -> Placement:
    """The arguments if they are given, else torch.distributed's rank, else RANK and WORLD_SIZE.

    `rank` and `world_size` opt out of agreement, and so does the environment, which offers no way
    to agree. Raises PlanError if only one of the two is given, or several ways to say the rank.
    """
    if (rank is None) != (world_size is None):
        raise PlanError("rank and world_size go together")
    ways = {"rank and world_size": rank, "process_group": group, "device_mesh": mesh}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise PlanError(f"give {given[0]}, or {given[1]}, not both")
    if rank is not None and world_size is not None:
        return _placement("rank", rank, "world_size", world_size)
    if mesh is not None:
        return _in_mesh(mesh)
    if dist.is_available() and dist.is_initialized():
        if not isinstance(group, dist.ProcessGroup | None):
            raise PlanError(f"process_group must be a group that this rank is in, not {group!r}")
        peers = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        return Placement(dist.get_rank(group), dist.get_world_size(group), peers)
    if group is not None:
        raise PlanError("process_group needs torch.distributed to be initialised")
    return _from_environment()


def check_alone() -> None:
    """Raise PlanError if there are ranks now that an assumed placement could not know of."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise PlanError(
            "this dataset was made for rank 0 of 1 before torch.distributed was initialised, so "
            f"all {dist.get_world_size()} ranks would load the same: make it afterwards"
        )


def _in_mesh(mesh: meshes.DeviceMesh) -> Placement:
    """The place in a mesh whose dimensions are all data-parallel, in row-major order."""
    if not (dist.is_available() and isinstance(mesh, meshes.DeviceMesh)):
        raise PlanError(f"device_mesh must be a DeviceMesh, not {mesh!r}")
    names = mesh.mesh_dim_names
    if names is None and mesh.ndim > 1:
        raise PlanError("device_mesh has several dimensions without names; give mesh_dim_names")
    others = [name for name in names or () if name not in DATA_DIMENSIONS]
    if others:
        raise PlanError(_not_data(names or (), others))
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PlanError("device_mesh must be a mesh that this rank is in")
    rank = 0
    for place, size in zip(coordinate, mesh.shape, strict=True):
        rank = rank * size + place
    return Placement(rank, mesh.size(), tuple(mesh.mesh.flatten().tolist()))


def _not_data(names: Sequence[str], others: Sequence[str]) -> str:
    wanted = ", ".join(f'"{name}"' for name in names if name not in others)
    how = f"device_mesh=mesh[{wanted}]" if wanted else "the data-parallel part of the mesh"
    return (
        f"device_mesh has the dimension {others[0]!r}, not known to be data-parallel; give {how}, "
        "or process_group= with the group of the ranks that share the samples out"
    )


def _from_environment() -> Placement:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return Placement(0, 1, assumed=True)
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
