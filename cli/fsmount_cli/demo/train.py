"""Train a small classifier from a mounted version; run by torchrun.

python -m torch.distributed.run --nproc-per-node 2 -m fsmount_cli.demo.train MOUNT
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsmount_loader import ShardDataset, ShardLoader

_EPOCHS = 24


def main(mounted: str) -> None:
    """Train on the samples of split `train`, then print the accuracy on those of split `test`."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    train = ShardDataset(mounted, batch_size=32, where="split = 'train'", seed=0)
    test = ShardDataset(mounted, batch_size=64, where="split = 'test'", evaluate=True)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = ShardLoader(train)
    for epoch in range(_EPOCHS):
        train.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["image"] / 16), batch["label"])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if dist.get_rank() == 0 and epoch % 8 == 7:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}", flush=True)
    accuracy = _accuracy(network, ShardLoader(test))
    if dist.get_rank() == 0:
        print(f"test accuracy: {accuracy:.3f}", flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts now and then


@torch.no_grad()
def _accuracy(network: nn.Module, loader: ShardLoader) -> float:
    """The share of right answers over all ranks, each sample counted once."""
    counts = torch.zeros(2, dtype=torch.int64)
    for batch in loader:
        right = network(batch["image"] / 16).argmax(1) == batch["label"]
        valid = batch["__valid__"]
        counts += torch.stack([(right & valid).sum(), valid.sum()])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


if __name__ == "__main__":
    main(sys.argv[1])
