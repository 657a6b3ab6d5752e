"""Run under torchrun by test_training.py: many runs of docs/train_ddp.py in one process group.

Usage: torchrun many_runs.py RUNS, a JSON file with the arguments of each run
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
import train_ddp  # type: ignore[import-not-found]


class ReadOnce(train_ddp.NpzFiles):  # type: ignore[misc]
    """The files of a tree, kept in memory for the next run."""

    __getitem__ = cache(train_ddp.NpzFiles.__getitem__)


def main() -> None:
    dist.init_process_group("gloo")
    train_ddp.NpzFiles = cache(ReadOnce)
    for words in json.loads(Path(sys.argv[1]).read_text()):
        train_ddp.Run(train_ddp.parse(words)).train()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts now and then


if __name__ == "__main__":
    main()
