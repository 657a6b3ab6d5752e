"""Train a classifier of handwritten digits on all ranks of a torchrun job.

Usage: torchrun --nproc-per-node N train_ddp.py (--mount DIR | --files DIR) --out DIR

Writes DIR/steps.csv, DIR/epochs.csv and, from a mount, DIR/checkpoint.pt. docs/training.md is the
tutorial.
"""

import argparse
import json
import os
import sys
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from fsmount_loader import MaskedMean, ShardDataset, ShardLoader


class NpzFiles(Dataset):
    """The samples of one split, from a tree of .npz files with .json sidecars."""

    def __init__(self, root, split):
        sidecars = sorted(Path(root).rglob("*.json"))
        chosen = [path for path in sidecars if json.loads(path.read_text())["split"] == split]
        self.paths = [path.with_suffix(".npz") for path in chosen]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, number):
        with np.load(self.paths[number]) as arrays:
            return {**arrays, "__valid__": True}


def open_data(args):
    """What has `set_epoch`, the loader of split `train`, and the loader of split `val`."""
    batch, val_batch = args.global_batch // args.accumulate, 64
    if args.mount:
        train = ShardDataset(
            args.mount, where="split = 'train'", global_batch_size=batch, seed=args.seed
        )
        val = ShardDataset(args.mount, where="split = 'val'", batch_size=val_batch, evaluate=True)
        return train, ShardLoader(train, args.workers), ShardLoader(val, args.workers)
    train, val = NpzFiles(args.files, "train"), NpzFiles(args.files, "val")
    order = DistributedSampler(train, seed=args.seed)
    rank_batch, more = batch // dist.get_world_size(), {"num_workers": args.workers}
    val_order = DistributedSampler(val, shuffle=False)
    return (
        order,
        DataLoader(train, rank_batch, sampler=order, **more),
        DataLoader(val, val_batch, sampler=val_order, **more),
    )


def train_step(model, optimizer, group):
    """One optimizer step on a group of micro-batches; the mean loss of its samples."""
    count = sum(batch["__valid__"].sum() for batch in group)
    dist.all_reduce(count)  # the samples that count, over all ranks and micro-batches
    total = torch.zeros(())
    optimizer.zero_grad()
    for number, batch in enumerate(group, 1):
        with nullcontext() if number == len(group) else model.no_sync():
            losses = cross_entropy(model(batch["image"] / 16), batch["label"], reduction="none")
            loss = torch.where(batch["__valid__"], losses, 0).sum() / count
            (loss * dist.get_world_size()).backward()  # DDP divides by the number of ranks
        total += loss.detach()
    optimizer.step()
    dist.all_reduce(total)
    return total.item()


@torch.no_grad()
def validate(network, loader):
    """The mean loss and the accuracy over the samples of all ranks, each counted once."""
    network.eval()
    loss, accuracy = MaskedMean(), MaskedMean()
    for batch in loader:
        scores, label, valid = network(batch["image"] / 16), batch["label"], batch["__valid__"]
        loss.update(cross_entropy(scores, label, reduction="none"), valid)
        accuracy.update(scores.argmax(1) == label, valid)
    return loss.compute(), accuracy.compute()


class Run:
    """A model in training with its data and logs: all that a checkpoint is made of."""

    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.args, self.out, self.rank = args, Path(args.out), dist.get_rank()
        self.step, self.epoch, self.logs = 0, 0, ()
        self.data, self.loader, self.val_loader = open_data(args)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.model = DistributedDataParallel(self.network)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=3e-3)
        kept = self.restore() if args.resume and (self.out / "checkpoint.pt").exists() else (0, 0)
        if self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            self.logs = (
                open_log(self.out / "steps.csv", "step,epoch,loss", kept[0]),
                open_log(self.out / "epochs.csv", "epoch,val_loss,val_accuracy", kept[1]),
            )
            say(f"ranks: {dist.get_world_size()}, epoch {self.epoch}, {self.step} steps done")

    def restore(self):
        """Go on where the checkpoint was saved; the lengths that the logs had then."""
        saved = torch.load(self.out / "checkpoint.pt", weights_only=True)
        self.network.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.loader.load_state_dict(saved["loader"])
        self.step, self.epoch = saved["step"], saved["loader"]["epoch"]
        return saved["logs"]

    def save(self):
        """Replace the checkpoint by a whole one: whenever we are killed, there is one."""
        new = self.out / "checkpoint.new"
        with open(new, "wb") as file:
            checkpoint = {
                "model": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "loader": self.loader.state_dict() if self.args.mount else None,
                "step": self.step,
                "logs": [log.tell() for log in self.logs],
            }
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.out / "checkpoint.pt")

    def train_epoch(self):
        """The rest of `self.epoch`; only rank 0 logs and saves."""
        self.network.train()
        self.data.set_epoch(self.epoch)
        batches = iter(self.loader)
        while group := list(islice(batches, self.args.accumulate)):
            loss = train_step(self.model, self.optimizer, group)
            self.step += 1
            if self.rank == 0:
                print(f"{self.step},{self.epoch},{loss:.8g}", file=self.logs[0])
                if self.step % self.args.save_every == 0:
                    self.save()

    def train(self):
        """All epochs that are left."""
        for epoch in range(self.epoch, self.args.epochs):
            self.epoch = epoch
            self.train_epoch()
            if self.rank == 0 and epoch == self.args.epochs - 1:
                self.save()  # before validating: who resumes here validates again
            loss, accuracy = validate(self.network, self.val_loader)
            if self.rank == 0:
                print(f"{self.epoch},{loss:.8g},{accuracy:.8g}", file=self.logs[1])
                say(f"epoch {self.epoch}: validation loss {loss:.3f}, accuracy {accuracy:.3f}")


def say(text):
    print(text, flush=True)


def open_log(path, columns, kept):
    """A CSV file to add rows to, after the first `kept` bytes of an earlier run's."""
    file = open(path, "a", buffering=1)  # noqa: SIM115 - it is open until the end
    file.truncate(kept)
    file.seek(0, os.SEEK_END)
    if not kept:
        print(columns, file=file)
    return file


def parse(words):
    parser = argparse.ArgumentParser()
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--mount", help="read a mounted version")
    source.add_argument("--files", help="read .npz files instead")
    parser.add_argument("--out", required=True, help="directory of logs and checkpoint")
    parser.add_argument(
        "--resume", action="store_true", help="from the checkpoint, if there is one"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=64, help="samples of an optimizer step")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--workers", type=int, default=0, help="processes of each rank that read")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order")
    args = parser.parse_args(words)
    if args.global_batch % args.accumulate:
        parser.error("--accumulate must divide --global-batch")
    if args.resume and args.files:
        parser.error("--resume needs --mount: a DataLoader of files has no state")
    if not args.resume and Path(args.out, "checkpoint.pt").exists():
        parser.error("--out has a checkpoint: give --resume, or another directory")
    return args


def main():
    args = parse(sys.argv[1:])
    dist.init_process_group("gloo")
    Run(args).train()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts now and then


if __name__ == "__main__":
    main()
