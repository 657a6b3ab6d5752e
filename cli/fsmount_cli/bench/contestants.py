"""What `fsmount bench load` measures, each in a process of its own: one run for a line of input."""

from __future__ import annotations

import glob
import itertools
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import zstandard
from torch.utils.data import DataLoader, Dataset, default_collate

from fsmount_loader import ShardDataset, ShardLoader
from fsmount_loader.options import Options
from fsmount_loader.plan import make_plan
from fsmount_loader.version import VersionFiles

_PAYLOADS_MAX = 4096  # that the limit is measured on; they are kept in memory
_CHECKSUM_FLAG = 4  # of byte 4 of a zstd frame

Batches = Iterable[Any]
Start = Callable[[], tuple[int, Batches]]  # samples in a batch, and the batches


class Contest:
    """The loaders that can be measured, by name and number of workers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.version: str = settings["version"]
        self.npz: str | None = settings["npz"]
        self.batch_size: int = settings["batch_size"]
        self.samples: int = settings["samples"]

    def start(self, name: str) -> Start:
        """What begins a run of the contestant `name`, as `ours-2`."""
        kind, _, count = name.partition("-")
        made = getattr(self, kind)
        return lambda: made(int(count))

    def dataset(self) -> ShardDataset:
        """The dataset that ours and torch's loader share."""
        return ShardDataset(
            self.version, batch_size=self.batch_size, rank=0, world_size=1, max_pad_fraction=1
        )

    def ours(self, workers: int) -> tuple[int, Batches]:
        """ShardLoader."""
        return self.batch_size, ShardLoader(self.dataset(), workers)

    def dataloader(self, workers: int) -> tuple[int, Batches]:
        """torch's DataLoader over ShardDataset."""
        return self.batch_size, DataLoader(self.dataset(), batch_size=None, num_workers=workers)

    def webdataset(self, workers: int) -> tuple[int, Batches]:
        """The webdataset library over the same shards, decoded and batched, not shuffled."""
        import webdataset  # noqa: PLC0415 - optional

        shards = glob.glob(os.path.join(glob.escape(self.version), "shards/**/*.tar"), recursive=True)
        read = webdataset.WebDataset(sorted(shards), shardshuffle=False, empty_check=False)
        batches = read.map(_decoded_member).batched(self.batch_size, collation_fn=default_collate)
        return self.batch_size, DataLoader(batches, batch_size=None, num_workers=workers)

    def npz(self, workers: int) -> tuple[int, Batches]:  # type: ignore[no-redef]
        """torch's DataLoader over files."""
        files = glob.glob(os.path.join(glob.escape(str(self.npz)), "**/*.npz"), recursive=True)
        data = _Npz(sorted(files))
        return self.batch_size, DataLoader(
            data, batch_size=self.batch_size, shuffle=True, num_workers=workers
        )


class _Npz(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, files: list[str]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        with np.load(self._files[place]) as arrays:
            return {name: torch.as_tensor(arrays[name]) for name in arrays.files}
