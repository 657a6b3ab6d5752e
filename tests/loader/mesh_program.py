"""Run under torchrun by test_mesh.py: what each of four ranks loads by a device mesh."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_program import outcome
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsmount_loader import ShardDataset, ShardLoader


def loaded(root: str, **options: Any) -> list[list[int]]:
    data = ShardDataset(root, batch_size=2, agreement_timeout=60, **options)
    return [batch["x"][:, 0].long().tolist() for batch in ShardLoader(data)]


def made_too_early(root: str) -> ShardDataset:
    """A dataset made before anything says which rank it is for."""
    told = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    data = ShardDataset(root, batch_size=2)
    os.environ |= told
    return data


def main() -> None:
    root, out = sys.argv[1:]
    rank = int(os.environ["RANK"])
    early = made_too_early(root)
    dist.init_process_group("gloo")
    tensor = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    names = ("dp_replicate", "dp_shard", "tp")
    both = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=names)
    nameless = init_device_mesh("cpu", (2, 2))
    group = tensor["dp"].get_group()
    meshes: dict[str, Any] = {
        "tensor": tensor["dp"],
        "hybrid": hybrid,
        "both": both["dp_replicate", "dp_shard"],
        "flat": init_device_mesh("cpu", (4,)),
        "whole": tensor,
        "tensor alone": tensor["tp"],
        "all three": both,
        "nameless": nameless,
        "part": DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("dp",)),
        "no mesh": "dp",
    }
    results = {
        name: outcome(lambda mesh=mesh: loaded(root, device_mesh=mesh))  # type: ignore[misc]
        for name, mesh in meshes.items()
    }
    results |= {
        "group": outcome(lambda: loaded(root, process_group=group)),
        "twice": outcome(lambda: loaded(root, process_group=group, device_mesh=hybrid)),
        "seed": outcome(lambda: loaded(root, device_mesh=tensor["dp"], seed=rank // 2)),
        "early": outcome(lambda: len(list(ShardLoader(early)))),
    }
    Path(out, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # as rank_program.py


if __name__ == "__main__":
    main()
