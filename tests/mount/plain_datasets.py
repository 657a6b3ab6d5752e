"""Map-style datasets as anybody would write them, in a module that spawned workers can import."""

from __future__ import annotations

import os
import tarfile

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load
from torch.utils.data import Dataset
from zstandard import ZstdDecompressor

SUFFIX = ".safetensors"
Item = tuple[str, bytes]  # a sample's key, and the bytes of its array `values`


def content(values: torch.Tensor) -> bytes:
    """A tensor's bytes."""
    return np.ascontiguousarray(values.numpy()).tobytes()


class SampleFiles(Dataset[Item]):
    """Reads one file for each sample: `samples/<key>.safetensors`."""

    def __init__(self, root: str, partition: str) -> None:
        self._root = f"{root}/samples"
        names = sorted(os.listdir(f"{self._root}/{partition}"))
        stems = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
        self._keys = [f"{partition}/{stem}" for stem in stems]

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, at: int) -> Item:
        key = self._keys[at]
        with safe_open(f"{self._root}/{key}{SUFFIX}", framework="pt") as file:
            return key, content(file.get_tensor("values"))


class ShardMembers(Dataset[Item]):
    """Reads the members of shards, which it has looked up and opened where it was made.

    Forked workers share its descriptors; spawned ones open the shards themselves.
    """

    def __init__(self, root: str, partition: str) -> None:
        self._directory = f"{root}/shards/{partition}"
        self._files: dict[str, int] = {}
        self._members: list[tuple[str, str, int, int]] = []
        for shard in sorted(os.listdir(self._directory)):
            with tarfile.open(f"{self._directory}/{shard}") as archive:
                for member in archive:
                    key = member.name.removesuffix(f"{SUFFIX}.zst")
                    self._members.append((key, shard, member.offset_data, member.size))
            self._open(shard)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_files": {}}

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, at: int) -> Item:
        key, shard, offset, size = self._members[at]
        payload = os.pread(self._open(shard), size, offset)
        return key, content(load(ZstdDecompressor().decompress(payload))["values"])

    def close(self) -> None:
        """Close what it has opened."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _open(self, shard: str) -> int:
        if shard not in self._files:
            self._files[shard] = os.open(f"{self._directory}/{shard}", os.O_RDONLY)
        return self._files[shard]
