"""What `fsmount bench load` measures, each in a process of its own: one run for a line of input."""

from __future__ import annotations

import gc
import glob
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors.torch import load as load_tensors
from torch.utils.data import DataLoader, Dataset, default_collate

from fsmount_loader import ShardDataset, ShardLoader
from fsmount_loader.options import Options, Shapes
from fsmount_loader.plan import make_plan
from fsmount_loader.version import VersionFiles

_PAYLOADS_MAX = 4096  # that the limit is measured on; they are kept in memory
_DESCRIPTOR, _CHECKSUM_FLAG = 4, 4  # the byte of a zstd frame with its flags, and one of them

Batches = Iterable[Any]


class Contest:
    """The loaders that can be measured, by name and number of workers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._version: str = settings["version"]
        self._files: str | None = settings["npz"]
        self._batch_size: int = settings["batch_size"]
        self._samples: int = settings["samples"]
        self._shapes: Shapes = settings["shapes"]
        self._fields: list[str] | None = settings["fields"]
        self._collate = default_collate if self._shapes == "error" else _listed
        self._payloads: list[bytearray] = []
        self._raw_size = 0

    def run(self, name: str) -> dict[str, float]:
        """One run of a contestant, as `ours-2`: rate, CPU of all processes, first batch, memory."""
        kind, _, count = name.partition("-")
        if kind in ("limit", "stored"):
            self._read_payloads(checked=kind == "stored")
            return self._measure(lambda: self._limit(int(count)), 1)
        made: dict[str, Callable[[int], Batches]] = {
            "ours": self._ours,
            "dataloader": self._dataloader,
            "webdataset": self._webdataset,
            "npz": self._npz,
        }
        return self._measure(lambda: made[kind](int(count)), self._batch_size)

    def _measure(self, begin: Callable[[], Batches], size: int) -> dict[str, float]:
        cpu, start, done, first = _cpu(), time.perf_counter(), 0, 0.0
        batches = begin()
        begun = time.perf_counter()
        iterator = iter(batches)
        for batch in iterator:
            first = first or time.perf_counter() - start
            done += batch if isinstance(batch, int) else size
            if done >= self._samples:
                break
        seconds = time.perf_counter() - begun
        del batches, iterator  # ends workers, so that their CPU time counts
        gc.collect()
        return {
            "samples_per_second": done / seconds,
            "cpu_us_per_sample": (_cpu() - cpu) / done * 1e6,
            "first_batch_seconds": first,
            "rss_mb": _rss() / 1e6,
            "samples": done,
        }

    def _dataset(self) -> ShardDataset:
        return ShardDataset(
            self._version,
            batch_size=self._batch_size,
            rank=0,
            world_size=1,
            max_pad_fraction=1,
            shapes=self._shapes,
            fields=self._fields,
        )

    def _ours(self, workers: int) -> Batches:
        # It does nothing but wait, which is no news: no time is kept.
        return ShardLoader(self._dataset(), workers, clock=lambda: 0.0)

    def _dataloader(self, workers: int) -> Batches:
        return DataLoader(self._dataset(), batch_size=None, num_workers=workers)

    def _webdataset(self, workers: int) -> Batches:
        import webdataset  # noqa: PLC0415 - optional

        pattern = os.path.join(glob.escape(self._version), "shards/**/*.tar")
        shards = sorted(glob.glob(pattern, recursive=True))
        read = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
        batches = read.map(_decoded_member).batched(self._batch_size, collation_fn=self._collate)
        return DataLoader(batches, batch_size=None, num_workers=workers)

    def _npz(self, workers: int) -> Batches:
        pattern = os.path.join(glob.escape(str(self._files)), "**/*.npz")
        data = _Npz(sorted(glob.glob(pattern, recursive=True)))
        return DataLoader(
            data, self._batch_size, shuffle=True, num_workers=workers, collate_fn=self._collate
        )

    def _read_payloads(self, *, checked: bool) -> None:
        """Read payloads in the epoch's order, with zstd's own checksum or without."""
        if self._payloads:
            return
        plan = make_plan(VersionFiles.open(self._version), Options(batch_size=1), alike=False)
        chosen = np.random.default_rng(0).permutation(len(plan.rows))[:_PAYLOADS_MAX]
        for row in chosen.tolist():
            with open(plan.shards[plan.rows.shard[row]], "rb") as file:
                file.seek(int(plan.rows.offset[row]))
                payload = bytearray(file.read(int(plan.rows.size[row])))
            if not checked and payload[_DESCRIPTOR] & _CHECKSUM_FLAG:
                payload[_DESCRIPTOR] ^= _CHECKSUM_FLAG
                del payload[-4:]
            self._payloads.append(payload)
        self._raw_size = max(plan.layout.raw_size)

    def _limit(self, threads: int) -> Iterator[int]:
        """Decompress each payload into one buffer of its thread; yields the number when done."""
        rounds = max(1, self._samples // len(self._payloads))
        shares = [self._payloads[number::threads] for number in range(threads)]
        running = [threading.Thread(target=self._decompress, args=(s, rounds)) for s in shares]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        yield rounds * len(self._payloads)

    def _decompress(self, payloads: list[bytearray], rounds: int) -> None:
        buffer = memoryview(bytearray(self._raw_size))
        read = zstandard.ZstdDecompressor().stream_reader
        for _ in range(rounds):
            for payload in payloads:
                read(payload).readinto(buffer)


class _Npz(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, files: list[str]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        with np.load(self._files[place]) as arrays:
            return {name: torch.as_tensor(arrays[name]) for name in arrays.files}


def _listed(samples: list[Any]) -> list[Any]:
    """A batch of samples that differ in shape."""
    return samples


def _decoded_member(sample: dict[str, Any]) -> dict[str, torch.Tensor]:
    payload = next(value for name, value in sample.items() if name.endswith("safetensors.zst"))
    return dict(load_tensors(zstandard.ZstdDecompressor().decompress(payload)))


def _cpu() -> float:
    """Seconds of CPU of this process and of those that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _rss() -> int:
    """The largest peak of this process and its former children, in bytes."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(usage.ru_maxrss for usage in usages) << 10


def main(arguments: Sequence[str]) -> None:
    """Run the contestant `arguments[0]` for each line of input; `arguments[1]` has the settings."""
    name, settings = arguments
    contest = Contest(json.loads(settings))
    for _ in sys.stdin:
        try:
            answer: dict[str, Any] = contest.run(name)
        except Exception as error:  # noqa: BLE001 - it is told to the process that asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
