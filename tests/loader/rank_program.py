"""Run under torchrun by test_ranks.py: what each rank sees, written to a file of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsmount.errors import FsmountError
from fsmount_loader import MaskedMean, ShardDataset, ShardLoader


def outcome(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except FsmountError as error:
        return f"{type(error).__name__}: {error}"


def train(root: str) -> list[list[int]]:
    data = ShardDataset(root, batch_size=3)
    return [batch["x"][:, 0].long().tolist() for batch in ShardLoader(data, 1)]


def evaluate(root: str) -> float:
    mean = MaskedMean()
    for batch in ShardDataset(root, batch_size=4, evaluate=True):
        mean.update(batch["x"][:, 0], batch["__valid__"])
    return mean.compute()


def main() -> None:
    one, other, out = sys.argv[1:]
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    group, lone = dist.new_group([1, 0]), dist.new_group([0])
    quick: dict[str, Any] = {"batch_size": 3, "agreement_timeout": 60}
    results = {
        "train": outcome(lambda: train(one)),
        "evaluate": outcome(lambda: evaluate(one)),
        "group": outcome(lambda: len(ShardDataset(one, process_group=group, **quick))),
        "outside": outcome(lambda: len(ShardDataset(one, process_group=lone, **quick))),
        "version": outcome(lambda: ShardDataset(one if rank else other, **quick)),
        "seed": outcome(lambda: ShardDataset(one, seed=rank, **quick)),
        "shapes": outcome(lambda: ShardDataset(one, shapes=("pad", "list")[rank], **quick)),
        "buckets": outcome(
            lambda: ShardDataset(one, bucket_by="n", bucket_size=4 << rank, **quick)
        ),
        "missing": outcome(lambda: ShardDataset(one + "x" * rank, **quick)),
        "alone": outcome(
            lambda: len(ShardDataset(one, batch_size=3, rank=0, world_size=1)) if not rank else None
        ),
        "late": outcome(
            lambda: ShardDataset(one, batch_size=3, agreement_timeout=1) if not rank else None
        ),
    }
    Path(out, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts now and then


if __name__ == "__main__":
    main()
